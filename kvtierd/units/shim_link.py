"""Talking to shims: starting one, connecting to one, one request and its answer. Every call has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import kvtierd
from kvtierd.errors import UnitError
from kvtierd.units import shim_record

START_LIMIT_SECONDS = 20.0
ANSWER_LIMIT_SECONDS = 3.0
_LONGEST_ANSWER_BYTES = 1 << 20
_BOOT_LAUNCHER = "import sys; sys.path.append(sys.argv[1]); from kvtierd.units.shim_start import main; main()"
_IMPORT_ROOT = str(Path(kvtierd.__file__).parent.parent)

Record = dict[str, Any]  # see kvtierd.units.shim_record


class NoAnswerError(Exception):
    """The shim cannot be reached: it has gone or it hangs."""


async def connect(directory: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to the shim of the unit with this directory.

    By way of the directory's descriptor, since a socket address holds only 107 bytes.
    """
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise NoAnswerError from error
    try:
        async with asyncio.timeout(ANSWER_LIMIT_SECONDS):
            path = f"/proc/self/fd/{fd}/{shim_record.SOCKET}"
            return await asyncio.open_unix_connection(path, limit=_LONGEST_ANSWER_BYTES)
    except (OSError, TimeoutError) as error:
        raise NoAnswerError from error
    finally:
        os.close(fd)


async def read_answer(reader: asyncio.StreamReader, limit_seconds: float | None) -> dict[str, Any]:
    """The next answer on this connection."""
    try:
        async with asyncio.timeout(limit_seconds):
            answer = json.loads(await reader.readline())
    except (OSError, TimeoutError, ValueError) as error:
        raise NoAnswerError from error
    if not isinstance(answer, dict):
        raise NoAnswerError
    return answer


async def ask(directory: Path, request: dict[str, Any], limit_seconds: float) -> dict[str, Any]:
    """One request and its answer, on a connection of its own."""
    reader, writer = await connect(directory)
    try:
        writer.write(json.dumps(request).encode() + b"\n")
        return await read_answer(reader, limit_seconds)
    finally:
        writer.close()


async def launch(python: str, directory: Path, request: dict[str, Any]) -> Record:
    """Runs ``kvtierd.units.shim_start`` with this request and returns the new record.

    Raises:
        UnitError: with the launcher's code, or ``unit.start`` (too slow) or ``unit.shim-died`` (no answer at all).
    """
    unit_id = directory.name
    library_path = os.environ.get(
        "LD_LIBRARY_PATH"
    )  # the interpreter itself may need it; the unit never sees it
    process = await asyncio.create_subprocess_exec(
        *(python, "-I", "-S", "-c", _BOOT_LAUNCHER, _IMPORT_ROOT, unit_id),
        env={"LC_ALL": "C.UTF-8"} | ({"LD_LIBRARY_PATH": library_path} if library_path else {}),
        cwd="/",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    errors = b""
    try:
        async with asyncio.timeout(START_LIMIT_SECONDS):
            text = json.dumps({"directory": str(directory), "root": _IMPORT_ROOT, **request})
            output, errors = await process.communicate(text.encode())
        answer = json.loads(output)
    except TimeoutError:
        message = f"the shim of {unit_id} was not up after {START_LIMIT_SECONDS:.0f} s"
        raise UnitError(message, code="unit.start") from None
    except ValueError:
        last_words = errors.decode(errors="replace").strip().splitlines()[-1:]
        why = f"it said: {last_words[0]}" if last_words else ""
        raise UnitError(
            f"the shim of {unit_id} could not be started", why=why, code="unit.shim-died"
        ) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if not answer["ok"]:
        raise UnitError(answer["message"], hint=answer["hint"], code=answer["code"])
    record: Record = answer["record"]
    return record
