"""What every way of naming a master must do, whatever it rests on. One suite; each way plugs itself in.

A test module makes a subclass of ``CoordinatorSuite`` whose name begins with ``Test``, with a fixture ``driver`` that
yields a ``Driver``. Times are real: a driver chooses a short lease.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from typing import Protocol

import pytest

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.standing import Coordinator, Standing
from kvtierd.errors import ClusterError

NODES = ["node-a", "node-b", "node-c"]
PATIENCE_SECONDS = 60.0  # for what will come; machines that run tests are busy


class Driver(Protocol):
    """One way, with whatever it needs to run.

    ``elects``: a lost master is replaced without an operator. ``takeover_seconds``: by then somebody would be the master if
    anybody could be.
    """

    elects: bool
    takeover_seconds: float

    async def make(self, nodes: list[str]) -> list[Coordinator]:
        """One coordinator for each node, in order; not yet running."""
        ...

    async def lose(self, node: str) -> None:
        """Cuts the node off from everything that its coordinator depends on."""
        ...

    async def restore(self, node: str) -> None:
        """Connects it again."""
        ...


@dataclasses.dataclass(frozen=True)
class Said:
    at_seconds: float
    standing: Standing


class Cluster:
    """The coordinators at work, and all that they said."""

    def __init__(self, driver, nodes, coordinators):
        self.driver = driver
        self.nodes = dict(zip(nodes, coordinators, strict=True))
        self.said = {name: [] for name in nodes}
        self.stopped = {name: [] for name in nodes}
        self.tasks = {}

    def begin(self, *names):
        for name in names or self.nodes:
            self.tasks[name] = asyncio.create_task(self.nodes[name].run(self._hear(name)))

    def _hear(self, name):
        return lambda standing: self.said[name].append(Said(boottime_seconds(), standing))

    def standing(self, name):
        return self.nodes[name].standing

    def masters(self):
        return [name for name in self.nodes if self.standing(name).role == "master"]

    def agreed(self, *names):
        """The master that all of these nodes agree on; ``None`` while they do not."""
        names = names or tuple(self.nodes)
        seen = {(self.standing(name).master, self.standing(name).epoch) for name in names}
        masters = [name for name in names if self.standing(name).role == "master"]
        if len(seen) != 1 or len(masters) != 1 or next(iter(seen))[0] != masters[0]:
            return None
        return (
            masters[0] if all(self.standing(n).role == "follower" for n in names if n != masters[0]) else None
        )

    async def until(self, holds, seconds=PATIENCE_SECONDS):
        end = boottime_seconds() + seconds
        while not (value := holds()):
            assert boottime_seconds() < end, {n: self.standing(n) for n in self.nodes}
            for task in self.tasks.values():
                assert not task.done(), task.exception()
            await asyncio.sleep(0.02)
        return value

    async def hand_over(self, name, to):
        """As the daemon does it: the MetaService is stopped first."""
        self.stopped[name].append(boottime_seconds())
        await self.nodes[name].hand_over(to)

    async def may_serve(self, name):
        """When the master's time to serve has come."""
        await self.until(lambda: self.standing(name).serve_after_seconds <= boottime_seconds())

    def services(self):
        """(begins, ends, node, epoch) of every MetaService that the standings allowed, as long as they allowed it."""
        found = []
        for name, said in self.said.items():
            current, begins = None, 0.0
            for entry in [*said, None]:
                standing = entry.standing if entry else None
                if current and (
                    standing is None or (standing.role, standing.epoch) != ("master", current.epoch)
                ):
                    ends = min(
                        current.until_seconds,
                        entry.at_seconds if entry else boottime_seconds(),
                        *(at for at in self.stopped[name] if at >= begins),
                    )
                    found.append((begins, ends, name, current.epoch))
                    current = None
                if standing and standing.role == "master":
                    if current is None:
                        begins = max(entry.at_seconds, standing.serve_after_seconds)
                    current = standing
        return sorted(s for s in found if s[0] < s[1])

    def check(self):
        """Never two at once; epochs rise; one epoch, one node; no standing that contradicts itself."""
        services = self.services()
        for former, latter in itertools.pairwise(services):
            assert former[2] == latter[2] or former[1] <= latter[0], (former, latter)
        assert [s[3] for s in services] == sorted(s[3] for s in services), services
        holders = {}
        for name, said in self.said.items():
            for standing in (entry.standing for entry in said):
                if standing.role == "master":
                    assert standing.master == name
                    assert standing.epoch > 0
                if standing.master:
                    assert holders.setdefault(standing.epoch, standing.master) == standing.master

    async def close(self):
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for coordinator in self.nodes.values():
            await coordinator.close()


class CoordinatorSuite:
    """The tests. Every one ends with ``Cluster.check``."""

    @pytest.fixture
    def driver(self):
        raise NotImplementedError

    @pytest.fixture
    async def cluster(self, driver):
        made = Cluster(driver, NODES, await driver.make(NODES))
        yield made
        await made.close()
        made.check()

    async def test_one_master_and_everybody_knows_it(self, cluster):
        assert all(cluster.standing(name).role != "master" for name in NODES)  # nothing was asked yet
        cluster.begin()
        master = await cluster.until(cluster.agreed)
        assert cluster.standing(master).epoch > 0
        assert cluster.standing(master).until_seconds > boottime_seconds()
        assert all(cluster.nodes[name].mode == cluster.nodes[master].mode for name in NODES)

    async def test_its_lease_is_renewed_and_said_so(self, cluster):
        cluster.begin()
        master = await cluster.until(cluster.agreed)
        first = cluster.standing(master).until_seconds
        if first == float("inf"):
            pytest.skip("without a lease")
        epoch = cluster.standing(master).epoch
        await cluster.until(lambda: cluster.standing(master).until_seconds > first)
        assert cluster.standing(master).epoch == epoch
        assert len({e.standing.until_seconds for e in cluster.said[master] if e.standing.epoch == epoch}) > 1

    async def test_a_node_that_is_not_fit_never_becomes_the_master(self, driver, cluster):
        if not driver.elects:
            pytest.skip("names its master itself")
        for name in NODES[:2]:
            cluster.nodes[name].set_fit(False, "paused")
        cluster.begin()
        assert await cluster.until(cluster.agreed) == NODES[2]
        await cluster.may_serve(NODES[2])
        await driver.lose(NODES[2])
        await cluster.until(lambda: not cluster.masters())
        await asyncio.sleep(driver.takeover_seconds)
        assert not cluster.masters()
        cluster.nodes[NODES[0]].set_fit(True)
        await cluster.until(lambda: cluster.agreed(*NODES[:2]) == NODES[0])

    async def test_a_lost_master_s_standing_ends_before_anybody_else_serves(self, driver, cluster):
        cluster.begin()
        former = await cluster.until(cluster.agreed)
        await cluster.may_serve(former)
        epoch = cluster.standing(former).epoch
        others = [name for name in NODES if name != former]
        await driver.lose(former)
        if not driver.elects:
            await asyncio.sleep(driver.takeover_seconds)
            assert not [name for name in others if cluster.standing(name).role == "master"]
            return
        successor = await cluster.until(lambda: cluster.agreed(*others))
        assert cluster.standing(successor).epoch > epoch
        last = [e.standing for e in cluster.said[former] if e.standing.role == "master"][-1]
        begins = max(boottime_seconds(), cluster.standing(successor).serve_after_seconds)
        assert last.until_seconds < begins
        assert cluster.standing(former).role != "master"
        await cluster.may_serve(successor)
        await driver.restore(former)
        await cluster.until(lambda: cluster.agreed() == successor)  # it comes back as a follower

    async def test_a_follower_that_is_lost_keeps_what_it_knew(self, driver, cluster):
        cluster.begin()
        master = await cluster.until(cluster.agreed)
        epoch = cluster.standing(master).epoch
        lost = next(name for name in NODES if name != master)
        await driver.lose(lost)
        await asyncio.sleep(driver.takeover_seconds)
        seen = cluster.standing(lost)
        assert seen.role in {"unknown", "follower"}
        assert (seen.master, seen.epoch) == (master, epoch)
        assert cluster.masters() == [master]
        await driver.restore(lost)
        await cluster.until(lambda: cluster.agreed() == master)

    async def test_hand_over_goes_to_the_named_node(self, cluster):
        cluster.begin()
        former = await cluster.until(cluster.agreed)
        await cluster.may_serve(former)
        for to in [n for n in NODES if n != former] + [former]:
            master = await cluster.until(cluster.agreed)
            epoch = cluster.standing(master).epoch
            await cluster.hand_over(master, to)
            assert cluster.standing(master).role != "master"
            assert await cluster.until(cluster.agreed) == to
            assert cluster.standing(to).epoch > epoch
            await cluster.may_serve(to)

    async def test_hand_over_that_is_refused_changes_nothing(self, cluster):
        cluster.begin()
        master = await cluster.until(cluster.agreed)
        follower = next(name for name in NODES if name != master)
        before = cluster.standing(master).epoch
        for node, to, code in (
            (follower, master, "cluster.not-master"),
            (master, "nobody", "cluster.no-such-node"),
        ):
            with pytest.raises(ClusterError) as refused:
                await cluster.nodes[node].hand_over(to)
            assert refused.value.stable_code == code
        assert (await cluster.until(cluster.agreed), cluster.standing(master).epoch) == (master, before)

    async def test_promote(self, driver, cluster):
        cluster.begin()
        master = await cluster.until(cluster.agreed)
        if not driver.elects:
            pytest.skip("for tests of its own")
        for name in NODES:
            with pytest.raises(ClusterError) as refused:
                await cluster.nodes[name].promote()
            assert refused.value.stable_code == "cluster.elects"
        assert cluster.masters() == [master]

    async def test_everything_lost_and_back(self, driver, cluster):
        """With nothing in reach there is no master in the end, and later there is one again, in a later or the same term."""
        if not driver.elects:
            pytest.skip("its master stays")
        cluster.begin()
        master = await cluster.until(cluster.agreed)
        epoch = cluster.standing(master).epoch
        for name in NODES:
            await driver.lose(name)
        await cluster.until(lambda: not cluster.masters())
        with contextlib.suppress(StopIteration):
            assert next(
                e for e in cluster.said[master] if e.standing.role != "master" and e.standing.epoch >= epoch
            )
        for name in NODES:
            await driver.restore(name)
        again = await cluster.until(cluster.agreed)
        assert cluster.standing(again).epoch >= epoch
