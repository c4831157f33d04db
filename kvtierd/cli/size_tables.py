"""What kvtierctl size shows to people."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtierd.quantities import format_size

if TYPE_CHECKING:
    from kvtierd.workload.sizing.curve import HitCurve
    from kvtierd.workload.sizing.demand import PoolSize
    from kvtierd.workload.sizing.figures import TokenFigure
    from kvtierd.workload.sizing.hit_rates import HitRates
    from kvtierd.workload.sizing.trace import TraceFacts

GB = 1000**3
_SHOWN_SHARES = (0.25, 0.5, 0.75, 0.9, 0.95, 1.0)


def show(
    asked: list[TokenFigure],
    figure: TokenFigure | None,
    pool: PoolSize | None,
    traced: tuple[HitRates, HitCurve, TraceFacts] | None,
    answer: dict[str, Any],
    plot: Path | None,
) -> None:
    """Sources, disagreements, curve, pool and settings, at 80 columns where nobody watches."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 80)
    console.print(_sources(asked))
    for line in answer["disagreements"]:
        console.print(f"[bold yellow]THEY DISAGREE[/]  {line}", soft_wrap=False)
    if figure is not None and len(asked) > 1:
        console.print(
            f"what counts: {figure.source}, {figure.bytes_per_token:,.0f} bytes per token", markup=False
        )
    if traced is not None:
        console.print()
        console.print(_trace_line(traced), markup=False)
        console.print(_curve(traced, figure))
    if pool is not None:
        console.print()
        console.print(_pool(pool, answer))
        console.print("\nsettings (kvtierctl plan checks them against this host):", markup=False)
        print(pool.settings, end="")
    for note in answer["notes"]:
        console.print(f"note  {note}", markup=False)
    if plot is not None:
        console.print(f"drawn: {plot}", markup=False)


def _sources(asked: list[TokenFigure]) -> Any:
    from rich import box
    from rich.table import Table

    from kvtierd.workload.sizing.figures import per_1k

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("SOURCE")
    table.add_column("BYTES/TOKEN", justify="right")
    table.add_column("PER 1,000 TOKENS")
    table.add_column("FROM", overflow="fold")
    for figure in asked:
        known = figure.bytes_per_token
        table.add_row(
            figure.source,
            "unknown" if known is None else f"{known:,.0f}",
            "unknown" if known is None else per_1k(known),
            figure.details,
        )
    return table


def _trace_line(traced: tuple[HitRates, HitCurve, TraceFacts]) -> str:
    rates, _, facts = traced
    return (
        f"{rates.requests:,} requests ({facts.form}), {rates.prompt_tokens:,} {facts.unit}, {rates.blocks:,} blocks of"
        f" {facts.block_tokens}, {rates.distinct_blocks:,} different"
    )


def _curve(traced: tuple[HitRates, HitCurve, TraceFacts], figure: TokenFigure | None) -> Any:
    from rich import box
    from rich.table import Table

    from kvtierd.workload.sizing.hit_rates import KNEE_SHARE, size_for

    rates, curve, facts = traced
    assert figure is not None
    assert figure.bytes_per_token is not None
    block_bytes = facts.block_tokens * figure.bytes_per_token
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("POOL HOLDS", justify="right")
    table.add_column("HIT RATE", justify="right")
    table.add_column("OF AN ENDLESS POOL'S HITS")
    if rates.max_hit_rate:
        for share in _SHOWN_SHARES:
            blocks = size_for(curve, share)
            rate = min(1.0, float(curve.hits(blocks)) * facts.block_tokens / rates.prompt_tokens)
            mark = "  <- knee" if share == KNEE_SHARE else ""
            table.add_row(
                f"{blocks * block_bytes / GB:,.3f} GB",
                f"{rate:.1%}",
                f"{rate / rates.max_hit_rate:.0%}{mark}",
            )
    return table


def _pool(pool: PoolSize, answer: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(
        "pool must hold", f"{pool.kv_bytes / GB:,.2f} GB ({format_size(pool.kv_bytes)}) of KV cache"
    )
    table.add_row(
        "dram",
        f"{format_size(pool.dram_bytes)} on {'this host' if pool.nodes == 1 else f'each of {pool.nodes} hosts'}:"
        f" below {pool.evict_high} % of it",
    )
    table.add_row("dram.size", f"{format_size(pool.dram_bytes_per_card)} for each of {pool.cards} cards")
    pages = pool.hugepages
    table.add_row(
        "hugepages",
        f"{pages.pages:,} x {format_size(pages.page_size_bytes)} = {format_size(pages.pages * pages.page_size_bytes)}"
        if pages.pages
        else f"none needed ({pool.plan.protocol})",
    )
    table.add_row("thresholds", f"evict from {pool.evict_high} % down to {pool.evict_low} %")
    expected = answer.get("expected_hit_rate")
    if expected:
        table.add_row(
            "hit rate",
            f"{expected['least']:.1%} to {expected['most']:.1%}: MemCache evicts in batches between the thresholds",
        )
    return table
