"""kvtierctl size."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtierd.cli.common import JsonOption, print_json
from kvtierd.cli.size_tables import GB, show
from kvtierd.errors import UsageError

if TYPE_CHECKING:
    from kvtierd.workload.sizing.curve import HitCurve
    from kvtierd.workload.sizing.demand import PoolSize
    from kvtierd.workload.sizing.figures import TokenFigure
    from kvtierd.workload.sizing.hit_rates import HitRates
    from kvtierd.workload.sizing.trace import TraceFacts


class Series(enum.StrEnum):
    """Hardware."""

    I300_A2 = "300I-A2"
    I800_A2 = "800I-A2"
    A3 = "A3"
    A5 = "A5"
    EMULATED = "emulated"


class Form(enum.StrEnum):
    """Forms of traces."""

    QA = "qa"
    SHAREGPT = "sharegpt"
    OPENAI = "openai"
    MOONCAKE = "mooncake"
    VLLM_LOG = "vllm-log"


_FROM, _HOW, _DEMAND, _TRACE, _POOL = "Bytes per token", "The engine", "Demand", "Demand by a trace", "Pool"


def size(
    log: Annotated[
        Path | None,
        typer.Option("--log", metavar="FILE", help="An engine's log, from its start.", rich_help_panel=_FROM),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The model's config.json.", rich_help_panel=_FROM),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", metavar="URL", help="A running engine, or a scrape of it.", rich_help_panel=_FROM),
    ] = None,
    bytes_per_token: Annotated[
        float | None, typer.Option("--bytes-per-token", min=0.001, help="Known already.", rich_help_panel=_FROM)
    ] = None,
    gb_per_1k: Annotated[
        float | None,
        typer.Option("--gb-per-1k", min=1e-9, help="GB for 1,000 tokens (10^9 bytes).", rich_help_panel=_FROM),
    ] = None,
    cards: Annotated[
        int | None,
        typer.Option("--cards", min=1, max=4096, help="Cards of one engine; default: tp x pp.", rich_help_panel=_HOW),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, max=1024, help="Tensor parallel.", rich_help_panel=_HOW)] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, max=1024, help="Pipeline parallel.", rich_help_panel=_HOW)] = 1,
    dp: Annotated[
        int, typer.Option("--dp", min=1, max=1024, help="Data parallel: engines on this host.", rich_help_panel=_HOW)
    ] = 1,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="KV cache: bf16, fp8, ...; default: the model's.", rich_help_panel=_HOW),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", min=1, max=65536, help="Tokens in a block; 128.", rich_help_panel=_HOW),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", help="Requests to keep, nothing shared.", rich_help_panel=_DEMAND)
    ] = None,
    input_tokens: Annotated[
        int | None, typer.Option("--input", help="Tokens of a prompt.", rich_help_panel=_DEMAND)
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option("--output", help="Tokens of an answer.", rich_help_panel=_DEMAND)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Dataset, trace, or log of requests.", rich_help_panel=_TRACE),
    ] = None,
    form: Annotated[
        Form | None, typer.Option("--form", help="Default: told by its content.", rich_help_panel=_TRACE)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="PATH", help="The model's; default: bytes.", rich_help_panel=_TRACE),
    ] = None,
    concurrent: Annotated[
        int, typer.Option("--concurrent", min=1, max=100_000, help="Conversations at a time.", rich_help_panel=_TRACE)
    ] = 1,
    sample: Annotated[
        float | None,
        typer.Option("--sample", min=1e-6, max=1.0, help="Share of blocks to look at.", rich_help_panel=_TRACE),
    ] = None,
    share: Annotated[
        float,
        typer.Option("--share", min=0.01, max=1.0, help="Of an endless pool's hits.", rich_help_panel=_TRACE),
    ] = 0.9,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="The curve as .png or .svg.", rich_help_panel=_TRACE)
    ] = None,
    series: Annotated[Series, typer.Option("--series", help="Hardware.", rich_help_panel=_POOL)] = Series.I800_A2,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, max=1024, help="Hosts alike that share the pool.", rich_help_panel=_POOL)
    ] = 1,
    evict_high: Annotated[int | None, typer.Option("--evict-high", help="Default 90.", rich_help_panel=_POOL)] = None,
    evict_low: Annotated[
        int | None, typer.Option("--evict-low", help="Default 10 below it.", rich_help_panel=_POOL)
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """How much memory KV cache takes for each token, and how large the pool has to be.

    Bytes per token from a log, a config.json, a running engine, or several of them (disagreements are said). Then the pool
    for a number of requests, or the hit rate against its size for a trace.

    JSON: bytes_per_token, gb_per_1k_tokens (10^9), kv_tokens, kv_bytes (all cards of one engine), source, details;
    sources (the same of each, with bytes_on_cards), disagreements, notes. With a demand: demand_tokens, pool_bytes (KV
    cache to hold), dram_bytes (of one host), dram_size_per_card, capacity_bytes (all hosts), hugepages (pages of
    hugepage_bytes), evict_high, evict_low, cards, nodes, series, settings (TOML). With a trace: curve (pool_bytes,
    hit_rate), knee, requests, blocks, distinct_blocks, max_hit_rate, all_bytes, prompt_tokens, block_tokens, form, unit,
    sample_rate, error, expected_hit_rate (least, most), skipped. null is unknown.
    """
    _check_use(trace, requests, input_tokens, output_tokens, plot)
    engine_cards = cards or tp * pp
    asked = _figures(log, config, metrics, bytes_per_token, gb_per_1k, cards, tp, pp, dp, dtype, block_size)
    answer: dict[str, Any] = {}
    block_tokens = block_size or 128
    figure = _best(asked, answer)
    pool: PoolSize | None = None
    traced: tuple[HitRates, HitCurve, TraceFacts] | None = None
    placing = {
        "cards": engine_cards * dp, "nodes": nodes, "series": series.value, "evict_high": evict_high, "evict_low": evict_low,
    }  # fmt: skip
    if requests is not None or trace is not None:
        if figure is None or figure.bytes_per_token is None:
            raise UsageError(
                "bytes per token are not known",
                hint="add --log, --config, --bytes-per-token or --gb-per-1k",
            )
        per_token = figure.bytes_per_token
        if requests is not None:
            pool = _demanded(
                requests, input_tokens or 0, output_tokens or 0, per_token, block_tokens, placing, answer
            )
        elif trace is not None:
            traced = _traced(
                trace, form, tokenizer, concurrent, sample, block_tokens, per_token, plot, answer
            )
            pool = _sized_by_trace(traced, per_token, share, placing, answer)
    if as_json:
        print_json(answer)
        return
    show(asked, figure, pool, traced, answer, plot)


def _check_use(
    trace: Path | None,
    requests: int | None,
    input_tokens: int | None,
    output_tokens: int | None,
    plot: Path | None,
) -> None:
    if trace is not None and requests is not None:
        raise UsageError("--trace and --requests are two demands", hint="size for one of them at a time")
    if (requests is None) != (input_tokens is None) or (output_tokens is not None and requests is None):
        raise UsageError(
            "--requests needs --input, and both go together with --output",
            hint="kvtierctl size --requests 100 --input 4000 --output 1000 --gb-per-1k 0.25 --cards 2",
        )
    if plot is not None:
        if trace is None:
            raise UsageError("--plot draws the curve of a trace", hint="add --trace FILE")
        from kvtierd.workload.sizing.plot import check_plot

        check_plot(plot)


def _figures(
    log: Path | None,
    config: Path | None,
    metrics: str | None,
    bytes_per_token: float | None,
    gb_per_1k: float | None,
    cards: int | None,
    tp: int,
    pp: int,
    dp: int,
    dtype: str | None,
    block_size: int | None,
) -> list[TokenFigure]:
    """What each source that was named says."""
    from kvtierd.workload.sizing.ask import ask_config, ask_log, ask_metrics
    from kvtierd.workload.sizing.figures import TokenFigure
    from kvtierd.workload.sizing.from_config import Spread

    if bytes_per_token is not None and gb_per_1k is not None:
        raise UsageError("--bytes-per-token and --gb-per-1k say the same", hint="give one of them")
    found: list[TokenFigure] = []
    given = (
        bytes_per_token
        if bytes_per_token is not None
        else None
        if gb_per_1k is None
        else gb_per_1k * GB / 1000
    )
    if given is not None:
        found.append(TokenFigure("given", given, given, details="as given"))
    if log is not None or metrics is not None:
        from kvtierd.plugins import load_plugins

        if cards is None and tp * pp == 1 and log is not None:
            raise UsageError(
                "on how many cards the engine of the log runs is not known",
                hint="add --cards N (the log's memory is that of one card), or --tp N",
            )
        drivers = load_plugins().drivers
        if log is not None:
            found.append(ask_log(log, drivers, cards=cards or tp * pp, block_tokens=block_size))
        if metrics is not None:
            found.append(ask_metrics(metrics, drivers, cards=cards or tp * pp, replicas=dp))
    if config is not None:
        found.append(ask_config(config, spread=Spread(tp, pp, dp), dtype=dtype))
    if not found:
        raise UsageError(
            "nothing to size by",
            hint="kvtierctl size --log vllm.log --cards 4, or --config config.json --tp 4; see --help",
        )
    return found


def _best(asked: list[TokenFigure], answer: dict[str, Any]) -> TokenFigure | None:
    from kvtierd.workload.sizing.ask import number
    from kvtierd.workload.sizing.figures import best_of, disagreements

    best = best_of(asked) or asked[0]
    whole = (
        best.source in {"log", "metrics"} and best.bytes_per_token is not None
    )  # no fractions that nobody measured

    def shown(figure: TokenFigure) -> dict[str, Any]:
        per_token = figure.bytes_per_token
        return {
            "bytes_per_token": round(per_token) if whole and per_token is not None else number(per_token),
            "gb_per_1k_tokens": None
            if figure.gb_per_1k_tokens is None
            else round(figure.gb_per_1k_tokens, 6),
            "kv_tokens": figure.kv_tokens,
            "kv_bytes": figure.kv_bytes,
            "source": figure.source,
            "details": figure.details,
        }

    answer.update(shown(best))
    answer["sources"] = [{**shown(f), "bytes_on_cards": number(f.bytes_on_cards)} for f in asked]
    answer["disagreements"] = disagreements(asked)
    answer["notes"] = list(dict.fromkeys(n for f in [*asked, best] for n in f.notes))
    return best if best.bytes_per_token is not None else None


def _demanded(
    requests: int,
    input_tokens: int,
    output_tokens: int,
    per_token: float,
    block_tokens: int,
    placing: dict[str, Any],
    answer: dict[str, Any],
) -> PoolSize:
    from kvtierd.workload.sizing.demand import demand_bytes, size_pool

    wanted = demand_bytes(
        requests=requests, input_tokens=input_tokens, output_tokens=output_tokens, bytes_per_token=per_token
    )
    tokens = requests * (input_tokens + output_tokens)
    pool = size_pool(
        wanted,
        **placing,
        value_bytes=round(block_tokens * per_token),
        why=[
            f"{tokens:,} tokens x {per_token:,.0f} bytes = {wanted / GB:,.2f} GB of KV cache, below evict_high"
        ],
    )
    answer["demand_tokens"] = tokens
    if input_tokens <= block_tokens:
        answer["notes"].append(
            f"prompts of {input_tokens:,} tokens cannot hit: they fill no block of {block_tokens} before their last token,"
            " which is always computed"
        )
    _put_pool(pool, answer)
    return pool


def _traced(
    path: Path,
    form: Form | None,
    tokenizer: Path | None,
    concurrent: int,
    sample: float | None,
    block_tokens: int,
    per_token: float,
    plot: Path | None,
    answer: dict[str, Any],
) -> tuple[HitRates, HitCurve, TraceFacts]:
    from kvtierd.workload.dataset.records import Skips
    from kvtierd.workload.sizing.hit_rates import hit_rates
    from kvtierd.workload.sizing.trace import read_trace

    skips = Skips()
    blocks, facts = read_trace(
        path,
        block_tokens=block_tokens,
        skips=skips,
        form=None if form is None else form.value,
        tokenizer=tokenizer,
        concurrent=concurrent,
        rate=sample,
    )
    curve = blocks.curve()
    rates = hit_rates(curve, block_tokens=facts.block_tokens, bytes_per_token=per_token)
    notes = answer["notes"]
    notes += facts.notes
    if facts.short_requests:
        notes.append(
            f"{facts.short_requests:,} of {rates.requests:,} requests fill no block of {facts.block_tokens}: they never hit"
        )
    if facts.backwards:
        notes.append(
            f"{facts.backwards:,} requests lie before the one in front of them; the file's order was kept"
        )
    if rates.error is not None:
        notes.append(
            f"{rates.rate:.3%} of the blocks were looked at; hit rates are within {100 * rates.error:.1f} points (95 %)"
        )
    notes += [f"left out or changed: {line}" for line in skips.lines()]
    answer |= {
        "curve": [dataclasses.asdict(point) for point in rates.points],
        "knee": dataclasses.asdict(rates.knee),
        "requests": rates.requests,
        "blocks": rates.blocks,
        "distinct_blocks": rates.distinct_blocks,
        "max_hit_rate": rates.max_hit_rate,
        "all_bytes": rates.all_bytes,
        "prompt_tokens": rates.prompt_tokens,
        "block_tokens": facts.block_tokens,
        "form": facts.form,
        "unit": facts.unit,
        "sample_rate": rates.rate,
        "error": rates.error,
        "skipped": skips.as_dict(),
    }
    if plot is not None:
        from kvtierd.workload.sizing.plot import plot as draw

        draw(rates, plot, title=f"{path.name}: {rates.requests:,} requests")
    return rates, curve, facts


def _sized_by_trace(
    traced: tuple[HitRates, HitCurve, TraceFacts],
    per_token: float,
    share: float,
    placing: dict[str, Any],
    answer: dict[str, Any],
) -> PoolSize | None:
    """The pool for that share of the hits; none when there are no hits at all."""
    from kvtierd.workload.sizing.demand import size_pool
    from kvtierd.workload.sizing.hit_rates import size_for

    rates, curve, facts = traced
    if not rates.max_hit_rate:
        answer["notes"].append("no block comes twice: no pool of any size would have a hit")
        return None
    block_bytes = facts.block_tokens * per_token
    wanted = size_for(curve, share) * block_bytes
    pool = size_pool(
        round(wanted),
        **placing,
        value_bytes=round(block_bytes),
        why=[f"{share:.0%} of the hits of an endless pool: {wanted / GB:,.2f} GB of KV cache"],
    )

    def at(percent: int) -> float:
        held = pool.capacity_bytes * percent / 100 / block_bytes
        return min(rates.max_hit_rate, float(curve.hits(held)) * facts.block_tokens / rates.prompt_tokens)

    answer["expected_hit_rate"] = {"least": at(pool.evict_low), "most": at(pool.evict_high)}
    _put_pool(pool, answer)
    return pool


def _put_pool(pool: PoolSize, answer: dict[str, Any]) -> None:
    answer |= {
        "pool_bytes": pool.kv_bytes,
        "dram_bytes": pool.dram_bytes,
        "dram_size_per_card": pool.dram_bytes_per_card,
        "capacity_bytes": pool.capacity_bytes,
        "hugepages": pool.hugepages.pages,
        "hugepage_bytes": pool.hugepages.page_size_bytes,
        "evict_high": pool.evict_high,
        "evict_low": pool.evict_low,
        "cards": pool.cards,
        "nodes": pool.nodes,
        "series": pool.series,
        "settings": pool.settings,
    }
    answer["notes"] += pool.notes


# -- for people ----------------------------------------------------------------------------------------------------------
