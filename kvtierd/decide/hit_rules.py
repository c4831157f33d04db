"""PURE: tiers that give nothing: no hits in L3 although prefixes repeat, an L2 that costs more than it gives.

Both are for a person to cure: they come from settings. The rules name the cause as far as it can be seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from kvtierd.decide.finding import (
    HOUR_SECONDS,
    Finding,
    Memory,
    engine_problem,
    known,
    pool_of,
    tier_of,
    tokens,
    unit_group,
)
from kvtierd.decide.policy import Policy
from kvtierd.decide.proposals import Advise, Proposal
from kvtierd.observe.picture import EnginePicture, Picture
from kvtierd.quantities import GIB, format_size


@dataclasses.dataclass(frozen=True, slots=True)
class _Identity:
    """What an engine makes its keys from."""

    where: str
    group: str
    hash_seed: str | None
    model: str
    block_tokens: int | None


def zero_hits(picture: Picture, policy: Policy, _memory: Memory) -> Iterator[Finding]:
    """L3 is asked for much and never hits, while L1 or L2 show that prefixes repeat."""
    rule = "zero-hits"
    for engine in picture.engines:
        why = engine_problem(engine, picture, policy)
        asked, hit = tokens(tier_of(engine, HOUR_SECONDS, "L3"))
        if not engine.uses_pool or engine.l3_detached:
            yield Finding(rule, engine.unit, "clear", "it does not use L3 now")
            continue
        if why or asked is None or hit is None:
            yield Finding(
                rule, engine.unit, "unknown", why or "it has not been watched for an hour, or has no counters"
            )
            continue
        text = f"L3 was asked for {asked:.0f} tokens within an hour and had {hit:.0f} of them"
        if hit > 0 or asked < policy.zero_hits_tokens / 2:
            yield Finding(rule, engine.unit, "clear", text)
            continue
        repeats = _repeats(engine)
        if asked < policy.zero_hits_tokens or repeats is None or repeats < policy.repeat_hit_rate:
            seen = "are not known to repeat" if repeats is None else f"repeat at {repeats:.0%}"
            yield Finding(rule, engine.unit, "between", f"{text}; prefixes {seen}")
            continue
        cause = zero_hits_cause(engine, picture, policy)
        text = f"{text}, though its own tiers hit {repeats:.0%}"
        yield Finding(rule, engine.unit, "holds", text, Proposal(
            rule, engine.unit, Advise(f"{engine.unit} never hits in L3: {cause}"), text, group=unit_group(engine),
            numbers={"query_tokens": int(asked), "repeat_hit_rate": repeats}, expected="hits in L3 within minutes",
        ))  # fmt: skip


def _repeats(engine: EnginePicture) -> float | None:
    rates = []
    for tier in ("L1", "L2"):
        asked, hit = tokens(tier_of(engine, HOUR_SECONDS, tier))
        if asked and hit is not None:
            rates.append(min(hit / asked, 1.0))
    return max(rates, default=None)


def zero_hits_cause(engine: EnginePicture, picture: Picture, policy: Policy) -> str:
    """Why, in words: the surest cause first."""
    own = _Identity(engine.unit, engine.group, engine.hash_seed, engine.model, engine.block_tokens)
    others = list(_others(engine, picture))
    if own.hash_seed in {"", "random"}:
        return (
            "PYTHONHASHSEED is not set to a number in its process, so each process makes other keys; set the same number"
            " on every node"
        )
    same_model = [o for o in others if own.model and o.model == own.model]
    for other in same_model or [o for o in others if o.group and o.group == own.group]:
        if own.hash_seed is not None and other.hash_seed not in {None, own.hash_seed}:
            return (
                f"PYTHONHASHSEED is {own.hash_seed} here and {other.hash_seed or 'not set'} on {other.where}; it must be the"
                " same number everywhere"
            )
    for other in others:
        if other.group and other.group == own.group and own.model and other.model not in {"", own.model}:
            return f"its keys are of model {own.model}, those of {other.where} of {other.model}: one model, one name"
    for other in same_model:
        if own.block_tokens and other.block_tokens not in {None, own.block_tokens}:
            return f"its blocks have {own.block_tokens} tokens, those of {other.where} {other.block_tokens}"
    return _cause_in_pool(picture, policy)


def _others(engine: EnginePicture, picture: Picture) -> Iterable[_Identity]:
    for e in picture.engines:
        if e.unit != engine.unit:
            yield _Identity(e.unit, e.group, e.hash_seed, e.model, e.block_tokens)
    for o in picture.engines_elsewhere:
        yield _Identity(f"{o.unit} on {o.node}", o.group, o.hash_seed, o.model, o.block_tokens)


def _cause_in_pool(picture: Picture, policy: Policy) -> str:
    pool = pool_of(picture, policy)
    if not isinstance(pool, str):
        if pool.capacity_bytes == 0:
            return "the pool has no memory: no pool holder has joined"
        if pool.stored_keys == 0:
            return "nothing is stored in the pool: no engine writes to it, or its writes fail"
        hour = pool.windows.get(HOUR_SECONDS)
        if hour is not None and known(hour.query_keys) == 0:
            return (
                "the MetaService was asked for no key: the engine does not reach it, though it counts lookups"
            )
    return (
        "no cause can be seen: compare what goes into the keys (PYTHONHASHSEED, the model's name, block size, parallel"
        " sizes) between what wrote and what reads; kvtierctl verify shows whether a prompt comes back"
    )


def l2_costs(picture: Picture, policy: Policy, _memory: Memory) -> Iterator[Finding]:
    """Host memory in L2 that hits far less than the same memory does in the pool.

    The node's own hits are held against the whole pool, which speaks for L2 where there are other nodes.
    """
    rule = "l2-costs"
    pool = pool_of(picture, policy)
    for engine in picture.engines:
        if not engine.l2_capacity_bytes:
            yield Finding(rule, engine.unit, "clear", "it has no L2, or its size is not known")
            continue
        why = engine_problem(engine, picture, policy)
        asked, hit = tokens(tier_of(engine, HOUR_SECONDS, "L2"))
        _, pool_hit = tokens(picture.tiers.get(HOUR_SECONDS, {}).get("L3"))
        capacity = None if isinstance(pool, str) else known(pool.capacity_bytes)
        if why or asked is None or hit is None or pool_hit is None or not capacity:
            yield Finding(
                rule, engine.unit, "unknown", why or "an hour of hits in L2 and L3, or the pool, is not known"
            )
            continue
        if asked < policy.zero_hits_tokens:
            yield Finding(
                rule, engine.unit, "clear", f"{asked:.0f} tokens asked of L2 within an hour say nothing"
            )
            continue
        rate = min(hit / asked, 1.0)
        given = hit * GIB / engine.l2_capacity_bytes
        pool_gives = pool_hit * GIB / capacity
        text = (
            f"L2 of {engine.unit} ({format_size(engine.l2_capacity_bytes)}) hits {rate:.1%}: {given:.0f} tokens per GiB and"
            f" hour, the pool {pool_gives:.0f}"
        )
        if rate >= 2 * policy.l2_hit_rate or pool_gives < given:
            yield Finding(rule, engine.unit, "clear", text)
        elif rate >= policy.l2_hit_rate or pool_gives < policy.l2_ratio * given or pool_gives == 0:
            yield Finding(rule, engine.unit, "between", text)
        else:
            advice = Advise(
                f"L2 of {engine.unit} costs more than it gives: leave out l2 and give its"
                f" {format_size(engine.l2_capacity_bytes)} to [pool] dram"
            )
            yield Finding(rule, engine.unit, "holds", text, Proposal(
                rule, engine.unit, advice, text, severity="info", group=unit_group(engine),
                numbers={"l2_hit_rate": rate, "l2_tokens_per_gib": given, "pool_tokens_per_gib": pool_gives},
            ))  # fmt: skip
