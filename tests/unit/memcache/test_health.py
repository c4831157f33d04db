from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.memcache.answers import (
    PROVIDER,
    PROXY,
    MetaHealth,
    parse_capacity,
    parse_cluster_status,
    parse_segments,
)
from kvtierd.memcache.health import (
    ExpectedPool,
    MetaObservation,
    PoolState,
    Verdict,
    joinable,
    meta_conditions,
    pool_ready,
    unknown_roles,
)

FIXTURES = Path(__file__).parents[2] / "fixtures" / "memcache"
MIB = 1024**2
PORTS = (("127.0.0.1", 5000), ("127.0.0.1", 6000), ("127.0.0.1", 8000))
WELL = MetaHealth(status="ok", service_ready=True)
YES = Verdict(True, ())


def recorded(name: str) -> PoolState:
    return PoolState(
        capacity=parse_capacity((FIXTURES / f"capacity-{name}.json").read_bytes()),
        segments=parse_segments((FIXTURES / f"segments-{name}.json").read_bytes()),
        cluster=parse_cluster_status((FIXTURES / f"cluster-status-{name}.json").read_bytes()),
    )


def look(
    *,
    instance: str | None = "one",
    health: MetaHealth | None = WELL,
    listening: tuple[tuple[str, int], ...] = PORTS,
) -> MetaObservation:
    return MetaObservation(instance=instance, health=health, listening=listening)


class TestMetaUp:
    def test_all_conditions_hold(self) -> None:
        assert meta_conditions(look(), PORTS) == YES

    @pytest.mark.parametrize(
        ("observation", "reason"),
        [
            (look(instance=None), "the process is not alive"),
            (look(health=None), "/health does not answer"),
            (
                look(health=MetaHealth(status="ok", service_ready=False)),
                "/health says status 'ok', service_ready false",
            ),
            (look(listening=PORTS[:2]), "it does not listen on 127.0.0.1:8000"),
            (
                look(listening=(*PORTS[1:], ("0.0.0.0", 5000))),
                "it does not listen on 127.0.0.1:5000 but on 0.0.0.0:5000",
            ),
        ],
    )
    def test_each_condition_alone_is_named(self, observation: MetaObservation, reason: str) -> None:
        assert meta_conditions(observation, PORTS) == Verdict(False, (reason,))

    def test_all_reasons_are_given_at_once(self) -> None:
        assert len(meta_conditions(look(instance=None, health=None, listening=()), PORTS).reasons) == 3


class TestPoolReady:
    EXPECTED = ExpectedPool(capacity_bytes=64 * MIB, providers=1, alignment_bytes=2 * MIB)

    def test_the_promised_memory_is_there(self) -> None:
        assert pool_ready(recorded("pfs"), self.EXPECTED) == YES

    def test_a_healthy_service_without_memory_is_no_pool(self) -> None:
        verdict = pool_ready(recorded("empty"), self.EXPECTED)
        assert verdict == Verdict(False, ("the pool has no DRAM; 64 MiB are planned",))

    @pytest.mark.parametrize(
        ("capacity_bytes", "providers", "ok"),
        [(66 * MIB, 1, True), (66 * MIB + 1, 1, False), (68 * MIB, 2, True), (68 * MIB + 1, 2, False)],
    )
    def test_one_alignment_unit_a_provider_may_be_missing(
        self, capacity_bytes: int, providers: int, ok: bool
    ) -> None:
        expected = ExpectedPool(capacity_bytes=capacity_bytes, providers=providers, alignment_bytes=2 * MIB)
        assert pool_ready(recorded("p"), expected).ok is ok

    def test_a_due_purge_comes_first(self) -> None:
        verdict = pool_ready(recorded("p"), self.EXPECTED, purge_due=True)
        assert not verdict.ok
        assert "purged" in verdict.reasons[0]

    def test_a_pool_that_plans_nothing_is_ready(self) -> None:
        assert pool_ready(recorded("empty"), ExpectedPool(0, 0, 2 * MIB)) == YES


class TestJoinable:
    def test_everyone_is_back(self) -> None:
        assert joinable(recorded("pfs"), {0: PROVIDER, 1: PROXY}) == YES

    def test_a_pool_that_starts_from_nothing(self) -> None:
        assert joinable(recorded("empty"), {}) == YES

    def test_missing_ranks_are_named(self) -> None:
        verdict = joinable(recorded("p"), {0: PROVIDER, 1: PROXY, 4: PROXY})
        assert verdict == Verdict(False, ("rank 1 (proxy) is missing", "rank 4 (proxy) is missing"))

    def test_a_lost_role_is_named(self) -> None:
        state = recorded("lost-role")
        assert joinable(state, {0: PROVIDER, 1: PROXY}) == Verdict(
            False, ("the role of rank 0 is unknown; it is a provider",)
        )
        assert unknown_roles(state.cluster) == (0,)

    def test_a_strangers_lost_role_blocks_too(self) -> None:
        assert joinable(recorded("lost-role"), {1: PROXY}) == Verdict(
            False, ("the role of rank 0 is unknown",)
        )

    def test_a_rank_in_another_role(self) -> None:
        verdict = joinable(recorded("pfs"), {0: PROVIDER, 1: PROVIDER})
        assert verdict.reasons == (
            "rank 1 is a proxy; it should be a provider",
            "the segment of rank 1 is missing",
        )

    def test_a_provider_without_its_segment(self) -> None:
        state = recorded("pfs")
        verdict = joinable(PoolState(state.capacity, (), state.cluster), {0: PROVIDER})
        assert verdict == Verdict(False, ("the segment of rank 0 is missing",))

    def test_a_rank_without_connection_or_not_active(self) -> None:
        state = recorded("p")
        (rank,) = state.cluster.ranks
        cluster = state.cluster.model_copy(
            update={"alive": frozenset(), "ranks": (rank.model_copy(update={"state": "RANK_LOST"}),)}
        )
        verdict = joinable(PoolState(state.capacity, state.segments, cluster), {0: PROVIDER})
        assert verdict == Verdict(False, ("rank 0 is in state RANK_LOST", "rank 0 has no connection"))
