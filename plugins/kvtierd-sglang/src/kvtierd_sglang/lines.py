r"""SGLang's log lines, read wherever they stand in a line.

Shapes, from 0.5.23's source and logs: a prefix ``[2026-07-01 15:19:55 TP10]`` (also ``DP0 TP0``), colour codes, a
trailing CR, two records on one line, a line cut in the middle. A number counts only when what follows it in SGLang's
own text is there too, so a cut line gives ``None`` and never a shorter number. Every rank writes its own lines: the
engine's value is the smallest over the ranks.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kvtierd.plan.engine import EngineObservation

GIB: Final = 1024**3
LONGEST_LINE_CHARS: Final = 65536
_LONGEST_FATAL_CHARS: Final = 400
READY: Final = "The server is fired up and ready to roll!"
LISTENS: Final = "Uvicorn running on "
"""The only line that an SGLang without its port does not write: its warm-up goes to whoever has the port."""

_ANSI: Final = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
_MAX_TOKENS: Final = re.compile(r"max_total_num_tokens=(\d{1,18}),")
_KV_POOL: Final = re.compile(
    r"(?P<name>[A-Za-z]+ )?KV [Cc]ache (?:is )?allocated\."
    r"(?: dtype: [\w.]+,)? #tokens: (?P<tokens>\d{1,18}), "
    r"(?:KV size: (?P<kv>\d+(?:\.\d+)?) GB|K size: (?P<k>\d+(?:\.\d+)?) GB, V size: (?P<v>\d+(?:\.\d+)?) GB)"
)
_HOST_POOL: Final = re.compile(
    r"Allocating (?P<name>[\w -]+?) ?hierarchical KV host pool: (?P<tokens>\d{1,18}) tokens, "
    r"(?P<size>\d+(?:\.\d+)?) GB host memory"
)

PORT_TAKEN: Final = "[Errno 98] error while attempting to bind on address"
NO_MODEL: Final = "OSError: We couldn't connect to 'https://huggingface.co' to load the files"
NOT_CACHED: Final = "huggingface_hub.errors.LocalEntryNotFoundError"
BAD_ARGUMENTS: Final = ("sglang serve: error: ", "launch_server.py: error: ")
FATAL: Final = (
    PORT_TAKEN,
    NO_MODEL,
    NOT_CACHED,
    *BAD_ARGUMENTS,
    "Not enough host memory available. Requesting",
    "Ascend MemCache configuration failed:",
    "Ascend MemCache store initialization failed:",
    "Scheduler hit an exception:",
    "Received sigquit from a child process",
)
"""Beginnings of texts after which the engine does not go on."""
# With --log-requests a line holds the client's own text, which may say anything.
_CLIENT_TEXT: Final = re.compile(r"(?:Receive|Finish): (?:rid=|obj=)")


class KvPool(NamedTuple):
    """One pool of L1 on one rank. A hybrid model has several; they are kept apart."""

    name: str
    tokens: int
    size_bytes: int


class HostPool(NamedTuple):
    """One pool of L2 on one rank."""

    name: str
    tokens: int
    size_bytes: int


def plain(line: str) -> str:
    """Without colour codes and the line's end, at most 64 KiB of it."""
    text = line[:LONGEST_LINE_CHARS]
    return (_ANSI.sub("", text) if "\x1b" in text else text).rstrip("\r\n")


def kv_pools(line: str) -> tuple[KvPool, ...]:
    """The L1 pools that this line says were allocated (GB is 2^30 bytes here)."""
    return tuple(
        KvPool(
            (m["name"] or "").strip(), int(m["tokens"]), _gib(m["kv"]) if m["kv"] else _gib(m["k"], m["v"])
        )
        for m in _KV_POOL.finditer(plain(line))
    )


def host_pools(line: str) -> tuple[HostPool, ...]:
    """The L2 pools that this line says are being allocated (GB is 10^9 bytes here)."""
    return tuple(
        HostPool(m["name"].strip(), int(m["tokens"]), round(float(m["size"]) * 1e9))
        for m in _HOST_POOL.finditer(plain(line))
    )


def _gib(*sizes: str) -> int:
    return round(sum(float(size) for size in sizes) * GIB)


def is_ready(line: str) -> bool:
    """Whether it says that the server takes requests."""
    return READY in line


def read_line(line: str) -> EngineObservation | None:
    """What one line says; ``None`` for nothing.

    ``max_total_num_tokens`` is the authority on the room of L1; the pools' own token figures are not the engine's.
    """
    if "max_total_num_tokens=" in line:
        return _room(plain(line))
    if " batch" in line and "#running-req" in line:
        return _batch(plain(line))
    if "llocated. " in line:
        pools = kv_pools(line)
        if len(pools) != 1:
            return None
        return EngineObservation(kv_memory_bytes=pools[0].size_bytes, kv_pool_tokens=pools[0].tokens)
    if (  # spelled out: every line of every engine comes by here
        "rror" in line
        or "Errno 98" in line
        or "nough host mem" in line
        or "MemCache " in line
        or "hit an exception" in line
        or "sigquit" in line
    ):
        return _fatal(plain(line))
    return None


def _room(text: str) -> EngineObservation | None:
    tokens = [int(found) for found in _MAX_TOKENS.findall(text)]
    return EngineObservation(kv_tokens=min(tokens), l1_capacity_tokens=min(tokens)) if tokens else None


def _batch(text: str) -> EngineObservation | None:
    """The newest batch record of the line. Its ``#cached-token`` counts all tiers, so it is no rate of L1's."""
    at = max(text.rfind("Prefill batch"), text.rfind("Decode batch"))
    if at < 0:
        return None
    record = text[at:]
    running = _number(record, "#running-req: ")
    # A decode record ends with its queue, a prefill record does not.
    waiting = _number(record, "#queue-req: ", may_end=record.startswith("Decode"))
    usage = _usage(record)
    if running is None and waiting is None and usage is None:
        return None
    return EngineObservation(running=running, waiting=waiting, l1_used_ratio=usage)


def _number(record: str, label: str, *, may_end: bool = False) -> int | None:
    at = record.find(label)
    if at < 0:
        return None
    digits, comma, _ = record[at + len(label) :].partition(",")
    if not comma:
        if not may_end:
            return None
        digits = digits.partition("[")[0].rstrip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None


def _usage(record: str) -> float | None:
    """``token usage`` or ``full token usage``; hybrid models have others beside it (swa, mamba)."""
    label, at = "token usage: ", -1
    while (at := record.find(label, at + 1)) >= 0:
        if record.endswith((", ", ", full "), 0, at):
            number, comma, _ = record[at + len(label) :].partition(",")
            whole, point, cents = number.partition(".")
            if comma and point and whole.isdecimal() and cents.isdecimal() and number.isascii():
                return float(number)
    return None


def _fatal(text: str) -> EngineObservation | None:
    at, sign = min(((i, s) for s in FATAL if (i := text.find(s)) >= 0), default=(-1, ""))
    if not sign or _CLIENT_TEXT.search(text, 0, at):
        return None
    return EngineObservation(fatal=text[at : at + _LONGEST_FATAL_CHARS].strip())
