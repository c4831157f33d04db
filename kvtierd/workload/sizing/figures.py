"""What one token takes, from each place that says it, and whether the places agree. Pure.

"Per token" is what all cards of one engine keep for one token of context. The pool keeps one copy of it: engines that
hold the same heads (or MLA's one latent) on several cards store it once (vLLM Ascend: one card of each group writes).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Final, Literal

from kvtierd.quantities import GIB

GB: Final = 1000**3
DISAGREEMENT: Final = 0.05
Source = Literal["log", "metrics", "config", "given"]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenFigure:
    """Bytes of KV cache per token, from one source.

    ``kv_tokens`` and ``kv_bytes`` are the room of one engine's cache in tokens and in bytes over all its cards, where the
    source says them. ``bytes_on_cards`` is what the engine's cards hold for one token, copies included; one copy is
    ``bytes_per_token``: the same unless the source knows of copies. ``None`` is unknown: metrics may have only
    ``kv_tokens``.
    """

    source: Source
    bytes_per_token: float | None
    bytes_on_cards: float | None
    kv_tokens: int | None = None
    kv_bytes: int | None = None
    details: str = ""
    notes: tuple[str, ...] = ()

    @property
    def gb_per_1k_tokens(self) -> float | None:
        """GB (10^9 bytes) for 1,000 tokens."""
        return None if self.bytes_per_token is None else self.bytes_per_token * 1000 / GB


def per_1k(bytes_per_token: float) -> str:
    """For people; both meanings of GB, since MemCache's own files mean 2^30."""
    return f"{bytes_per_token * 1000 / GB:.3f} GB ({bytes_per_token * 1000 / GIB:.3f} GiB)"


def disagreements(figures: Sequence[TokenFigure]) -> list[str]:
    """Where two sources differ by more than 5 %: bytes that the cards hold per token, or room in tokens."""
    told: list[str] = []
    for one, other in itertools.combinations(figures, 2):
        if _differ(one.bytes_on_cards, other.bytes_on_cards):
            assert one.bytes_on_cards is not None
            assert other.bytes_on_cards is not None
            told.append(
                f"{one.source} says {one.bytes_on_cards:,.0f} bytes per token on the cards, {other.source}"
                f" {other.bytes_on_cards:,.0f} ({other.bytes_on_cards / one.bytes_on_cards - 1:+.1%}): {_advice(one, other)}"
            )
        if _differ(one.kv_tokens, other.kv_tokens):
            assert one.kv_tokens is not None
            assert other.kv_tokens is not None
            times = other.kv_tokens / one.kv_tokens
            whole = round(max(times, 1 / times))
            same = whole > 1 and abs(max(times, 1 / times) / whole - 1) <= 0.01
            told.append(
                f"{one.source} says room for {one.kv_tokens:,} tokens, {other.source} for {other.kv_tokens:,}"
                + (
                    f": {whole} times, as {whole} data-parallel engines counted together would have"
                    if same
                    else ": they are not of the same engine or start"
                )
            )
    return told


def best_of(figures: Sequence[TokenFigure]) -> TokenFigure | None:
    """The figure to go by: what a running engine measured before what its model's configuration gives.

    Where the configuration knows that the cards hold copies, one copy counts: the measured figure is divided by their
    number.
    """
    known = [figure for figure in figures if figure.bytes_per_token is not None]
    order: list[Source] = ["given", "log", "metrics", "config"]
    known.sort(key=lambda figure: order.index(figure.source))
    if not known:
        return None
    best = known[0]
    config = next((figure for figure in known if figure.source == "config"), None)
    if best.source in {"log", "metrics"} and config is not None and best.bytes_on_cards is not None:
        assert config.bytes_per_token is not None
        assert config.bytes_on_cards is not None
        copies = config.bytes_on_cards / config.bytes_per_token
        if copies > 1:
            note = (
                f"each token is on {copies:g} cards alike; the pool keeps one copy, so the {best.source}'s"
                f" {best.bytes_on_cards:,.0f} bytes count as {best.bytes_on_cards / copies:,.0f}"
            )
            return dataclasses.replace(
                best, bytes_per_token=best.bytes_on_cards / copies, notes=(*best.notes, note)
            )
    return best


def _differ(one: float | None, other: float | None) -> bool:
    if not one or not other:
        return False
    return abs(one - other) > DISAGREEMENT * min(one, other)


def _advice(one: TokenFigure, other: TokenFigure) -> str:
    if "config" in {one.source, other.source}:
        return "check --cards, --tp, --pp and --dtype against how the engine was started, and what else it caches"
    return "they are not of the same engine or start, or --cards is not its number of cards"
