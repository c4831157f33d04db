"""From a demand in bytes to the settings of a pool that holds it. Pure; the arithmetic is the planner's own.

A pool evicts as soon as its use is above ``evict_high``, so it holds a demand only when that is below the threshold. What
lies above is not wasted: a value that is written finds its room there, and when there is none the write fails.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from kvtierd.errors import WorkloadError
from kvtierd.mmc_conf.sizes import MAX_SIZE_BYTES, alignment_bytes, format_mmc_size
from kvtierd.plan.hardware import facts_of
from kvtierd.plan.inventory import HugepagePool, Inventory
from kvtierd.plan.model import HugepagePlan, PoolPlan, Series
from kvtierd.plan.pool import plan_hugepages, plan_pool
from kvtierd.plan.remarks import Remarks
from kvtierd.quantities import GIB, MIB, format_size
from kvtierd.settings import PoolSettings
from kvtierd.settings.policy import PolicySettings

MOST_HIGH: Final = 99  # MemCache from 1.1 on refuses 100
_TIGHT_LOW: Final = 90
_MOST_HOLDERS: Final = 16
_MOST_BYTES: Final = 1 << 60


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSize:
    """The pool that holds ``kv_bytes`` below ``evict_high``, on ``nodes`` hosts alike.

    ``dram_bytes`` is what one host gives ([pool] dram), ``dram_bytes_per_card`` its share of one card (of one holder, where
    a holder process has the memory). ``capacity_bytes`` is that of all hosts. ``settings`` is TOML.
    """

    kv_bytes: int
    cards: int
    nodes: int
    series: Series
    dram_bytes: int
    dram_bytes_per_card: int
    capacity_bytes: int
    evict_high: int
    evict_low: int
    plan: PoolPlan
    hugepages: HugepagePlan
    settings: str
    notes: tuple[str, ...]


def demand_bytes(*, requests: int, input_tokens: int, output_tokens: int, bytes_per_token: float) -> int:
    """All tokens of all requests kept at once: nothing is shared between them.

    Raises:
        WorkloadError: ``sizing.demand``.
    """
    for name, value, least in (
        ("--requests", requests, 1),
        ("--input", input_tokens, 1),
        ("--output", output_tokens, 0),
    ):
        if value < least:
            raise WorkloadError(
                f"{name} is {value}",
                hint=f"write a number of at least {least}",
                code="sizing.demand",
            )
    return math.ceil(requests * (input_tokens + output_tokens) * bytes_per_token)


def size_pool(
    kv_bytes: int,
    *,
    cards: int,
    nodes: int = 1,
    series: Series = "800I-A2",
    evict_high: int | None = None,
    evict_low: int | None = None,
    value_bytes: int | None = None,
    why: Sequence[str] = (),
) -> PoolSize:
    """The smallest pool for it, in the planner's alignment.

    Args:
        kv_bytes: KV cache to hold, on all hosts together.
        cards: Cards of one host whose engines use the pool.
        nodes: Hosts that give memory to it, all alike.
        series: Hardware; it decides the protocol, the alignment, who holds the memory, and whether it needs hugepages.
        evict_high: In percent; ``None``: kvtierd's default, lower where values need more room above it.
        evict_low: In percent; ``None``: as far below ``evict_high`` as kvtierd's default.
        value_bytes: Largest value in the pool: one block.
        why: Comment lines for the settings.

    Raises:
        WorkloadError: ``sizing.demand``, ``sizing.thresholds``, ``sizing.pool`` when the planner refuses such a pool.
    """
    if not 0 < kv_bytes < _MOST_BYTES:
        raise WorkloadError(
            f"a demand of {kv_bytes:,} bytes cannot be sized",
            hint="check the numbers of requests and tokens, and bytes per token",
            code="sizing.demand",
        )
    high, low = _thresholds(evict_high, evict_low)
    notes: list[str] = []
    sized = _sized(kv_bytes, cards, nodes, series, high, low)
    if value_bytes:
        room = _room_percent(sized[0], value_bytes)
        if room > 100 - high:
            if evict_high is not None:
                notes.append(
                    f"values of {format_size(value_bytes)} need {room:.1f} % of a segment above evict_high, and"
                    f" {100 - high} % are there: some writes will fail; lower evict_high"
                )
            else:
                high = max(2, math.floor(100 - min(room, 98)))
                low = max(1, high - _gap())
                sized = _sized(kv_bytes, cards, nodes, series, high, low)
                notes.append(
                    f"evict_high is {high}: values of {format_size(value_bytes)} need {room:.1f} % of a segment above it"
                )
    plan, pages, settings, remarks = sized
    if remarks.refusals:
        refusal = remarks.refusals[0]
        raise WorkloadError(
            f"no such pool can be planned: {refusal.message}",
            hint="spread it over more cards (--cards) or hosts (--nodes)"
            if plan.placement == "engine"
            else "spread it over more hosts (--nodes)",
            code="sizing.pool",
        )
    if evict_high is None and evict_low is None and high < MOST_HIGH:
        notes.append(_tight(kv_bytes, cards, nodes, series, value_bytes))
    if plan.placement == "standalone":
        notes.append(
            f"on {series} the memory belongs to {plan.providers} pool holder{'s' if plan.providers > 1 else ''} of"
            f" {format_mmc_size(plan.dram_bytes_per_provider)}, not to the cards"
        )
    per_card = (
        plan.dram_bytes_per_provider if plan.placement == "engine" else -(-plan.capacity_bytes // cards)
    )
    return PoolSize(
        kv_bytes=kv_bytes,
        cards=cards,
        nodes=nodes,
        series=series,
        dram_bytes=plan.capacity_bytes,
        dram_bytes_per_card=per_card,
        capacity_bytes=plan.capacity_bytes * nodes,
        evict_high=high,
        evict_low=low,
        plan=plan,
        hugepages=pages,
        settings=_snippet(settings, why),
        notes=tuple(note for note in notes if note),
    )


def _thresholds(high: int | None, low: int | None) -> tuple[int, int]:
    defaults = PoolSettings(dram=GIB)
    if high is None:
        high = defaults.evict_high
    if low is None:
        low = max(1, high - _gap())
    if not 0 < low < high:
        raise WorkloadError(
            f"evict_low ({low}) must be below evict_high ({high}), and both above 0",
            hint="write for example --evict-high 90 --evict-low 80",
            code="sizing.thresholds",
        )
    if high > MOST_HIGH:
        raise WorkloadError(
            f"evict_high is {high}, but MemCache from 1.1 on takes 99 at most",
            why="with 100 a full pool would have no room for the next value, and never evict",
            hint="write --evict-high 99 --evict-low 90 to use nearly all of it",
            code="sizing.thresholds",
        )
    return high, low


def _gap() -> int:
    defaults = PoolSettings(dram=GIB)
    return defaults.evict_high - defaults.evict_low


def _room_percent(plan: PoolPlan, value_bytes: int) -> float:
    """What the policy keeps free above ``evict_high`` for such values, in percent of a segment."""
    headroom = float(PolicySettings.model_fields["value_headroom"].default)
    return 100 * headroom * value_bytes / max(1, plan.dram_bytes_per_provider)


def _sized(
    kv_bytes: int, cards: int, nodes: int, series: Series, high: int, low: int
) -> tuple[PoolPlan, HugepagePlan, PoolSettings, Remarks]:
    facts = facts_of(series)
    step = alignment_bytes(facts.protocol, a3=series == "A3")
    per_host = -(-kv_bytes * 100 // (high * nodes))
    holders = min(_MOST_HOLDERS, max(1, -(-per_host // MAX_SIZE_BYTES)))
    providers = cards if facts.placement == "engine" else holders
    each = -(-per_host // (providers * step)) * step
    pool = PoolSettings(
        dram=each * providers,
        evict_high=high,
        evict_low=low,
        holders=holders if facts.placement == "standalone" else 1,
    )
    remarks = Remarks()
    plan = plan_pool(pool, series, engine_ranks=cards, nodes=nodes, remarks=remarks)
    pages = plan_hugepages(pool, series, plan, _any_host(), remarks)
    return plan, pages, pool, remarks


def _any_host() -> Inventory:
    """A host with hugepages of the usual size: what else it has does not matter here."""
    pages = HugepagePool(page_size_bytes=2 * MIB, total_pages=0, free_pages=0)
    return Inventory(
        hostname="",
        memory_total_bytes=0,
        memory_available_bytes=0,
        default_hugepage_size_bytes=2 * MIB,
        hugepages=(pages,),
    )


def _tight(kv_bytes: int, cards: int, nodes: int, series: Series, value_bytes: int | None) -> str:
    """What the highest threshold would take instead, where it works."""
    plan, _, _, remarks = _sized(kv_bytes, cards, nodes, series, MOST_HIGH, _TIGHT_LOW)
    if remarks.refusals or (value_bytes and _room_percent(plan, value_bytes) > 100 - MOST_HIGH):
        return ""
    return (
        f"with evict_high = {MOST_HIGH} and evict_low = {_TIGHT_LOW} dram ="
        f' "{_written(plan.capacity_bytes)}" would hold it, with less room for bursts'
    )


def _written(size: int) -> str:
    """As settings write it, exact."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def _snippet(pool: PoolSettings, why: Sequence[str]) -> str:
    lines = [f"# {line}" for line in why]
    lines += ["[pool]", f'dram = "{_written(pool.dram)}"  # of the whole host']
    if pool.holders > 1:
        lines.append(f"holders = {pool.holders}")
    lines += [f"evict_high = {pool.evict_high}", f"evict_low = {pool.evict_low}"]
    return "\n".join(lines) + "\n"
