"""Bytes per token from what an engine says: its log, or its metrics. The drivers read the lines; this adds them up. Pure.

Workers of one engine print a line each, data-parallel engines theirs beside them, and a log may hold several starts. So
lines are kept apart by the process that wrote them, the last start of each engine counts, and of an engine's workers the
smallest figure is the engine's (as vLLM itself takes it).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Final

from kvtierd.errors import WorkloadError
from kvtierd.plan.engine import EngineDriver, EngineObservation
from kvtierd.quantities import format_size
from kvtierd.workload.sizing.figures import DISAGREEMENT, TokenFigure

# Who wrote a line: "(Worker_DP1_TP0 pid=7)", "(VllmWorker rank=3 pid=7)"; SGLang's "[2026-07-01 15:19:55 DP0 TP3]".
_VLLM_PROCESS: Final = re.compile(r"\((\w+(?: rank=\d+)?) pid=\s*\d+\)")
_SGLANG_RANK: Final = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d((?: [A-Z]+\d+)+)\]")
_REPLICA: Final = re.compile(r"DP(\d+)")
_NO_MEMORY_HINT: Final = (
    "npu-smi info shows what holds the card; end it, raise --gpu-memory-utilization, or use more cards"
)


@dataclasses.dataclass(slots=True)
class _Process:
    """What one process said in the present start. ``pools``: (bytes, tokens) where it names pools."""

    memory_bytes: int | None = None
    pools: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    tokens: int | None = None
    by_concurrency: int | None = None
    blocks: int | None = None

    @property
    def has_memory(self) -> bool:
        return self.memory_bytes is not None or bool(self.pools)

    @property
    def has_room(self) -> bool:
        return self.tokens is not None or self.by_concurrency is not None or self.blocks is not None


class EngineLog:
    """Takes a log line by line.

    Args:
        drivers: Those whose ``read_line`` may know the lines. One that raises is not asked again.
    """

    def __init__(self, drivers: Mapping[str, EngineDriver]) -> None:
        self._drivers = dict(drivers)
        self._engines: dict[str, dict[str, _Process]] = {}
        self.starts = 1
        self.lines = 0

    def add(self, line: str) -> None:
        """One line, or several that a progress bar's carriage returns have joined."""
        self.lines += 1
        for part in line.split("\r"):
            said = self._read(part)
            if said is not None:
                self._take(part, said)

    def _read(self, line: str) -> EngineObservation | None:
        for name, driver in list(self._drivers.items()):
            try:
                said = driver.read_line(line)
            except Exception:  # noqa: BLE001 - foreign code: anything may come out of it
                del self._drivers[name]
                continue
            if said is not None and (
                said.kv_memory_bytes is not None
                or said.kv_tokens is not None
                or said.kv_tokens_by_concurrency is not None
                or said.kv_blocks is not None
            ):
                return said
        return None

    def _take(self, line: str, said: EngineObservation) -> None:
        writer = _VLLM_PROCESS.search(line) or _SGLANG_RANK.search(line)
        name = writer[1].strip() if writer else ""
        replica = _REPLICA.search(name)
        engine = self._engines.setdefault(replica[1] if replica else "", {})
        process = engine.setdefault(name, _Process())
        if said.kv_memory_bytes is not None:
            # Memory again after the room is known: the engine was started again.
            others = any(p.has_room and not p.has_memory for p in engine.values())
            if process.has_memory and (process.has_room or others):
                engine.clear()
                process = engine.setdefault(name, _Process())
                self.starts += 1
            if said.kv_pool_tokens is not None:
                process.pools.append((said.kv_memory_bytes, said.kv_pool_tokens))
            else:
                process.memory_bytes = said.kv_memory_bytes
        if said.kv_tokens is not None:
            process.tokens = _least(process.tokens, said.kv_tokens)
        if said.kv_tokens_by_concurrency is not None:
            process.by_concurrency = _least(process.by_concurrency, said.kv_tokens_by_concurrency)
        if said.kv_blocks is not None:
            process.blocks = _least(process.blocks, said.kv_blocks)

    def figure(self, *, cards: int, block_tokens: int | None = None) -> TokenFigure:
        """The figure of the last start.

        Args:
            cards: Cards of one engine (tensor times pipeline parallel; not data parallel).
            block_tokens: The engine's block size, for a log that counts blocks.

        Raises:
            WorkloadError: ``sizing.log-no-lines``, ``sizing.log-no-memory``, ``sizing.log-no-room``, ``sizing.no-memory``,
                ``sizing.log-blocks``.
        """
        found = [self._one(engine, cards, block_tokens) for engine in self._filled()]
        figures = [figure for figure in found if figure is not None]
        if not figures:
            raise self._nothing()
        least = min(figures, key=lambda figure: figure.kv_tokens or 0)
        notes = list(least.notes)
        if len(figures) > 1:
            notes.append(
                f"the log has {len(figures)} data-parallel engines: the one with the least room counts, and --cards is"
                " the cards of one of them"
            )
        if self.starts > 1:
            notes.append(f"the log has {self.starts} starts: the last one counts")
        return dataclasses.replace(least, notes=tuple(notes))

    def _filled(self) -> list[dict[str, _Process]]:
        """The engines; lines that do not say of which replica they are belong to all that lack such a line."""
        unnamed = self._engines.get("", {})
        named = [engine for key, engine in self._engines.items() if key]
        if not named:
            return [unnamed]
        filled = []
        for engine in named:
            more = {
                name: process
                for name, process in unnamed.items()
                if (process.has_memory and not any(p.has_memory for p in engine.values()))
                or (process.has_room and not any(p.has_room for p in engine.values()))
            }
            filled.append({**more, **engine})
        return filled

    def _one(self, engine: dict[str, _Process], cards: int, block_tokens: int | None) -> TokenFigure | None:
        processes = engine.values()
        memory = [p.memory_bytes for p in processes if p.memory_bytes is not None]
        pools = [p.pools for p in processes if p.pools]
        if any(size <= 0 for size in memory):
            raise WorkloadError(
                f"the log says that no memory is left for the KV cache ({format_bytes(min(memory))})",
                why="another process holds the card, or the share of memory for the engine is too small",
                hint=_NO_MEMORY_HINT,
                code="sizing.no-memory",
            )
        tokens = min((p.tokens for p in processes if p.tokens is not None), default=None)
        by_concurrency = min(
            (p.by_concurrency for p in processes if p.by_concurrency is not None), default=None
        )
        blocks = min((p.blocks for p in processes if p.blocks is not None), default=None)
        notes: list[str] = []
        if tokens is None and by_concurrency is None and blocks is not None:
            if block_tokens is None:
                raise WorkloadError(
                    f"the log counts the KV cache in blocks ({blocks:,}), and not how many tokens a block has",
                    hint="name the engine's block size: --block-size 128 on Ascend, 16 in old vLLM",
                    code="sizing.log-blocks",
                )
            tokens = blocks * block_tokens
            notes.append(f"{blocks:,} blocks of {block_tokens} tokens")
        room = tokens if tokens is not None else by_concurrency
        if tokens and by_concurrency and abs(by_concurrency - tokens) > DISAGREEMENT * tokens:
            notes.append(
                f"a hybrid model: the log says {tokens:,} tokens, but {by_concurrency:,} by its maximum concurrency, which"
                " counts"
            )
            room = by_concurrency
        if room is not None and room <= 0:
            raise WorkloadError(
                "the log says that the KV cache has room for 0 tokens",
                hint=_NO_MEMORY_HINT,
                code="sizing.no-memory",
            )
        if room is None or not (memory or pools):
            return None
        if pools:
            per_card = min(pools, key=lambda several: sum(size for size, _ in several))
            if any(size <= 0 or held <= 0 for size, held in per_card):
                raise WorkloadError(
                    "the log names a KV pool without room", hint=_NO_MEMORY_HINT, code="sizing.no-memory"
                )
            card_bytes = sum(size for size, _ in per_card)
            on_cards = cards * sum(size / held for size, held in per_card)
            if len(per_card) > 1:
                notes.append(
                    f"{len(per_card)} pools on each card ({', '.join(f'{held:,} tokens' for _, held in per_card)}): a token"
                    " counts in each of them"
                )
        else:
            card_bytes = min(memory)
            on_cards = cards * card_bytes / room
        return TokenFigure(
            source="log",
            bytes_per_token=on_cards,
            bytes_on_cards=on_cards,
            kv_tokens=room,
            kv_bytes=card_bytes * cards,
            details=f"{cards} x {format_size(card_bytes)} / {room:,} tokens",
            notes=tuple(notes),
        )

    def _nothing(self) -> WorkloadError:
        processes = [p for engine in self._engines.values() for p in engine.values()]
        if any(p.has_room for p in processes):
            return WorkloadError(
                "the log says how many tokens the KV cache holds, but not how much memory it has",
                hint='look for "Available KV cache memory" or "Available memory" (vLLM), "KV Cache is allocated" (SGLang):'
                " logged at level INFO; or use --config",
                code="sizing.log-no-memory",
            )
        if processes:
            return WorkloadError(
                "the log says how much memory the KV cache has, but not how many tokens it holds",
                why="the engine has not come so far, or the log is cut off",
                hint='look for "KV cache size: ... tokens" (vLLM), "max_total_num_tokens=" (SGLang); or use --config',
                code="sizing.log-no-room",
            )
        return WorkloadError(
            f"none of the log's {self.lines:,} lines says how large the KV cache is",
            why="it is no log of an engine's start that is known, or only a later part of one",
            hint="give the engine's output from its start (level INFO); kvtierctl logs ENGINE shows it; or use --config",
            code="sizing.log-no-lines",
        )


def figure_of_metrics(
    text: str, drivers: Mapping[str, EngineDriver], *, cards: int, replicas: int = 1
) -> TokenFigure:
    """The figure of a running engine, as far as its metrics say it (vLLM says tokens, SGLang bytes too).

    Args:
        text: One scrape.
        drivers: Those whose ``observe`` may know it.
        cards: Cards of one engine.
        replicas: Data-parallel engines whose room the scrape adds up (vLLM).

    Raises:
        WorkloadError: ``sizing.metrics``: no driver knows it, or it says nothing of the cache.
    """
    reasons: list[str] = []
    found: list[TokenFigure] = []
    for name, driver in drivers.items():
        try:
            seen = driver.observe(text)
        except Exception as error:  # noqa: BLE001 - foreign code; ValueError when the scrape is another engine's
            reasons.append(f"{name}: {error}")
            continue
        room = seen.kv_tokens or seen.l1_capacity_tokens
        if not room:
            reasons.append(f"{name}: no room of the KV cache in it")
            continue
        tokens = room // replicas if seen.kv_tokens is None else room
        memory = seen.kv_memory_bytes
        if memory is not None and memory <= 0:
            raise WorkloadError(
                "the engine's metrics say that its KV cache has no memory",
                hint=_NO_MEMORY_HINT,
                code="sizing.no-memory",
            )
        on_cards = None if memory is None else memory * cards / tokens
        found.append(
            TokenFigure(
                source="metrics",
                bytes_per_token=on_cards,
                bytes_on_cards=on_cards,
                kv_tokens=tokens,
                kv_bytes=None if memory is None else memory * cards,
                details=f"{tokens:,} tokens" + (f", {cards} x {format_size(memory)}" if memory else ""),
                notes=()
                if memory
                else ("these metrics say no memory: bytes per token need --log or --config",),
            )
        )
    if found:  # engines that borrow vLLM's names are known to several drivers: the one that reads more counts
        return max(found, key=lambda figure: figure.kv_bytes is not None)
    raise WorkloadError(
        "the metrics do not say how large the KV cache is",
        why="; ".join(reasons)[:600],
        hint="name the engine's /metrics; SGLang has them with --enable-metrics only; or use --log or --config",
        code="sizing.metrics",
    )


def format_bytes(size: int) -> str:
    """A size that may be negative."""
    return f"-{format_size(-size)}" if size < 0 else format_size(size)


def engine_log(lines: Iterable[str], drivers: Mapping[str, EngineDriver]) -> EngineLog:
    """All the lines taken."""
    log = EngineLog(drivers)
    for line in lines:
        log.add(line)
    return log


def _least(one: int | None, other: int) -> int:
    return other if one is None else min(one, other)
