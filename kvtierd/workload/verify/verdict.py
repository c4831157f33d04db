"""What the answers of a proof mean. Pure: no I/O, no clock."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

from kvtierd.plan.engine import TierTokens

StepName = Literal["cold", "warm", "restored", "again"]

ENOUGH: Final = 0.9
"""Share of what L1 had that must come back from L3. The last blocks may be missing: tiers cut at other borders."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One request: which tier served how many tokens of its prompt, and what it generated."""

    name: StepName
    tokens: TierTokens
    text: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """What is known about the way into L3 and back.

    ``written_tokens`` is how many tokens L3 took since before the first request, ``None`` when the engine does not say.
    ``l2_capacity_tokens`` is the room of the engine's own second tier, through which SGLang brings back what L3 has.
    ``after_restart``: L1 and L2 were emptied by a restart, not by a flush.
    """

    written_tokens: int | None = None
    has_l3: bool | None = None
    l2_capacity_tokens: int | None = None
    after_restart: bool = False
    hash_seed: str | None = None  # PYTHONHASHSEED of the engine; None: it is not set, or not known


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """Why the proof failed: a stable code, what was seen, what to do."""

    code: str
    message: str
    hint: str = ""


def judge_cold(cold: Step) -> Fault | None:
    """A prompt that nobody has asked before must be computed."""
    tokens = cold.tokens
    if _unknown(tokens):
        return _details_off(tokens)
    found = (tokens.l1 or 0) + (tokens.l2 or 0) + (tokens.l3 or 0)
    if found * 10 > (tokens.prompt or 0):
        return Fault(
            "not-cold",
            f"the first request was served from a cache already ({_told(tokens)})",
            "use another --seed: with this one the prompt was asked before",
        )
    return None


def judge_warm(warm: Step) -> Fault | None:
    """The same prompt again must come from L1, and from L1 only."""
    tokens = warm.tokens
    if _unknown(tokens):
        return _details_off(tokens)
    if not tokens.l1:
        return Fault(
            "no-l1-hit",
            f"the same prompt again was not served from L1 ({_told(tokens)})",
            "the engine's own prefix cache is off, the prompt is shorter than one block (raise --length; hybrid models"
            " need thousands of tokens), or L1 is too small to keep it",
        )
    if tokens.l2 or tokens.l3:
        return Fault(
            "l1-incomplete",
            f"L1 did not have the whole prompt a moment after it was computed ({_told(tokens)})",
            "others use the engine now, or L1 is too small: try when it is quiet, or lower --length",
        )
    return None


def enough_restored(warm: Step, restored: Step) -> bool:
    """L3 gave back what L1 had had, and the tiers above it were empty."""
    tokens = restored.tokens
    return not tokens.l1 and not tokens.l2 and (tokens.l3 or 0) >= ENOUGH * (warm.tokens.l1 or 0)


def judge_restored(warm: Step, restored: Step, stored: Stored) -> Fault | None:
    """After L1 and L2 were emptied the prompt must come from L3, and give the same text."""
    tokens, wanted = restored.tokens, warm.tokens.l1 or 0
    if tokens.l1:
        return Fault(
            "flush-no-effect",
            f"L1 still had the prompt after it was emptied ({_told(tokens)})",
            "requests of others hold its blocks: try when the engine is idle",
        )
    if _unknown(tokens):
        return _details_off(tokens)
    if tokens.l2:
        return Fault(
            "flush-no-effect",
            f"L2 still had the prompt after it was emptied ({_told(tokens)})",
            "try when the engine is idle",
        )
    if not enough_restored(warm, restored):
        return _not_restored(tokens, wanted, stored)
    return None


def judge_texts(cold: Step, warm: Step, restored: Step, again: Step) -> tuple[Fault | None, str]:
    """Whether a tier changed the text, and a remark about the engine itself.

    What L3 gave back is held against the answer from L1. An engine may compute a prompt anew with other last bits than
    those it had cached; that is a remark, not a fault, as long as L3 agrees with one of the two.
    """
    if restored.text == warm.text:
        if cold.text != warm.text:
            return (
                None,
                "the engine itself gives another text when it computes the prompt than from its own cache",
            )
        if again.text != restored.text:
            return (
                None,
                "the last answer, from L1, differs from the one restored: the engine itself is not deterministic",
            )
        return None, ""
    if restored.text == cold.text:
        return (
            None,
            "the engine itself gives another text from L1 than when it computes; L3 agrees with the computed one",
        )
    if warm.text != again.text:
        return (
            Fault(
                "engine-differs",
                "the engine gives different texts for one prompt even from L1, so the texts prove nothing about L3",
                "verify with a deterministic engine: temperature 0, no speculative decoding, no other load",
            ),
            "",
        )
    return (
        Fault(
            "wrong-text",
            "what L3 gave back changed the text: wrong KV is worse than none",
            "kvtierctl purge, then verify again; if it stays, take L3 off the engine and report it",
        ),
        "",
    )


def judge_again(again: Step) -> Fault | None:
    """What L3 gave back must be in L1 now."""
    if not again.tokens.l1:
        return Fault(
            "not-in-l1-again",
            f"after L3 had given the prompt back, L1 did not have it ({_told(again.tokens)})",
            "L1 is too small, or others use the engine: try when it is quiet",
        )
    return None


def _not_restored(tokens: TierTokens, wanted: int, stored: Stored) -> Fault:
    seen = f"L3 gave back {tokens.l3 or 0} of {wanted} tokens"
    if stored.has_l3 is False:
        return Fault(
            "no-l3",
            f"{seen}: the engine has no L3",
            "l3 is off in its settings, or detached: kvtierctl status",
        )
    written = stored.written_tokens
    if written is not None and written < ENOUGH * wanted:
        return Fault(
            "not-persisted",
            f"{seen}: only {written} tokens had been written to it",
            "wait longer (--deadline); SGLang writes after the first request only with"
            " --hicache-write-policy write_through; a pool that is full or has no holder takes nothing (kvtierctl status)",
        )
    if not tokens.l3:
        if stored.after_restart and stored.hash_seed in {None, "random"}:
            said = "is not set" if stored.hash_seed is None else "is random"
            return Fault(
                "hash-seed",
                f"{seen} after the restart: PYTHONHASHSEED {said}, so block names differ in every process",
                'PYTHONHASHSEED = "0" under [engine.env], on every host',
            )
        if written is None:
            return Fault(
                "not-restored",
                f"{seen}: not written yet, or not asked for (the engine does not say how much it wrote)",
                "wait longer (--settle); kvtierctl status shows whether the pool's use grew and whether lookups hit",
            )
        return Fault(
            "not-prefetched",
            f"{seen}, though {written} tokens had been written to it",
            "SGLang: --hicache-storage-prefetch-policy wait_complete; others: the pool was purged or evicted meanwhile",
        )
    room = stored.l2_capacity_tokens
    if room is not None and room < wanted:
        return Fault(
            "host-too-small",
            f"{seen}: they pass through L2, which has room for {room} tokens",
            "give the engine more L2 (l2 in its settings, SGLang's --hicache-size), or lower --length",
        )
    return Fault(
        "partly-restored",
        f"{seen}",
        "the prefetch was cut off (SGLang: wait_complete), the pool evicted the rest, or the engine's host memory is short",
    )


def _unknown(tokens: TierTokens) -> bool:
    return tokens.l1 is None


def _details_off(tokens: TierTokens) -> Fault:
    return Fault(
        "details-off",
        f"the engine does not say which tier served the prompt ({_told(tokens)})",
        "SGLang: --enable-cache-report and --enable-metrics; vLLM: its metrics (no --disable-log-stats)",
    )


def _told(tokens: TierTokens) -> str:
    parts = [f"{name} {'unknown' if value is None else value}" for name, value in _tiers(tokens)]
    return f"of {'unknown' if tokens.prompt is None else tokens.prompt} tokens: {', '.join(parts)}"


def _tiers(tokens: TierTokens) -> tuple[tuple[str, int | None], ...]:
    return (("L1", tokens.l1), ("L2", tokens.l2), ("L3", tokens.l3))
