"""An etcd in memory, with the faults of real ones, for coordinators that run in virtual time.

What it knows of etcd: one history of changes; leases that the leader ends by its own clock some time after they are due,
and prolongs when there is a new leader; requests that are carried out although nobody hears of it, even late; and etcd
issue 15247: a leader that is stuck goes on answering keep-alives, and ends leases of before its time when it is back.
"""

import asyncio
import dataclasses
import random

from kvtierd.cluster.etcd_client import Contact, EtcdError
from kvtierd.cluster.etcd_v3 import rpc_pb2 as pb

ELECTION_SECONDS = 1.0
REVOKE_EVERY_SECONDS = 0.5


@dataclasses.dataclass
class Lease:
    ttl: int
    due: float  # by the leader's clock, here the loop's
    granted_in_term: int
    due_for_stuck: float  # as the old leader thinks


class FakeEtcd:
    """The members together."""

    def __init__(self, rng=None, *, rate=1.0):
        self.rng = rng or random.Random(1)
        self.rate = rate  # of the leader's clock
        self.frozen = False
        self.watchers = []
        self.wipe()

    def wipe(self):
        self.keys, self.leases, self.revision, self.raft_term = {}, {}, 1, 2
        self.life = object()  # what was sent to the etcd before does not arrive at this one
        self.stuck_term = 0  # of a former leader that does not know it yet; 0: there is none
        self.waiting = []  # what came while it was frozen

    # -- as etcd's leader sees it

    def now(self):
        return asyncio.get_running_loop().time() * self.rate

    async def run(self):
        """Ends leases that are due."""
        while True:
            await asyncio.sleep(REVOKE_EVERY_SECONDS)
            if not self.frozen:
                self.end_due_leases()

    def end_due_leases(self):
        for lease_id in [i for i, lease in self.leases.items() if lease.due <= self.now()]:
            self.revoke(lease_id)

    def revoke(self, lease_id):
        if self.leases.pop(lease_id, None) is None:
            return
        gone = [key for key, pair in self.keys.items() if pair.lease == lease_id]
        if gone:
            self.revision += 1
            for key in gone:
                del self.keys[key]
            self.notify()

    def freeze(self):
        self.frozen = True

    def thaw(self):
        self.frozen = False
        self.end_due_leases()
        waiting, self.waiting = self.waiting, []
        for carry_out in waiting:
            carry_out()

    def new_leader(self, *, old_is_stuck):
        """Another leader: all leases get their full time again."""
        if old_is_stuck:
            self.stuck_term = self.raft_term
            for lease in self.leases.values():
                lease.due_for_stuck = lease.due
        self.raft_term += 1
        for lease in self.leases.values():
            lease.due = max(lease.due, self.now() + lease.ttl + ELECTION_SECONDS)

    def old_leader_is_back(self):
        """Its view of the leases is as old as its term; what it ends is ended for all."""
        stuck_term, self.stuck_term = self.stuck_term, 0
        known = [i for i, lease in self.leases.items() if 0 < lease.granted_in_term <= stuck_term]
        for lease_id in known:
            if self.leases[lease_id].due_for_stuck <= self.now():
                self.revoke(lease_id)

    # -- requests

    def header(self):
        return pb.ResponseHeader(revision=self.revision, raft_term=self.raft_term)

    def grant(self, ttl):
        ttl = max(2, ttl)
        lease_id = self.rng.getrandbits(60) + 1
        due = self.now() + ttl
        self.leases[lease_id] = Lease(ttl, due, self.raft_term, due)
        return pb.LeaseGrantResponse(header=self.header(), ID=lease_id, TTL=ttl)

    def keep_alive(self, lease_id):
        lease = self.leases.get(lease_id)
        if lease is None or lease.due <= self.now():
            return pb.LeaseKeepAliveResponse(header=self.header(), ID=lease_id, TTL=0)
        lease.due = self.now() + lease.ttl
        return pb.LeaseKeepAliveResponse(header=self.header(), ID=lease_id, TTL=lease.ttl)

    def stuck_keep_alive(self, lease_id):
        """By the former leader: only it thinks that something was renewed."""
        lease = self.leases.get(lease_id)
        header = pb.ResponseHeader(revision=self.revision, raft_term=self.stuck_term)
        if lease is None or lease.granted_in_term > self.stuck_term:
            return pb.LeaseKeepAliveResponse(header=header, ID=lease_id, TTL=0)
        lease.due_for_stuck = self.now() + lease.ttl
        return pb.LeaseKeepAliveResponse(header=header, ID=lease_id, TTL=lease.ttl)

    def read(self, request):
        kvs = [p for k, p in sorted(self.keys.items()) if request.key <= k < request.range_end]
        return pb.RangeResponse(header=self.header(), kvs=kvs)

    def change(self, request):
        holds = all(self._holds(condition) for condition in request.compare)
        operations = request.success if holds else request.failure
        leases = {op.request_put.lease for op in operations if op.HasField("request_put")} - {0}
        if not leases <= self.leases.keys():
            raise EtcdError("requested lease not found")
        writes = any(not op.HasField("request_range") for op in operations)
        self.revision += writes
        responses = []
        for op in operations:
            if op.HasField("request_range"):
                responses.append(pb.ResponseOp(response_range=self.read(op.request_range)))
            elif op.HasField("request_put"):
                self._put(op.request_put)
            else:
                self.keys.pop(op.request_delete_range.key, None)
        if writes:
            self.notify()
        return pb.TxnResponse(header=self.header(), succeeded=holds, responses=responses)

    def _put(self, put):
        old = self.keys.get(put.key)
        self.keys[put.key] = pb.KeyValue(
            key=put.key, value=put.value, lease=put.lease, mod_revision=self.revision,
            create_revision=old.create_revision if old else self.revision,
        )  # fmt: skip

    def _holds(self, condition):
        pair = self.keys.get(condition.key, pb.KeyValue())
        assert condition.result == pb.Compare.EQUAL
        if condition.target == pb.Compare.CREATE:
            return pair.create_revision == condition.create_revision
        assert condition.target == pb.Compare.MOD
        return pair.mod_revision == condition.mod_revision

    def notify(self):
        for ring in tuple(self.watchers):
            ring()


class FakeClient:
    """One node's way to it, in the place of ``EtcdClient``.

    ``lost``, ``unheard``, ``late``: how often a request never arrives, is carried out without an answer, or is carried
    out after the client has given up. ``stall``: how often an answer comes very late and is still taken, as by a process
    that was stopped. ``to_stuck``: it talks to the former leader, which answers nothing until ``hangs_until``.
    """

    def __init__(self, etcd, *, attempt_seconds=1.0, lost=0.0, unheard=0.0, late=0.0, stall=0.0, delay=0.01):
        self.etcd = etcd
        self.contacts = {"etcd:2379": Contact()}
        self.endpoint = "etcd:2379"
        self.attempt_seconds = attempt_seconds
        self.lost, self.unheard, self.late, self.stall, self.delay = lost, unheard, late, stall, delay
        self.cut = False
        self.to_stuck = False
        self.hangs_until = 0.0
        self.asked = []

    async def _ask(self, name, act):
        self.asked.append(name)
        etcd, rng = self.etcd, self.etcd.rng

        life = etcd.life

        def unheard():
            try:
                if etcd.life is life:
                    act()
            except EtcdError:
                pass

        chance = rng.random()
        hangs = self.to_stuck and asyncio.get_running_loop().time() < self.hangs_until
        if self.cut or hangs or chance < self.lost:
            return await self._gave_up()
        if chance < self.lost + self.late:
            asyncio.get_running_loop().call_later(
                rng.uniform(self.attempt_seconds, 15), lambda: etcd.frozen or unheard()
            )
            return await self._gave_up()
        await asyncio.sleep(rng.uniform(0, self.delay))
        if etcd.frozen:
            etcd.waiting.append(unheard)
            return await self._gave_up()
        if self.to_stuck and name != "keep_alive":
            self.to_stuck = False
            if rng.random() < 0.5:  # it does not answer, so the next member is asked
                return await self._gave_up()
            await asyncio.sleep(rng.uniform(0, self.attempt_seconds / 2))  # it comes to itself, and answers
        if self.lost + self.late <= chance < self.lost + self.late + self.unheard:
            unheard()
            return await self._gave_up()
        answer = act()
        stalled = rng.random() < self.stall
        await asyncio.sleep(rng.uniform(0, 10.0 if stalled else self.delay))
        if (self.cut or etcd.frozen) and not stalled:
            return await self._gave_up()
        return answer

    async def _gave_up(self):
        await asyncio.sleep(self.attempt_seconds)
        raise EtcdError("etcd etcd:2379: does not answer")

    async def read(self, request):
        return await self._ask("read", lambda: self.etcd.read(request))

    async def change(self, request):
        return await self._ask("change", lambda: self.etcd.change(request))

    async def grant(self, ttl):
        return await self._ask("grant", lambda: self.etcd.grant(ttl))

    async def revoke(self, lease):
        try:
            await self._ask("revoke", lambda: self.etcd.revoke(lease))
        except EtcdError:
            pass

    async def keep_alive(self, lease):
        def act():
            if self.to_stuck and self.etcd.stuck_term:
                return self.etcd.stuck_keep_alive(lease)
            self.to_stuck = False
            return self.etcd.keep_alive(lease)

        return await self._ask("keep_alive", act)

    async def watch(self, request):
        changed = asyncio.Event()
        ring = changed.set
        self.etcd.watchers.append(ring)
        try:
            while True:
                await changed.wait()
                changed.clear()
                if not (self.cut or self.etcd.frozen):
                    yield pb.WatchResponse()
        finally:
            self.etcd.watchers.remove(ring)

    async def close(self):
        pass
