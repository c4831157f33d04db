"""What may start now, and what is said of what may not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.node.gating import Gates

READY = {"kvtier-pool-0": SimpleNamespace(state="ready")}


def node(**more: Any) -> Any:
    """A node on which everything may start."""
    return SimpleNamespace(
        **{
            "planned": True,
            "settings": SimpleNamespace(cluster=SimpleNamespace(mode="standalone")),
            "hugepages": SimpleNamespace(problem=""),
            "tier": SimpleNamespace(state="joinable", phase="serving", reasons=()),
            "endpoint": None,
            "endpoint_status": None,
            "keeper": None,
            "master": "",
            "plan": SimpleNamespace(pool=SimpleNamespace(placement="standalone")),
            **more,
        }
    )


def unit(kind: str, **more: Any) -> Any:
    return SimpleNamespace(**{"kind": kind, "blocked": None, "after": (), **more})


def mastership(**more: Any) -> Any:
    return SimpleNamespace(**{"may_run_meta": False, "client_gate": lambda: None, **more})


@pytest.mark.parametrize("kind", ["endpoint", "meta", "pool", "engine"])
def test_when_all_is_well_everything_may_start(kind: str) -> None:
    assert Gates(node()).why_not(unit(kind), {}) is None


@pytest.mark.parametrize(
    ("spec", "what", "word"),
    [
        (unit("meta"), {"planned": False}, "settings are planned"),
        (unit("engine", blocked="device 3 is held by x"), {}, "device 3 is held"),
        (unit("pool"), {"hugepages": SimpleNamespace(problem="too few\nmore")}, "too few (kvtierctl reload"),
        (unit("engine", after=("kvtier-pool-0",)), {}, "waits for kvtier-pool-0 (not there)"),
        (unit("engine"), {"keeper": object(), "tier": SimpleNamespace(state="pool_ready", phase="serving", reasons=("x",))},
         "waits for the pool: it is pool ready: x"),
        (unit("pool"), {"keeper": object(), "tier": SimpleNamespace(state="joinable", phase="recovering", reasons=())},
         "are back"),
    ],
)  # fmt: skip
def test_what_may_not_start_says_why(spec: Any, what: dict[str, Any], word: str) -> None:
    told = Gates(node(**what)).why_not(spec, {})
    assert told is not None
    assert word in told


def test_a_unit_waits_until_those_before_it_are_ready() -> None:
    engine = unit("engine", after=("kvtier-pool-0",))
    assert Gates(node()).why_not(engine, READY) is None  # type: ignore[arg-type]
    starting: Any = {"kvtier-pool-0": SimpleNamespace(state="starting")}
    assert Gates(node()).why_not(engine, starting) == "waits for kvtier-pool-0 (starting)"


def test_a_meta_service_waits_for_mastership_and_nothing_else_does() -> None:
    gates = Gates(node(settings=SimpleNamespace(cluster=SimpleNamespace(mode="lease"))))
    assert gates.why_not(unit("meta"), {}) == "waits until this node is the master"
    gates.mastership = mastership()
    assert gates.why_not(unit("meta"), {}) == "waits until this node is the master"
    gates.mastership = mastership(may_run_meta=True)
    assert gates.why_not(unit("meta"), {}) is None
    assert gates.why_not(unit("endpoint"), {}) is None


@pytest.mark.parametrize(
    ("status", "free"),
    [(None, False), ({"backend": {"reachable": False}}, False), ({"backend": {"reachable": True}}, True)],
)
def test_clients_wait_until_their_endpoint_reaches_the_master(status: Any, free: bool) -> None:
    gates = Gates(node(endpoint=object(), endpoint_status=status, master="b"))
    gates.mastership = mastership()
    for kind in ("pool", "engine"):
        told = gates.why_not(unit(kind), {})
        assert told == (None if free else "waits for the MetaService of b")
    gates.mastership = mastership(client_gate=lambda: "waits for a master to be led to")
    assert bool(gates.why_not(unit("pool"), {})) is True


class StubChecks:
    def __init__(self, answer: str | None) -> None:
        self.answer, self.asked = answer, []  # type: ignore[var-annotated]

    def why_not(self, kind: str) -> str | None:
        self.asked.append(kind)
        return self.answer


def test_doctor_is_asked_last_and_only_for_what_could_start_otherwise() -> None:
    gates = Gates(node())
    checks = StubChecks("doctor ascend.driver: none")
    gates.start_checks = checks  # type: ignore[assignment]
    assert gates.why_not(unit("engine"), {}) == "doctor ascend.driver: none"
    assert gates.why_not(unit("engine", blocked="device 3 is held"), {}) == "device 3 is held"
    assert checks.asked == ["engine"]
