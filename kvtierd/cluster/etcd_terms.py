"""What this node asks of etcd to gain, prove, keep and end a term. Each method is one conversation; when, and what
follows for the node, is the coordinator's business (``etcd``). The keys are in ``etcd_keys``, the times in ``etcd_config``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from kvtierd.cluster.etcd_client import EtcdClient, EtcdError
from kvtierd.cluster.etcd_config import EtcdConfig
from kvtierd.cluster.etcd_keys import HELD, RELEASED, UNSURE, Holder, Keys, Snapshot

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Term:
    """This node's own.

    Attributes:
        holder: Its key in etcd, as this node knows it.
        raft_term: Of etcd, when the key got its lease.
        until_seconds: It has ended then, whatever comes in later.
        serve_after_seconds: Its MetaService may start then; 0: at once.
        why: How it began.
        unsure: etcd says that there may have been a master it knows nothing of.
    """

    holder: Holder
    raft_term: int
    until_seconds: float
    serve_after_seconds: float
    why: str
    unsure: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """That a term goes on."""

    until_seconds: float


class TermOverError(Exception):
    """etcd says that the term has ended; the text says why."""


class Terms:
    """All methods raise ``EtcdError``: then nothing is known of what was asked."""

    def __init__(self, config: EtcdConfig, client: EtcdClient, boot: str, clock: Callable[[], float]) -> None:
        self._config = config
        self._client = client
        self._boot = boot
        self._clock = clock
        self._keys = Keys(config.prefix, config.cluster)

    async def read(self) -> Snapshot:
        """What a majority of etcd's members agree on now. Raises ``ClusterError`` when it makes no sense."""
        found = await self._client.read(self._keys.read())
        return self._keys.snapshot(found.header, found)

    def is_own(self, holder: Holder) -> bool:
        """Whether it is this node, since it was booted."""
        return (holder.node, holder.boot) == (self._config.node, self._boot)

    async def campaign(self, seen: Snapshot, highest_epoch: int) -> Term | None:
        """A new term, if nothing has changed since ``seen``. Its epoch is above ``highest_epoch``."""
        config = self._config
        went_back = seen.base + seen.revision < highest_epoch
        base = highest_epoch if went_back else seen.base
        if went_back or seen.last in {"", UNSURE}:
            last, wait_seconds = UNSURE, config.blind_wait_seconds
            why = "nobody had the lease in etcd; there may have been a master that it knows nothing of"
        elif seen.last == RELEASED:
            last, wait_seconds, why = HELD, 0.0, "the last master has handed over"
        else:
            last, wait_seconds = HELD, config.kill_wait_seconds
            why = "the lease of the last master has ended"
        sent = self._clock()
        lease = await self._client.grant(config.ttl_seconds)
        request = self._keys.gain(seen, config.node, self._boot, lease.ID, base=base, last=last)
        answer = await self._client.change(request)
        if not answer.succeeded:  # somebody was quicker
            await self._client.revoke(lease.ID)
            return None
        revision = answer.header.revision
        return Term(
            holder=Holder(config.node, self._boot, revision, revision, lease.ID, base + revision),
            raft_term=answer.header.raft_term,
            until_seconds=sent + config.term_seconds(lease.TTL),
            serve_after_seconds=self._clock() + wait_seconds if wait_seconds else 0.0,
            why=why,
            unsure=last == UNSURE,
        )

    async def resume(self, holder: Holder, last: str, serve_after_seconds: float | None) -> Term | None:
        """Goes on with a term of this boot that nobody has ended. ``None``: somebody has, just now.

        Args:
            holder: The key.
            last: As the snapshot has it.
            serve_after_seconds: ``None`` when it is not known: the process before this one may have been still waiting.
        """
        wait_seconds = (
            self._config.kill_wait_seconds if last == HELD else self._config.blind_wait_seconds
        )  # fmt: skip
        term = Term(
            holder=holder,
            raft_term=0,
            until_seconds=float("-inf"),
            serve_after_seconds=0.0,
            why="its lease in etcd was still there",
            unsure=last == UNSURE,
        )
        if not await self._attach(term):
            return None
        term.serve_after_seconds = (
            self._clock() + wait_seconds if serve_after_seconds is None else serve_after_seconds
        )
        return term

    async def prove(self, term: Term, sent_seconds: float) -> Proof:
        """Renews the lease and makes sure that it counts.

        After a change of etcd's leader it counts only with a new lease: one from before may still be ended by the leader
        of then, at any moment. An etcd that says that it is full grants none, to nobody; then the old one has to do.

        Raises:
            TermOverError: It has ended.
            EtcdError: It may or may not have been renewed.
        """
        kept = await self._client.keep_alive(term.holder.lease)
        if kept.TTL <= 0:
            raise TermOverError("its lease has ended in etcd")
        seen = await self.read()
        holder = seen.holder
        if holder is None:
            raise TermOverError("its key in etcd is gone")
        if holder.create_revision != term.holder.create_revision:
            raise TermOverError(f"{holder.node} holds the lease in etcd")
        if holder.lease != term.holder.lease:  # a change of lease that was taken for failed
            term.holder = holder
            raise EtcdError("etcd has changed the lease after all; the new one is renewed next")
        if seen.raft_term != kept.header.raft_term:
            terms = f"{kept.header.raft_term} and {seen.raft_term}"
            raise EtcdError(f"etcd changes its leader, or a proxy is in between: raft terms {terms}")
        if seen.raft_term != term.raft_term:
            try:
                attached = await self._attach(term)
            except EtcdError as error:
                if not error.refused:
                    raise
                _log.warning("etcd has a new leader, and gives no new lease: %s", error)
            else:
                if not attached:
                    raise EtcdError("the key in etcd has changed meanwhile")
        return Proof(sent_seconds + self._config.term_seconds(kept.TTL))

    async def tend(self, term: Term) -> None:
        """Writes what is due; it does not matter to the term when that fails, and is due again next time."""
        if term.unsure and self._clock() >= term.serve_after_seconds:
            settled = await self._client.change(self._keys.settle(term.holder))
            term.unsure = not settled.succeeded

    async def prepare_release(self) -> int:
        """A lease for the head start of a successor.

        Every member is asked, if need be, and the first one twice: its connection may be from before it was restarted.
        """
        for _ in self._config.endpoints:
            try:
                return (await self._client.grant(self._config.head_start_seconds)).ID
            except EtcdError:
                continue
        return (await self._client.grant(self._config.head_start_seconds)).ID

    async def release(self, term: Term, to: str, lease: int) -> bool:
        """Ends the term for a switchover. False: it had changed, and nothing was done."""
        served = self._clock() >= term.serve_after_seconds
        answer = await self._client.change(self._keys.release(term.holder, to, lease, served=served))
        return answer.succeeded

    async def depose(self, holder: Holder) -> None:
        """Ends somebody else's term whose epoch is older than one that was followed already."""
        await self._client.change(self._keys.depose(holder))

    async def _attach(self, term: Term) -> bool:
        """A new lease for the term's key; its end moves. False: the key has changed."""
        sent = self._clock()
        lease = await self._client.grant(self._config.ttl_seconds)
        answer = await self._client.change(self._keys.attach(term.holder, lease.ID))
        if not answer.succeeded:
            await self._client.revoke(lease.ID)
            return False
        term.holder = dataclasses.replace(term.holder, mod_revision=answer.header.revision, lease=lease.ID)
        term.raft_term = answer.header.raft_term
        term.until_seconds = max(
            term.until_seconds, sent + self._config.term_seconds(lease.TTL)
        )  # fmt: skip
        return True
