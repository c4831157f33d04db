from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.errors import HugepageError, StateError
from kvtierd.host.hugepages import Hugepages, default_deadline_seconds
from kvtierd.host.ledger import Ledger
from kvtierd.plan.model import HugepagePlan

from .fake_kernel import GIB1, MIB2, FakeKernel


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


Make = Callable[..., Hugepages]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    directory.mkdir()
    return directory / "hugepages.json"


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return FakeKernel(tmp_path / "root")


def manager(kernel: FakeKernel, state: Path, **options: object) -> Hugepages:
    clock = Clock()
    return Hugepages(kernel, Ledger(state, kernel.boot_id), clock=clock, sleep=clock.sleep, **options)  # type: ignore[arg-type]


def test_reserves_what_the_plan_wants_and_reports_it(kernel: FakeKernel, state: Path) -> None:
    report = manager(kernel, state).reserve(HugepagePlan(pages=512))
    assert (report.asked_pages, report.got_pages, report.short_pages) == (512, 512, 0)
    assert report.complete
    assert report.got_bytes == 1024**3
    assert kernel.read(MIB2, None).total == 512
    assert report.text() == "hugepages of 2 MiB: asked 512, got 512 (1 GiB)"


def test_twice_changes_nothing(kernel: FakeKernel, state: Path) -> None:
    plan = HugepagePlan(pages=100)
    manager(kernel, state).reserve(plan)
    kernel.writes.clear()
    before = state.stat().st_mtime_ns
    assert manager(kernel, state).reserve(plan).complete
    assert kernel.writes == []
    assert state.stat().st_mtime_ns == before


def test_twice_changes_nothing_while_our_units_use_the_pages(kernel: FakeKernel, state: Path) -> None:
    kernel.admin_sets(30)
    kernel.use(30)
    plan = HugepagePlan(pages=100)
    manager(kernel, state).reserve(plan)
    assert kernel.read(MIB2, None).total == 130
    for _ in range(4):
        kernel.use(25)
        report = manager(kernel, state).reserve(plan)
        assert report.complete
        assert report.pools[0].others_pages == 30
    assert kernel.read(MIB2, None).total == 130


def test_pages_in_use_by_others_come_on_top(kernel: FakeKernel, state: Path) -> None:
    kernel.admin_sets(80)
    kernel.use(50)
    report = manager(kernel, state).reserve(HugepagePlan(pages=100))
    assert kernel.read(MIB2, None).total == 150  # 30 of the present 80 were free
    assert report.pools[0].raised_pages == 70


def test_promised_pages_of_others_count_although_they_are_free(kernel: FakeKernel, state: Path) -> None:
    kernel.admin_sets(20480)
    kernel.capacity = 50_000
    kernel.admin_sets(20480)
    kernel.reserved[MIB2] = 20000
    kernel.publish()
    manager(kernel, state).reserve(HugepagePlan(pages=1000))
    assert kernel.read(MIB2, None).total == 21000


def test_enough_free_pages_means_no_write_and_nothing_to_give_back(kernel: FakeKernel, state: Path) -> None:
    kernel.admin_sets(500)
    assert manager(kernel, state).reserve(HugepagePlan(pages=100)).complete
    assert kernel.writes == []
    manager(kernel, state).release()
    assert kernel.read(MIB2, None).total == 500


def test_others_that_grow_into_our_pages_are_made_up_for(kernel: FakeKernel, state: Path) -> None:
    plan = HugepagePlan(pages=100)
    manager(kernel, state).reserve(plan)
    kernel.use(40)  # not ours: our units use nothing
    report = manager(kernel, state).reserve(plan, own_use_pages={None: 0})
    assert report.complete
    assert kernel.read(MIB2, None).total == 140


def test_release_restores_the_count_of_before(kernel: FakeKernel, state: Path) -> None:
    kernel.admin_sets(64)
    hugepages = manager(kernel, state)
    hugepages.reserve(HugepagePlan(pages=200))
    released = hugepages.release()
    assert kernel.read(MIB2, None).total == 64
    assert released.given_back_bytes == 136 * MIB2
    assert hugepages.raised() == ()
    assert "gave back 272 MiB" in released.text()


def test_release_never_takes_pages_in_use_and_finishes_later(kernel: FakeKernel, state: Path) -> None:
    hugepages = manager(kernel, state)
    hugepages.reserve(HugepagePlan(pages=100))
    kernel.use(70)
    released = hugepages.release()
    assert released.still_in_use_bytes == 70 * MIB2
    assert "still in use" in released.text()
    counts = kernel.read(MIB2, None)
    assert (counts.total, counts.surplus) == (70, 0)
    kernel.use(-70)
    assert hugepages.release().still_in_use_bytes == 0
    assert kernel.read(MIB2, None).total == 0


def test_release_leaves_what_an_operator_added_later(kernel: FakeKernel, state: Path) -> None:
    hugepages = manager(kernel, state)
    hugepages.reserve(HugepagePlan(pages=100))
    kernel.admin_sets(300)
    hugepages.release()
    assert kernel.read(MIB2, None).total == 200


def test_release_after_an_operator_lowered_the_count_goes_no_lower_than_before(
    kernel: FakeKernel, state: Path
) -> None:
    kernel.admin_sets(30)
    hugepages = manager(kernel, state)
    hugepages.reserve(HugepagePlan(pages=100))
    kernel.admin_sets(60)
    hugepages.release()
    assert kernel.read(MIB2, None).total == 30


def test_a_crash_while_giving_back_does_not_give_back_twice(
    kernel: FakeKernel, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager(kernel, state).reserve(HugepagePlan(pages=100))
    kernel.admin_sets(300)

    class Crash(BaseException):
        pass

    dying = manager(kernel, state)
    write = kernel.write

    def write_and_die(size: int, node: int | None, pages: int) -> None:
        write(size, node, pages)
        monkeypatch.setattr(Ledger, "put", die)

    def die(*_: object) -> None:
        raise Crash

    monkeypatch.setattr(kernel, "write", write_and_die)
    with pytest.raises(Crash):
        dying.release()
    monkeypatch.undo()
    assert kernel.read(MIB2, None).total == 200
    manager(kernel, state).release()
    assert kernel.read(MIB2, None).total == 200


def test_surplus_pages_of_others_are_not_taken_for_lasting_ones(kernel: FakeKernel, state: Path) -> None:
    kernel.admin_sets(50)
    kernel.use(50)
    kernel.admin_sets(10)  # 40 pages in use are surplus now
    manager(kernel, state).reserve(HugepagePlan(pages=20))
    assert kernel.read(MIB2, None).total == 70
    kernel.use(-50)
    manager(kernel, state).release()
    assert kernel.read(MIB2, None).total == 10


def test_promised_pages_count_on_a_node_too(tmp_path: Path, state: Path) -> None:
    kernel = FakeKernel(tmp_path / "root", nodes=2)
    for node in (0, 1):
        kernel.admin_sets(50, node=node)
    kernel.reserved[MIB2] = 61
    kernel.publish()
    manager(kernel, state).reserve(HugepagePlan(pages=60, per_numa_node={0: 30, 1: 30}))
    assert [kernel.read(MIB2, node).total for node in (0, 1)] == [61, 60]


def test_a_smaller_plan_gives_the_difference_back(kernel: FakeKernel, state: Path) -> None:
    hugepages = manager(kernel, state)
    hugepages.reserve(HugepagePlan(pages=100))
    hugepages.reserve(HugepagePlan(pages=40))
    assert kernel.read(MIB2, None).total == 40


def test_a_smaller_plan_waits_for_units_that_still_use_the_pages(kernel: FakeKernel, state: Path) -> None:
    hugepages = manager(kernel, state)
    hugepages.reserve(HugepagePlan(pages=100))
    kernel.use(100)
    assert hugepages.reserve(HugepagePlan(pages=40)).complete
    counts = kernel.read(MIB2, None)
    assert (counts.total, counts.surplus) == (100, 0)
    kernel.use(-100)
    hugepages.reserve(HugepagePlan(pages=40))
    assert kernel.read(MIB2, None).total == 40


def test_no_pages_in_the_plan_gives_all_back(kernel: FakeKernel, state: Path) -> None:
    hugepages = manager(kernel, state)
    hugepages.reserve(HugepagePlan(pages=100))
    report = hugepages.reserve(HugepagePlan(pages=0))
    assert report.complete
    assert kernel.read(MIB2, None).total == 0


def test_a_short_grant_is_reported_with_reason_and_ranks(tmp_path: Path, state: Path) -> None:
    kernel = FakeKernel(tmp_path / "root", capacity=3738)
    report = manager(kernel, state).reserve(HugepagePlan(pages=4096), deadline_seconds=20)
    assert (report.got_pages, report.short_pages, report.complete) == (3738, 358, False)
    assert report.short_bytes == 358 * MIB2
    assert report.ranks_that_fit(2 * 1024**3) == 3
    text = report.text(2 * 1024**3)
    assert "asked 4096, got 3738 (7.30 GiB), short 358 (716 MiB)" in text
    assert "no more free memory in one piece" in text
    assert "ranks of 2 GiB that fit: 3" in text
    assert kernel.compactions > 0
    manager(kernel, state).release()
    assert kernel.read(MIB2, None).total == 0


def test_compaction_helps(tmp_path: Path, state: Path) -> None:
    kernel = FakeKernel(tmp_path / "root", capacity=1000, fragmented=600)
    assert manager(kernel, state).reserve(HugepagePlan(pages=900), deadline_seconds=20).complete
    assert kernel.compactions >= 2


def test_the_deadline_ends_the_search(tmp_path: Path, state: Path) -> None:
    kernel = FakeKernel(tmp_path / "root", capacity=100)
    clock = Clock()
    hugepages = Hugepages(kernel, Ledger(state, kernel.boot_id), clock=clock, sleep=clock.sleep)
    report = hugepages.reserve(HugepagePlan(pages=200), deadline_seconds=0.1)
    assert clock.now <= 0.2
    assert report.pools[0].reason.startswith("time was up")


def test_big_reservations_grow_in_steps(tmp_path: Path, state: Path) -> None:
    kernel = FakeKernel(tmp_path / "root", capacity=200_000)
    assert manager(kernel, state).reserve(HugepagePlan(pages=133_120)).complete
    values = [int(value) for _, value in kernel.writes]
    assert len(values) > 10
    assert max(b - a for a, b in zip([0, *values], values, strict=False)) <= 4096
    assert default_deadline_seconds(HugepagePlan(pages=133_120)) == 160


def test_the_last_memory_of_the_host_is_not_taken(tmp_path: Path, state: Path) -> None:
    kernel = FakeKernel(tmp_path / "root", available_bytes=2 * 1024**3 + 30 * MIB2)
    report = manager(kernel, state).reserve(HugepagePlan(pages=100))
    assert report.got_pages == 30
    assert "less than 2048 MiB" in report.text()


def test_per_node_with_one_node_short(tmp_path: Path, state: Path) -> None:
    kernel = FakeKernel(tmp_path / "root", nodes=2, capacity=100)
    kernel.admin_sets(60, node=1)
    kernel.use(60, node=1)
    report = manager(kernel, state).reserve(
        HugepagePlan(pages=160, per_numa_node={0: 80, 1: 80}), deadline_seconds=5
    )
    assert [(pool.node, pool.got_pages) for pool in report.pools] == [(0, 80), (1, 40)]
    assert report.ranks_that_fit(80 * MIB2) == 1  # a rank does not span nodes
    assert "NUMA node 1: asked 80, got 40; others hold 60 of its 100" in report.text()
    manager(kernel, state).release()
    assert kernel.read(MIB2, 0).total == 0
    assert kernel.read(MIB2, 1).total == 60


def test_moving_from_the_host_to_nodes_gives_the_old_pages_back(tmp_path: Path, state: Path) -> None:
    kernel = FakeKernel(tmp_path / "root", nodes=2)
    hugepages = manager(kernel, state)
    hugepages.reserve(HugepagePlan(pages=100))
    hugepages.reserve(HugepagePlan(pages=60, per_numa_node={0: 60}))
    assert (kernel.read(MIB2, 0).total, kernel.read(MIB2, 1).total) == (60, 0)


def test_one_gibibyte_pages(tmp_path: Path, state: Path) -> None:
    kernel = FakeKernel(tmp_path / "root", sizes=(MIB2, GIB1), capacity=40)
    report = manager(kernel, state).reserve(HugepagePlan(page_size_bytes=GIB1, pages=16))
    assert report.got_bytes == 16 * GIB1
    assert kernel.read(MIB2, None).total == 0


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.EROFS, "hugepages.read-only", "ProtectKernelTunables=yes"),
        (errno.EACCES, "hugepages.permission", "only root"),
        (errno.EPERM, "hugepages.permission", "only root"),
        (errno.EINVAL, "hugepages.not-at-runtime", "while it runs"),
    ],
)
def test_clear_reasons(kernel: FakeKernel, state: Path, number: int, code: str, words: str) -> None:
    kernel.refuse["nr_hugepages"] = number
    with pytest.raises(HugepageError) as caught:
        manager(kernel, state).reserve(HugepagePlan(pages=10))
    assert caught.value.stable_code == code
    assert words in str(caught.value)
    assert caught.value.hint
    assert manager(kernel, state).raised()[0].raised_pages == 0


def test_compaction_that_is_refused_is_said_and_not_fatal(tmp_path: Path, state: Path) -> None:
    kernel = FakeKernel(tmp_path / "root", capacity=5)
    kernel.refuse["/proc/sys/vm"] = errno.EROFS
    report = manager(kernel, state).reserve(HugepagePlan(pages=10), deadline_seconds=5)
    assert report.got_pages == 5
    assert "compact_memory: EROFS" in report.text()


def test_a_size_the_kernel_lacks_names_those_it_has(kernel: FakeKernel, state: Path) -> None:
    with pytest.raises(HugepageError, match="no hugepages of 1 GiB") as caught:
        manager(kernel, state).reserve(HugepagePlan(page_size_bytes=GIB1, pages=1))
    assert caught.value.why == "it has 2 MiB"
    assert not state.exists()


def test_a_kernel_without_hugepages(tmp_path: Path, state: Path) -> None:
    kernel = FakeKernel(tmp_path / "root", sizes=())
    with pytest.raises(HugepageError, match="no hugepages of any size") as caught:
        manager(kernel, state).reserve(HugepagePlan(pages=1))
    assert caught.value.stable_code == "hugepages.no-size"


def test_an_unknown_node_touches_no_other(tmp_path: Path, state: Path) -> None:
    kernel = FakeKernel(tmp_path / "root", nodes=2)
    with pytest.raises(HugepageError, match="NUMA node 7") as caught:
        manager(kernel, state).reserve(HugepagePlan(pages=20, per_numa_node={0: 10, 7: 10}))
    assert "0, 1" in caught.value.why
    assert kernel.writes == []


@pytest.mark.parametrize(
    "plan",
    [
        HugepagePlan(pages=-1),
        HugepagePlan(pages=5, per_numa_node={0: 4}),
        HugepagePlan(per_numa_node={0: -1}),
    ],
)
def test_a_plan_that_makes_no_sense(kernel: FakeKernel, state: Path, plan: HugepagePlan) -> None:
    with pytest.raises(HugepageError) as caught:
        manager(kernel, state).reserve(plan)
    assert caught.value.stable_code == "hugepages.plan"


def test_without_a_ledger_the_kernel_is_not_touched(kernel: FakeKernel, tmp_path: Path) -> None:
    with pytest.raises(StateError):
        manager(kernel, tmp_path / "missing" / "hugepages.json").reserve(HugepagePlan(pages=10))
    assert kernel.writes == []


def test_a_reboot_empties_the_ledger(kernel: FakeKernel, state: Path) -> None:
    manager(kernel, state).reserve(HugepagePlan(pages=100))
    kernel.boot("boot-2")
    kernel.admin_sets(100)  # this time somebody else did
    manager(kernel, state).release()
    assert kernel.read(MIB2, None).total == 100


def test_ranks_need_a_size(kernel: FakeKernel, state: Path) -> None:
    with pytest.raises(ValueError, match="positive"):
        manager(kernel, state).reserve(HugepagePlan(pages=1)).ranks_that_fit(0)


def test_the_ledger_is_readable_json(kernel: FakeKernel, state: Path) -> None:
    kernel.admin_sets(7)
    manager(kernel, state).reserve(HugepagePlan(pages=10))
    stored = json.loads(state.read_text())
    assert stored["boot_id"] == "boot-1"
    assert stored["entries"] == [
        {
            "page_size_bytes": MIB2, "node": None, "before_pages": 7, "asked_pages": 10, "raised_pages": 3,
            "others_pages": 0, "intent": None,
        }
    ]  # fmt: skip
