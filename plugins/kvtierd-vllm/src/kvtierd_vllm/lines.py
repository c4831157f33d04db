"""What vLLM's log lines say: room of the KV cache, its memory, hit rates, failed loads, fatal signs. Pure.

The engine's own line may have anything in front of it: process names, a container's or journald's prefix, colour
codes, an unfinished line of another process. So nothing is anchored at a line's start, and a number counts only
together with its label and its unit: a line that was cut inside a number says nothing. Unknown is ``None``.

The shapes are those of vLLM 0.4 to 0.32 and vllm-ascend 0.7 to 0.23 (release sources, public reports and the logs in
``tests/fixtures/engines/vllm``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Final

MAX_LINE_CHARACTERS: Final = 64 * 1024
DISAGREEMENT: Final = 0.05  # above this share the two figures for the cache's room are not the same figure

_ANSI: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_COUNT: Final = r"(\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL: Final = r"(-?\d+(?:\.\d+)?)"
_UNIT: Final = r"([KMGT]i?B)(?![A-Za-z])"
_UNIT_BYTES: Final[Mapping[str, int]] = {
    f"{prefix}{infix}B": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for infix, base in (("i", 1024), ("", 1000))
}

_SIZE: Final = re.compile(rf"KV cache size: {_COUNT} tokens")
_CONCURRENCY: Final = re.compile(
    rf"Maximum concurrency for {_COUNT} tokens per request: (\d+(?:,\d{{3}})*(?:\.\d+)?)x"
)
# vLLM V0. Its second figure, "# CPU blocks", is the swap space; a CPU's own cache is "# cpu blocks".
_BLOCKS: Final = re.compile(rf"# (?!CPU )\w+ blocks: {_COUNT}(?=,|\s*$)")
# The comma shows that the number is whole; "total memory: ..." follows, or nothing.
_MEMORY_BYTES: Final = re.compile(r"Available memory: (-?\d+),(?: total memory: \d|\s*$)")
_MEMORY: Final = (
    re.compile(rf"Available KV cache memory: {_DECIMAL} ?{_UNIT}"),
    re.compile(rf"reserved {_DECIMAL} ?{_UNIT} for KV Cache as specified"),
    re.compile(rf"enlarge total available memory to {_DECIMAL} ?{_UNIT}"),
)
_MEMORY_CPU: Final = re.compile(rf"Explicitly set \({_DECIMAL}/{_DECIMAL}\) {_UNIT} for KV cache")
_ENGINE: Final = re.compile(r"Engine (\d{1,6}): ")
_AGGREGATED: Final = re.compile(r"\b\d{1,6} Engines Aggregated: ()")
# Each begins with a text of its own, which is found fast. A patched build writes a hyphen behind some labels.
_RUNNING: Final = re.compile(r"Running-?: (\d+) reqs\b")
_WAITING: Final = re.compile(r"Waiting-?: (\d+) reqs\b")
_USAGE: Final = re.compile(r"KV cache usage-?: (\d+(?:\.\d+)?)%")
_PREFIX_RATE: Final = re.compile(r"Prefix cache hit rate-?: (\d+(?:\.\d+)?)%")
_EXTERNAL_RATE: Final = re.compile(r"External prefix cache hit rate-?: (\d+(?:\.\d+)?)%")
_FAILED_LOADS: Final = re.compile(
    r"Failed to get (\d+) keys out of|Recovered from KV load failure: (\d+) request"
    r"|Failing (\d+) request\(s\) due to KV load failure"
)
_FATAL: Final = (
    "EngineCore encountered a fatal error",
    "EngineCore failed to start",
    "Engine core initialization failed",
    "EngineDeadError",
    " died unexpectedly",
    "Did not receive response from front-end process",
)


@dataclasses.dataclass(frozen=True, slots=True)
class KvSize:
    """Room of the L1 cache. ``by_concurrency`` is "maximum concurrency" times its request length.

    For hybrid models ``tokens`` counts what no request can use, and ``by_concurrency`` is the figure to go by.
    ``blocks`` is the old form, which needs the block size (in tokens) to mean anything.
    """

    tokens: int | None = None
    by_concurrency: int | None = None
    blocks: int | None = None

    @property
    def disagrees(self) -> bool:
        """Whether the two figures differ by more than 5 %: a hybrid model."""
        if not self.tokens or self.by_concurrency is None:
            return False
        return abs(self.by_concurrency - self.tokens) > DISAGREEMENT * self.tokens

    def usable_tokens(self, block_size_tokens: int | None = None) -> int | None:
        """The figure to go by, in tokens."""
        if self.tokens is None or self.disagrees:
            if self.by_concurrency is not None:
                return self.by_concurrency
            if self.tokens is None and self.blocks is not None and block_size_tokens:
                return self.blocks * block_size_tokens
        return self.tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """vLLM's line every 10 s. Rates are 0 to 1 over about the last 1000 requests, not since the start.

    ``engine`` is the data-parallel engine's number; ``None`` for an aggregate or when that part of the line is missing.
    """

    engine: int | None = None
    running: int | None = None
    waiting: int | None = None
    used_ratio: float | None = None
    prefix_rate: float | None = None
    external_rate: float | None = None

    def says_something(self) -> bool:
        """Whether any figure was readable."""
        return any(
            v is not None
            for v in (self.running, self.waiting, self.used_ratio, self.prefix_rate, self.external_rate)
        )


def cleaned(line: str) -> str:
    """The line without colour codes, at most 64 Ki characters of it."""
    if len(line) > MAX_LINE_CHARACTERS:
        line = line[:MAX_LINE_CHARACTERS]
    return _ANSI.sub("", line) if "\x1b" in line else line


def may_say_something(line: str) -> bool:
    """A cheap test that drops most lines; all that the functions below can read passes.

    It runs on every line and is most of what a log costs. Single characters come first: finding one takes half the time
    of a word. "K" stands for all that says KV, "%" for the rates, "#" for V0's blocks.
    """
    return (
        "%" in line
        or "K" in line
        or "#" in line
        or "ERROR" in line
        or "Error: " in line
        or "oncurrency for " in line
        or "vailable memory" in line
        or "Failed to get " in line
    )


def kv_size(text: str) -> KvSize | None:
    """The cache's room from one line; of several figures on it (workers of one engine) the smallest."""
    tokens = [_count(m) for m in _SIZE.findall(text)]
    by_concurrency = [
        round(_count(length) * float(times.replace(",", ""))) for length, times in _CONCURRENCY.findall(text)
    ]
    blocks = [_count(m) for m in _BLOCKS.findall(text)]
    if not (tokens or by_concurrency or blocks):
        return None
    return KvSize(
        tokens=min(tokens, default=None),
        by_concurrency=min(by_concurrency, default=None),
        blocks=min(blocks, default=None),
    )


def kv_memory_bytes(text: str) -> int | None:
    """Memory for the cache in bytes. Zero and below are real answers: nothing is left for it."""
    found = [int(m) for m in _MEMORY_BYTES.findall(text)]
    for pattern in _MEMORY:
        found += [_bytes(number, unit) for number, unit in pattern.findall(text)]
    found += [_bytes(number, unit) for number, _, unit in _MEMORY_CPU.findall(text)]
    return min(found, default=None)


def stats(text: str) -> Stats | None:
    """The last readable statistics record on the line."""
    starts = list(_ENGINE.finditer(text))
    if (
        " Engines Aggregated: " in text
    ):  # tried only then: as one alternative of two it would cost half of the time
        starts = sorted((*starts, *_AGGREGATED.finditer(text)), key=lambda found: found.start())
    if not starts:
        record = _stats_record(text, None)
        return record if record.says_something() else None
    end = len(text)
    for start in reversed(starts):
        record = _stats_record(text[start.end() : end], start[1])
        if record.says_something():
            return record
        end = start.start()
    return None


def failed_loads(text: str) -> int | None:
    """How many loads from the pool this line says have failed."""
    found = _FAILED_LOADS.search(text)
    return None if found is None else int(next(g for g in found.groups() if g is not None))


def fatal_sign(text: str) -> str | None:
    """The engine's own words for "I cannot go on". They also appear in an ordinary stop."""
    for sign in _FATAL:
        at = text.find(sign)
        if at >= 0:
            start = text.rfind("] ", 0, at) + 2  # behind "[core.py:1512] "
            return text[start if start >= 2 else at :].strip()[:300]
    return None


def _stats_record(text: str, engine: str | None) -> Stats:
    return Stats(
        engine=int(engine) if engine else None,
        running=_requests(_RUNNING.search(text)),
        waiting=_requests(_WAITING.search(text)),
        used_ratio=_share(_USAGE.search(text)),
        prefix_rate=_share(_PREFIX_RATE.search(text)),
        external_rate=_share(_EXTERNAL_RATE.search(text)),
    )


def _requests(found: re.Match[str] | None) -> int | None:
    return int(found[1]) if found else None


def _share(found: re.Match[str] | None) -> float | None:
    percent = float(found[1]) if found else None
    return percent / 100 if percent is not None and percent <= 100 else None


def _count(digits: str) -> int:
    return int(digits.replace(",", ""))


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNIT_BYTES[unit])
