"""How the host room looks at a machine: files under a movable root, commands through a replaceable runner.

With the default root and runner a ``HostView`` is this host. With a fixture tree and recorded commands it is
any host, so that every reader in this room can be tested for hardware that is not at hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

READ_LIMIT_BYTES = 1024 * 1024
OUTPUT_LIMIT_BYTES = 1024 * 1024
# A process in uninterruptible sleep (a broken driver does that) cannot be killed; it is left behind after this.
_REAP_SECONDS = 1.0
_MAX_SYMLINKS = 40


@dataclasses.dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command did. ``code`` is ``None`` when it never ended by itself or never started.

    ``error`` says why it could not be started. Output is text with undecodable bytes replaced.
    """

    argv: tuple[str, ...]
    code: int | None = None
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    truncated: bool = False
    error: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended with 0 and all of its output was kept."""
        return self.code == 0 and not self.truncated

    def describe(self) -> str:
        """Why it is not ok, in one line for an operator; empty when it is."""
        if self.ok:
            return ""
        name = " ".join(self.argv[:3])
        if self.error:
            return f"{name}: {self.error}"
        if self.timed_out:
            return f"{name}: no answer within {self.seconds:.1f} s, killed"
        if self.truncated:
            return f"{name}: more output than {OUTPUT_LIMIT_BYTES} bytes, killed"
        said = (self.stderr.strip() or self.stdout.strip()).splitlines()
        how = f"signal {-self.code}" if self.code is not None and self.code < 0 else f"exit {self.code}"
        return f"{name}: {how}" + (f": {said[-1].strip()[:200]}" if said else "")


class CommandRunner(Protocol):
    """Runs an argument list. Never raises for what the command does, always ends within its time limit."""

    async def run(
        self, argv: Sequence[str], *, timeout_seconds: float, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Runs ``argv`` without a shell; ``env`` is the whole environment, ``None`` inherits."""
        ...


class SystemRunner:
    """The real runner: a child in its own session, killed with everything it started when time is up."""

    async def run(
        self, argv: Sequence[str], *, timeout_seconds: float, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        """See ``CommandRunner.run``. Takes at most ``timeout_seconds`` plus one second for the kill."""
        started = time.monotonic()
        words = tuple(argv)
        try:
            transport, collector = await asyncio.get_running_loop().subprocess_exec(
                _Collector,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                env=None if env is None else dict(env),
                cwd="/",
                start_new_session=True,
            )
        except FileNotFoundError:
            return CommandResult(words, error="is not installed, or not on PATH")
        except OSError as exc:
            return CommandResult(words, error=f"cannot be run: {exc.strerror}")
        except ValueError as exc:
            return CommandResult(words, error=f"cannot be run: {exc}")
        timed_out = False
        try:
            async with asyncio.timeout(timeout_seconds):
                await collector.finished.wait()
        except TimeoutError:
            timed_out = True
        finally:
            # The whole session, also what an ended leader left behind.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(transport.get_pid(), signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(collector.exited.wait(), _REAP_SECONDS)
            transport.close()
        return CommandResult(
            words,
            code=None if timed_out or collector.full else transport.get_returncode(),
            stdout=collector.text(1),
            stderr=collector.text(2),
            timed_out=timed_out,
            truncated=collector.full,
            seconds=time.monotonic() - started,
        )


class _Collector(asyncio.SubprocessProtocol):
    """Keeps the first ``OUTPUT_LIMIT_BYTES`` of each stream.

    ``finished`` is set when the process has ended and its output is complete, or when it said too much (``full``).
    """

    def __init__(self) -> None:
        self._data = {1: bytearray(), 2: bytearray()}
        self.full = False
        self.exited = asyncio.Event()
        self.finished = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        kept = self._data[fd]
        room = OUTPUT_LIMIT_BYTES - len(kept)
        kept += data[:room]
        if len(data) > room:
            self.full = True
            self.finished.set()

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.finished.set()

    def text(self, fd: int) -> str:
        return self._data[fd].decode("utf-8", "replace")


class RecordedRunner:
    """Answers from recordings: for tests and for looking at a support bundle.

    A command without a recording answers like one that is not installed. A recording with ``timed_out``
    answers at once, as if the limit had passed.
    """

    def __init__(self, results: Iterable[CommandResult] = ()) -> None:
        self._results = {result.argv: result for result in results}
        self.asked: list[tuple[str, ...]] = []

    @classmethod
    def from_directory(cls, directory: Path) -> RecordedRunner:
        """Reads ``commands.json``: a list of ``{"argv", "code", "stdout_file" | "stdout", "stderr", "timed_out"}``.

        Raises:
            OSError, ValueError: the recording is missing or not of this form.
        """
        results = []
        for entry in json.loads((directory / "commands.json").read_text("utf-8")):
            stdout = entry.get("stdout", "")
            if "stdout_file" in entry:
                stdout = (directory / entry["stdout_file"]).read_text("utf-8")
            results.append(
                CommandResult(
                    tuple(entry["argv"]),
                    code=entry.get("code", 0),
                    stdout=stdout,
                    stderr=entry.get("stderr", ""),
                    timed_out=entry.get("timed_out", False),
                )
            )
        return cls(results)

    async def run(
        self, argv: Sequence[str], *, timeout_seconds: float, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        """The recording for exactly this ``argv``."""
        words = tuple(argv)
        self.asked.append(words)
        result = self._results.get(words)
        if result is None:
            return CommandResult(words, error="is not installed, or not on PATH")
        return dataclasses.replace(result, code=None, seconds=timeout_seconds) if result.timed_out else result


class HostView:
    """One host as this room sees it.

    Args:
        root: Where its ``/`` is. Symbolic links below it are followed as if it were ``/``.
        runner: How commands are run there.
        machine: Its architecture as ``uname -m`` says it; by default what its kernel says, else this machine's.
    """

    def __init__(
        self, root: Path = Path("/"), runner: CommandRunner | None = None, *, machine: str | None = None
    ) -> None:
        self.root = root
        self.runner: CommandRunner = runner if runner is not None else SystemRunner()
        self._machine = machine

    @property
    def live(self) -> bool:
        """Whether this is the running host itself, so that system calls answer for it too."""
        return self.root == Path("/")

    @property
    def machine(self) -> str:
        """``aarch64`` or ``x86_64``. ``uname -i`` is not asked: it says ``unknown`` on many systems."""
        if self._machine:
            return self._machine
        # The kernel has this file since 6.1.
        return self.text("/proc/sys/kernel/arch") or platform.machine()

    def path(self, name: str) -> Path:
        """The real path of an absolute name on that host.

        Raises:
            OSError: too many symbolic links.
        """
        if self.live:
            return Path(name)
        pending = [part for part in name.split("/") if part not in ("", ".")][::-1]
        done: list[str] = []
        links = 0
        while pending:
            part = pending.pop()
            if part == "..":
                done = done[:-1]
                continue
            here = self.root.joinpath(*done, part)
            if not here.is_symlink():
                done.append(part)
                continue
            links += 1
            if links > _MAX_SYMLINKS:
                raise OSError(f"{name}: too many symbolic links")
            target = str(here.readlink())
            if target.startswith("/"):
                done = []
            pending.extend([piece for piece in target.split("/") if piece not in ("", ".")][::-1])
        return self.root.joinpath(*done)

    def read(self, name: str) -> str:
        """A file's text, at most ``READ_LIMIT_BYTES``, undecodable bytes replaced.

        Raises:
            OSError: it cannot be read.
        """
        with self.path(name).open("rb") as file:
            return file.read(READ_LIMIT_BYTES).decode("utf-8", "replace")

    def text(self, name: str) -> str | None:
        """A file's text without surrounding blanks, ``None`` when it cannot be read."""
        try:
            return self.read(name).strip()
        except OSError:
            return None

    def integer(self, name: str) -> int | None:
        """A file's content as a number, ``None`` when it cannot be read or is none."""
        text = self.text(name)
        try:
            return None if text is None else int(text)
        except ValueError:
            return None

    def names(self, directory: str) -> list[str]:
        """The sorted names in a directory; empty when there is none or it may not be read."""
        try:
            return sorted(entry.name for entry in self.path(directory).iterdir())
        except OSError:
            return []

    def exists(self, name: str) -> bool:
        """Whether there is something at this path that we may see."""
        try:
            return self.path(name).exists()
        except OSError:
            return False
