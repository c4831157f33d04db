"""Reserve, release, crashes, operators and other programs in any order: what must hold after each step."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtierd.host.hugepage_files import PoolCounts
from kvtierd.host.hugepages import Hugepages
from kvtierd.host.ledger import Entry, Ledger
from kvtierd.plan.model import HugepagePlan

from .fake_kernel import MIB2, FakeKernel


class Crash(BaseException):
    """The power of kill -9: nothing of the process runs after it."""


class Mortal:
    """Counts down the operations that leave the process; then everything fails until the next life."""

    def __init__(self) -> None:
        self.left: int | None = None

    def step(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise Crash
            self.left -= 1


class MortalKernel(FakeKernel):
    """In memory: files would make thousands of steps slow."""

    mortal = Mortal()

    def publish(self) -> None:
        pass

    def read(self, page_size_bytes: int, node: int | None) -> PoolCounts:
        key = (page_size_bytes, 0)
        total = self.total[key]
        return PoolCounts(total=total, free=total - self.used[key], surplus=self.surplus[key])

    def write(self, page_size_bytes: int, node: int | None, pages: int) -> None:
        self.mortal.step()
        self.writes.append((str(node), str(pages)))
        self._set_everywhere(page_size_bytes, pages)

    def make_room(self, timeout_seconds: float) -> str:
        return ""

    def available_bytes(self) -> int | None:
        return 1 << 50


class MortalLedger(Ledger):
    def __init__(self, path: Path, boot_id: str, mortal: Mortal) -> None:
        super().__init__(path, boot_id)
        self.mortal = mortal

    def _store(self, entries: dict[tuple[int, int | None], Entry]) -> None:
        self.mortal.step()
        with mock.patch("os.fsync"):  # no power is cut here
            super()._store(entries)


class HugepagesMachine(RuleBasedStateMachine):
    @initialize(admin=st.integers(0, 60), used=st.integers(0, 60), capacity=st.integers(60, 400))
    def start(self, admin: int, used: int, capacity: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvtierd-test-"))
        self.kernel = MortalKernel(self.directory / "root", capacity=capacity)
        self.kernel.mortal = self.mortal = Mortal()
        self.kernel.admin_sets(admin)
        self.admin = admin  # what the count would be without kvtierd
        self.others = 0
        self.ours = 0
        self.plan = 0
        self.crashed = False
        self.others_take(used)

    def teardown(self) -> None:
        shutil.rmtree(getattr(self, "directory", "/nonexistent"), ignore_errors=True)

    def hugepages(self) -> Hugepages:
        ledger = MortalLedger(self.directory / "hugepages.json", self.kernel.boot_id, self.mortal)
        return Hugepages(self.kernel, ledger, clock=lambda: 0.0, sleep=lambda _: None)

    def total(self) -> int:
        return self.kernel.read(MIB2, None).total

    def others_take(self, pages: int) -> None:
        room = self.kernel.read(MIB2, None).free
        self.others += min(pages, room)
        self.kernel.use(min(pages, room))

    @rule(pages=st.integers(1, 60))
    def other_program_starts(self, pages: int) -> None:
        self.others_take(pages)

    @rule(share=st.floats(0, 1))
    def other_program_ends(self, share: float) -> None:
        gone = round(self.others * share)
        self.others -= gone
        self.kernel.use(-gone)

    @rule(share=st.floats(0, 1))
    def our_units_start(self, share: float) -> None:
        pages = min(round(max(0, self.plan - self.ours) * share), self.kernel.read(MIB2, None).free)
        self.ours += pages
        self.kernel.use(pages)

    @rule()
    def our_units_end(self) -> None:
        self.kernel.use(-self.ours)
        self.ours = 0

    # Between a crash and the next run nobody can tell an operator's change from the kernel's partial grant.
    @precondition(lambda self: not self.crashed)
    @rule(pages=st.integers(1, 200))
    def operator_adds(self, pages: int) -> None:
        before = self.total()
        self.kernel.admin_sets(before + pages)
        self.admin += self.total() - before

    @rule(pages=st.integers(0, 250))
    def reserve(self, pages: int) -> None:
        before = self.total()
        report = self.hugepages().reserve(HugepagePlan(pages=pages), own_use_pages={None: self.ours})
        self.plan = pages
        self.crashed = False
        counts = self.kernel.read(MIB2, None)
        if report.complete:
            assert counts.free >= pages - self.ours, "complete, but our units would not fit"
        else:
            assert self.total() == max(before, self.kernel.capacity), "short, though the kernel had more"
        assert self.total() <= max(self.admin, self.others + max(pages, self.ours), before)
        writes = len(self.kernel.writes)
        again = self.hugepages().reserve(HugepagePlan(pages=pages), own_use_pages={None: self.ours})
        unknown = self.hugepages().reserve(HugepagePlan(pages=pages))
        if report.complete:
            assert again.complete
            assert unknown.complete
            assert len(self.kernel.writes) == writes, "the second time changed something"

    @rule(pages=st.integers(1, 250), steps=st.integers(0, 6))
    def reserve_and_crash(self, pages: int, steps: int) -> None:
        self.mortal.left = steps
        try:
            self.hugepages().reserve(HugepagePlan(pages=pages), own_use_pages={None: self.ours})
        except Crash:
            self.crashed = True
        finally:
            self.mortal.left = None
        self.plan = pages

    @rule(steps=st.integers(0, 4))
    def release_and_crash(self, steps: int) -> None:
        self.mortal.left = steps
        try:
            self.hugepages().release()
        except Crash:
            self.crashed = True
        finally:
            self.mortal.left = None

    @rule()
    def release(self) -> None:
        self.hugepages().release()
        self.crashed = False
        assert self.total() == max(self.admin, self.others + self.ours)

    @precondition(lambda self: self.others == 0 and self.ours == 0)
    @rule()
    def release_when_idle_restores_exactly(self) -> None:
        self.hugepages().release()
        self.crashed = False
        assert self.total() == self.admin
        assert self.hugepages().raised() == ()

    @invariant()
    def nothing_of_others_is_lost(self) -> None:
        if hasattr(self, "kernel"):
            counts = self.kernel.read(MIB2, None)
            assert counts.total >= self.admin, "lowered below what others set"
            assert counts.surplus == 0, "pages in use were taken away"


HugepagesMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHugepagesMachine = HugepagesMachine.TestCase
