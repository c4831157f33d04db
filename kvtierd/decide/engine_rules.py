"""PURE: engines that lost their way to the pool, or whose loads from it fail.

A failed load can lead to wrong output in the engine (seen in public reports), so the first one is said and a series of
them takes L3 away: a cold cache is the lesser evil. What all engines suffer at once is not any engine's fault.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtierd.decide.finding import Finding, Memory, engine_problem, known, pool_of, unit_group
from kvtierd.decide.policy import Policy
from kvtierd.decide.proposals import (
    POOL,
    Action,
    Advise,
    AttachL3,
    DetachL3,
    Proposal,
    Purge,
    RestartUnit,
    Severity,
)
from kvtierd.observe.picture import EnginePicture, Picture
from kvtierd.quantities import format_duration

MOST_WAIT_SECONDS = 86400.0


def engine_unregistered(picture: Picture, policy: Policy, _memory: Memory) -> Iterator[Finding]:
    """A ready engine that has no links with the MetaService."""
    rule = "engine-unregistered"
    using = [e for e in picture.engines if e.uses_pool and not e.l3_detached and e.instance is not None]
    lost = [e for e in using if e.registered is False]
    for engine in picture.engines:
        why = engine_problem(engine, picture, policy)
        if not engine.uses_pool or engine.l3_detached:
            yield Finding(rule, engine.unit, "clear", "it does not use L3 now")
        elif why:
            yield Finding(rule, engine.unit, "unknown", why)
        elif engine.registered is None:
            yield Finding(rule, engine.unit, "unknown", "whether it is registered cannot be seen")
        elif engine.registered:
            yield Finding(rule, engine.unit, "clear", "it is registered with the MetaService")
        elif _pool_away(picture):
            yield Finding(rule, engine.unit, "unknown", f"it is not registered; but {_pool_away(picture)}")
        else:
            text = f"{engine.unit} is ready and has no registration with the MetaService"
            action: Action
            if len(lost) == len(using) > 1:
                action = Advise(
                    f"all {len(using)} engines of {picture.node} lost their registration: see its endpoint and the"
                    " MetaService, not the engines"
                )
            else:
                action = _cure(
                    engine,
                    policy.unregistered,
                    "it lost its registration: kvtierctl restart brings it back",
                )
            yield _finding(
                rule, engine, action, text, {"registered": "no"},
                expected="it finds and stores blocks in L3 again", verified_by="its links at the endpoint",
            )  # fmt: skip


def _pool_away(picture: Picture) -> str:
    if not picture.master:
        return "there is no master"
    if picture.is_master and (picture.pool is None or picture.pool.hung_seconds):
        return "the MetaService does not answer"
    return ""


def _cure(engine: EnginePicture, how: str, advice: str) -> Action:
    if how == "advise":
        return Advise(f"{engine.unit}: {advice}")
    if how == "detach" and engine.can_switch_l3:
        return DetachL3(engine.unit)
    return RestartUnit(engine.unit, drained=True, rolling=True)


def _failing(picture: Picture, policy: Policy) -> tuple[list[EnginePicture], int]:
    """Engines whose loads go on failing, and how many use the pool and can be seen."""
    seen = [
        e
        for e in picture.engines
        if e.uses_pool and not e.l3_detached and not engine_problem(e, picture, policy)
    ]
    bad = [
        e for e in seen if (known(e.failed_loads_windows.get(policy.window)) or 0) >= policy.failed_loads_most
    ]
    return bad, len(seen)


def failed_loads(picture: Picture, policy: Policy, _memory: Memory) -> Iterator[Finding]:
    """Loads from L3 that failed: said at the first, acted on when they go on."""
    rule = "failed-loads"
    bad, seen = _failing(picture, policy)
    left = policy.failed_loads_everywhere == "purge" and len(bad) == seen > 1
    for engine in picture.engines:
        first = f"{engine.unit} first"
        why = engine_problem(engine, picture, policy)
        failed = known(engine.failed_loads_windows.get(policy.window))
        if not engine.uses_pool or engine.l3_detached:
            yield Finding(rule, engine.unit, "clear", "it does not use L3 now")
            yield Finding(rule, engine.unit, "clear", "it does not use L3 now", key=first)
            continue
        if why or failed is None:
            yield Finding(rule, engine.unit, "unknown", why or "its failed loads are not known")
            yield Finding(rule, engine.unit, "unknown", why or "its failed loads are not known", key=first)
            continue
        text = (
            f"{failed:.0f} KV loads of {engine.unit} failed within {format_duration(policy.window_seconds)}"
        )
        numbers: dict[str, float | int | str] = {"failed_loads": int(failed)}
        if failed == 0:
            yield Finding(rule, engine.unit, "clear", text, key=first)
        else:
            told = Advise(
                f"{engine.unit} is degraded: a KV load failed. At {policy.failed_loads_most} within the window:"
                f" {policy.failed_loads}"
            )
            yield _finding(rule, engine, told, text, numbers, key=first)
        if failed <= policy.failed_loads_most / 4:
            yield Finding(rule, engine.unit, "clear", text)
        elif failed < policy.failed_loads_most:
            yield Finding(rule, engine.unit, "between", text)
        elif left:
            yield Finding(
                rule, engine.unit, "clear", f"{text}; so do all: failed-loads-everywhere sees to it"
            )
        else:
            yield _finding(
                rule, engine,
                _cure(engine, policy.failed_loads, "its KV loads fail: detach L3 (kvtierctl l3) or restart it"),
                text, numbers, severity="error", urgent=True,
                expected="no more failed loads; without L3 it computes what it would have loaded",
                verified_by="its count of failed loads stands still",
            )  # fmt: skip


def failed_loads_everywhere(picture: Picture, policy: Policy, _memory: Memory) -> Iterator[Finding]:
    """All engines' loads fail: the pool is at fault."""
    rule = "failed-loads-everywhere"
    bad, seen = _failing(picture, policy)
    if not seen:
        yield Finding(rule, POOL, "unknown", "no engine that uses L3 can be seen")
        return
    text = (
        f"{len(bad)} of {seen} engines have {policy.failed_loads_most} failed KV loads or more in the window"
    )
    if seen < 2 or not bad:
        yield Finding(rule, POOL, "clear", text)
    elif len(bad) < seen:
        yield Finding(rule, POOL, "between", text)
    elif policy.failed_loads_everywhere == "purge" and picture.is_master:
        if isinstance(pool := pool_of(picture, policy), str):
            # Loads from a MetaService that does not answer fail as well, and what it holds is not at fault.
            yield Finding(rule, POOL, "unknown", f"{text}; but {pool}")
            return
        yield Finding(rule, POOL, "holds", text, Proposal(
            rule, POOL, Purge(), text, severity="error", urgent=True, numbers={"engines": seen},
            expected="loads succeed again, from an empty pool", verified_by="no failed loads in the next window",
        ))  # fmt: skip
    else:
        advice = Advise(
            "all engines' KV loads fail: the pool's contents are suspect; kvtierctl purge empties it"
        )
        yield Finding(
            rule,
            POOL,
            "holds",
            text,
            Proposal(rule, POOL, advice, text, severity="error", numbers={"engines": seen}),
        )


def l3_attach(picture: Picture, policy: Policy, memory: Memory) -> Iterator[Finding]:
    """An engine whose L3 was taken away by a rule gets it back after a while, later each time."""
    rule = "l3-attach"
    for engine in picture.engines:
        kept = memory.detached.get(engine.unit)
        why = engine_problem(engine, picture, policy)
        if kept is None or kept.attached or not engine.l3_detached:
            yield Finding(rule, engine.unit, "clear", "no rule has detached its L3")
            continue
        if why or not engine.can_switch_l3 or _pool_away(picture):
            yield Finding(
                rule,
                engine.unit,
                "unknown",
                why or _pool_away(picture) or "its L3 cannot be switched while it runs",
            )
            continue
        wait = min(policy.attach_after_seconds * 2 ** min(kept.times - 1, 20), MOST_WAIT_SECONDS)
        gone = picture.now_seconds - kept.at_seconds
        text = f"{engine.unit} has been without L3 for {format_duration(max(gone, 0.0))} of {format_duration(wait)}"
        failed = known(engine.failed_loads_windows.get(policy.window))
        if gone < wait or failed:
            yield Finding(rule, engine.unit, "between", text)
        else:
            yield _finding(
                rule, engine, AttachL3(engine.unit), text, {"detached_times": kept.times}, severity="info",
                expected="it finds blocks in L3 again", verified_by="lookups in L3, and no failed loads",
            )  # fmt: skip


def _finding(
    rule: str,
    engine: EnginePicture,
    action: Action,
    text: str,
    numbers: dict[str, float | int | str],
    *,
    key: str = "",
    severity: Severity = "warning",
    urgent: bool = False,
    expected: str = "",
    verified_by: str = "",
) -> Finding:
    proposal = Proposal(
        rule, engine.unit, action, text, severity=severity, group=unit_group(engine), urgent=urgent,
        numbers=numbers, expected=expected, verified_by=verified_by,
    )  # fmt: skip
    return Finding(rule, engine.unit, "holds", text, proposal, key=key)
