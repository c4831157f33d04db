"""From settings to a coordinator, for mode etcd: what a node remembers goes into it."""

from pathlib import Path

import pytest

from kvtierd.cluster.epoch_store import SeenEpochStore
from kvtierd.cluster.etcd import EtcdCoordinator
from kvtierd.cluster.hello import NodeFacts
from kvtierd.cluster.master_store import MasterRecord, MasterStore
from kvtierd.cluster.standing import ClusterView, Standing
from kvtierd.errors import ClusterError
from kvtierd.node.coordination import make_coordination
from kvtierd.settings import Settings

PEERS = [{"name": n, "address": f"127.0.0.{i}"} for i, n in enumerate(("a", "b", "c"), start=2)]


def settings(tmp_path: Path) -> Settings:
    return Settings(
        pool={"dram": 1 << 30},  # type: ignore[arg-type]
        paths={"state": str(tmp_path / "state"), "runtime": str(tmp_path / "run")},  # type: ignore[arg-type]
        cluster={  # type: ignore[arg-type]
            "mode": "etcd", "name": "prod", "peers": PEERS, "insecure": True, "etcd": {"endpoints": ["127.0.0.1:1"]},
        },
    )  # fmt: skip


def seen(tmp_path: Path) -> SeenEpochStore:
    return SeenEpochStore(tmp_path / "state/cluster/seen-epoch.json", "prod")


async def test_a_node_begins_with_the_highest_epoch_that_it_followed_in_any_mode(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    assert make_coordination(chosen, "a", lambda: NodeFacts("a")).coordinator.standing.epoch == 0
    MasterStore(tmp_path / "state/cluster/master.json", "prod").save(MasterRecord(40, "b", "a"))
    assert make_coordination(chosen, "a", lambda: NodeFacts("a")).coordinator.standing.epoch == 40
    assert seen(tmp_path).admit(50, "c")
    made = make_coordination(chosen, "a", lambda: NodeFacts("a"))
    assert isinstance(made.coordinator, EtcdCoordinator)
    assert made.coordinator.standing.epoch == 50
    assert made.fence is not None


async def test_what_the_others_say_later_is_minded_too_and_its_own_word_reaches_them(tmp_path: Path) -> None:
    made = make_coordination(settings(tmp_path), "a", lambda: NodeFacts("a"))
    coordinator, board = made.coordinator, made.network.board
    assert isinstance(coordinator, EtcdCoordinator)
    assert made.fence is not None
    board.offer(ClusterView(70, "b"), 1, 0.0, "b")
    await made.fence._admit()
    assert coordinator._fence() == (70, "b")
    coordinator._heard(Standing("follower", 71, "c"))
    assert made.network.hint == "c"
    assert made.network.standing.epoch == 71


async def test_a_memory_that_is_damaged_is_refused_and_not_read_as_none(tmp_path: Path) -> None:
    store = seen(tmp_path)
    store.admit(5, "b")
    store.path.write_bytes(store.path.read_bytes().replace(b"5", b"4", 1))
    with pytest.raises(ClusterError) as refused:
        make_coordination(settings(tmp_path), "a", lambda: NodeFacts("a"))
    assert refused.value.stable_code == "cluster.epoch-damaged"
