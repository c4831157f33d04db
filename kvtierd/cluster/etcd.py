"""Mode etcd: an etcd that the operator runs names the master. See ``etcd_keys`` for what is kept there.

What makes it safe, besides the times in ``etcd_config``:

- Only this node's own clock ends its term. An etcd that is frozen or cut off keeps a renewal waiting and reports nothing,
  so the end is set when the request is *sent*, and an answer that comes after it revives nothing.
- A renewal counts only with proof that the right member gave it. A leader of etcd that is stuck (on its disk, say) goes
  on answering keep-alives while the others have elected another one, who knows nothing of them (etcd issue 15247, mended
  in 3.4.31 and 3.5.13). So each keep-alive is followed by a read that a majority of the members must agree to, and the
  raft terms of both answers must be the same: then no other leader had been elected when the keep-alive was handled.
- The same stuck leader may, once it is back, end leases that it holds for expired. It cannot know those granted since
  its time, so after every change of leader the master's key gets a new lease, through consensus.
- A successor starts its MetaService a kill margin after it has gained, since the guard of the former master kills within
  that, or at once when the former one has said that it was stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.etcd_client import EtcdClient, EtcdError
from kvtierd.cluster.etcd_config import EtcdConfig
from kvtierd.cluster.etcd_keys import Holder, Keys, Snapshot
from kvtierd.cluster.etcd_terms import Term, TermOverError, Terms
from kvtierd.cluster.standing import PeerContact, Standing
from kvtierd.errors import ClusterError
from kvtierd.settings import Settings
from kvtierd.settings.cluster import EtcdTlsSettings

_log = logging.getLogger(__name__)
_SHORTEST_PAUSE_SECONDS = 0.1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def etcd_coordinator(settings: Settings, node: str, **more: Any) -> EtcdCoordinator:
    """The coordinator that the settings ask for; ``more`` as in ``EtcdCoordinator``.

    Raises:
        ClusterError: ``cluster.no-such-node``: this node is not among the peers.
    """
    cluster = settings.cluster
    config = EtcdConfig(
        cluster=cluster.name,
        node=node,
        nodes=tuple(peer.name for peer in cluster.nodes),
        endpoints=cluster.etcd.endpoints,
        prefix=cluster.etcd.prefix,
        lease_seconds=cluster.lease,
    )
    return EtcdCoordinator(config, cluster.etcd.tls, **more)


class EtcdCoordinator:
    """A ``Coordinator``.

    ``client`` may be looked at; its ``contacts`` say how each member answers.
    """

    mode = "etcd"

    def __init__(
        self,
        config: EtcdConfig,
        tls: EtcdTlsSettings | None = None,
        *,
        highest_epoch: int = 0,
        highest_master: str = "",
        held_epoch: int = 0,
        fence: Callable[[], tuple[int, str]] = lambda: (0, ""),
        heard: Callable[[Standing], None] = lambda standing: None,
        boot: str = "",
        client: EtcdClient | None = None,
        clock: Callable[[], float] = boottime_seconds,
    ) -> None:
        """Connects to nothing yet.

        Args:
            config: Who and where.
            tls: For etcd; ``None``: plain.
            highest_epoch: The highest that this node has ever followed, of whatever mode; new terms begin above it.
            highest_master: The master of that one.
            held_epoch: Of a MetaService of this node that runs on under its guard, 0 when there is none. Its term goes
                on even if the node is not fit.
            fence: The highest epoch followed and its master, as known now: the other nodes may know better than etcd.
            heard: Called with every new standing, before whoever runs this.
            boot: Boot id of this host; by default the kernel's.
            client: For tests; by default one for the configured endpoints.
            clock: ``CLOCK_BOOTTIME``.
        """
        self.config = config
        self.client = client or EtcdClient(
            config.endpoints, tls, attempt_seconds=config.attempt_seconds, clock=clock
        )
        self._keys = Keys(config.prefix, config.cluster)
        self._terms = Terms(config, self.client, boot or _BOOT_ID.read_text().strip(), clock)
        self._clock = clock
        self._highest_epoch = highest_epoch
        self._highest_master = highest_master
        self._held_epoch = held_epoch
        self._fence, self._heard = fence, heard
        self._standing = Standing("unknown", highest_epoch, why="etcd has not answered yet")
        self._term: Term | None = None
        self._fit = True
        self._why_unfit = ""
        self._former: Term | None = None
        self._in_touch_seconds = float("-inf")
        self._out_of_touch = False
        self._failures = 0
        self._problem = ""
        self._changed: Callable[[Standing], None] = lambda standing: None
        self._bell = asyncio.Event()
        self._lock = asyncio.Lock()  # one conversation with etcd at a time; the watch only rings the bell
        self._alarm: asyncio.TimerHandle | None = None

    # -- Coordinator

    @property
    def standing(self) -> Standing:
        """Where this node stands now; a term that has run out by the clock is over, whoever was busy meanwhile."""
        self._expire()
        return self._standing

    async def run(self, changed: Callable[[Standing], None]) -> None:
        """See ``Coordinator``. Cancelling it leaves the lease to run out, so that a restart can go on with it."""
        self._changed = changed
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                pause_seconds = await self._step()
                with contextlib.suppress(TimeoutError):
                    # wait_for of Python 3.11 may lose a cancellation.
                    async with asyncio.timeout(pause_seconds):
                        await self._bell.wait()
                self._bell.clear()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def set_fit(self, fit: bool, why: str = "") -> None:
        """See ``Coordinator``. A master that is not fit any more stays the master."""
        if (fit, why) != (self._fit, self._why_unfit):
            self._fit, self._why_unfit = fit, why
            self._bell.set()

    def peers(self) -> tuple[PeerContact, ...]:
        """The members of etcd, since they decide. Only one is asked at a time, so the others' last contact may be old."""
        now = self._clock()
        return tuple(
            PeerContact(
                endpoint, True, None if c.at_seconds is None else max(0.0, now - c.at_seconds), c.problem
            )
            for endpoint, c in self.client.contacts.items()
        )

    async def hand_over(self, to: str) -> None:
        """See ``Coordinator``. Others than ``to`` hold back for ``config.head_start_seconds``; then anybody may.

        When it raises ``cluster.unreachable`` after etcd was asked, etcd may still carry it out; this node then is not the
        master until etcd says that it still is.
        """
        if to == self.config.node or to not in self.config.nodes:
            raise ClusterError(
                f"{to} cannot become the master",
                why="it is not another peer",
                hint=f"choose one of {', '.join(n for n in self.config.nodes if n != self.config.node)}",
                code="cluster.no-such-node",
            )
        async with self._lock:
            self._expire()
            term = self._term
            if term is None:
                raise ClusterError(
                    f"{self.config.node} is not the master, so it has nothing to hand over",
                    code="cluster.not-master",
                )
            await self._release(term, to)

    async def promote(self) -> None:
        """See ``Coordinator``."""
        raise ClusterError(
            "mode etcd elects its master itself",
            hint="name the next one with kvtierctl switchover NODE; [cluster] mode static has promote",
            code="cluster.elects",
        )

    async def close(self) -> None:
        """See ``Coordinator``."""
        if self._alarm is not None:
            self._alarm.cancel()
        await self.client.close()

    # -- one look at etcd at a time

    async def _step(self) -> float:
        """Does what is due; seconds until the next one."""
        async with self._lock:
            self._expire()
            self._mind_the_fence()
            sent = self._clock()
            try:
                if self._term is not None:
                    again = await self._renew(self._term, sent)
                else:
                    again = await self._look()
            except EtcdError as error:
                return self._failed(str(error))
            except ClusterError as error:
                return self._failed(error.message)
            self._failures, self._problem = 0, ""
            self._out_of_touch = False
            return 0.0 if again else max(0.0, sent + self.config.renew_seconds - self._clock())

    async def _look(self) -> bool:
        """Not the master: follows who is, or becomes it. True: something has changed, look again at once."""
        seen = await self._terms.read()
        self._in_touch_seconds = self._clock()
        holder = seen.holder
        if holder is None:
            return await self._vacancy(seen)
        if self._is_outdated(holder):
            # etcd has gone back in time, or the cluster comes from another mode. Nobody who knows can follow this term.
            self._follow(
                "",
                f"{holder.node} holds epoch {holder.epoch} in etcd, but {self._highest_epoch} was followed already:"
                " was etcd emptied, or restored from a backup?",
            )
            if self._fit:
                await self._terms.depose(holder)
            return self._fit
        if holder.node != self.config.node:
            self._highest_epoch, self._highest_master = holder.epoch, holder.node
            self._follow(holder.node, f"{holder.node} holds the lease in etcd")
            return False
        if not self._terms.is_own(holder):
            self._follow(
                "", "the lease is held by this node before its last boot, or by another host of its name"
            )
            return False
        if self._fit or holder.epoch == self._held_epoch:
            return await self._resume(holder, seen.last)
        self._follow("", self._unfit())
        return False

    async def _vacancy(self, seen: Snapshot) -> bool:
        if not self._fit:
            self._follow("", self._unfit())
        elif seen.successor not in {"", self.config.node}:
            self._follow("", f"a switchover to {seen.successor} is under way")
        else:
            if not seen.successor:  # many who ask in the same moment would only make etcd work
                await asyncio.sleep(random.uniform(0, self.config.attempt_seconds / 20))
            return self._begin(await self._terms.campaign(seen, self._highest_epoch))
        return False

    def _is_outdated(self, holder: Holder) -> bool:
        known = (self._highest_epoch, self._highest_master or holder.node)
        return holder.epoch < known[0] or (holder.epoch == known[0] and holder.node != known[1])

    async def _resume(self, holder: Holder, last: str) -> bool:
        serve_after = None
        if self._former is not None and self._former.holder.create_revision == holder.create_revision:
            serve_after = self._former.serve_after_seconds
        elif holder.epoch == self._held_epoch:
            serve_after = 0.0  # it serves, or has served until now
        return self._begin(await self._terms.resume(holder, last, serve_after))

    async def _renew(self, term: Term, sent: float) -> bool:
        try:
            proof = await self._terms.prove(term, sent)
        except TermOverError as over:
            if self._term is term:
                self._lose(str(over))
            return True
        self._in_touch_seconds = self._clock()
        self._expire()
        if self._term is not term:  # run out meanwhile; what came in does not revive it
            return True
        term.until_seconds = max(term.until_seconds, proof.until_seconds)
        self._publish_term(term)
        try:
            await self._terms.tend(term)
        except EtcdError as error:
            _log.warning("writing to etcd: %s", error)
        return False

    async def _release(self, term: Term, to: str) -> None:
        try:
            head_start = await self._terms.prepare_release()
        except EtcdError as error:
            raise _unreachable(to, f"{error}; nothing has changed") from None
        self._expire()
        if self._term is not term:
            raise _unreachable(to, "the lease ran out meanwhile")
        # From here on it may have happened, so this node is the master no longer, whatever comes back.
        self._held_epoch = term.holder.epoch
        self._lose(f"handing over to {to}")
        self._bell.set()
        try:
            released = await self._terms.release(term, to, head_start)
        except EtcdError as error:
            raise _unreachable(to, f"{error}; it may have happened all the same") from None
        if not released:
            raise _unreachable(to, "the lease in etcd has changed meanwhile")
        self._held_epoch = 0

    # -- what follows from it

    def _begin(self, term: Term | None) -> bool:
        """True: look again. One that took too long to come is over already, and its key is there to go on with."""
        if term is None or self._clock() >= term.until_seconds:
            return True
        self._highest_epoch, self._highest_master = term.holder.epoch, self.config.node
        self._held_epoch = 0
        self._term = term
        self._publish_term(term)
        return False

    def _publish_term(self, term: Term) -> None:
        self._publish(
            Standing(
                "master",
                term.holder.epoch,
                self.config.node,
                term.why,
                until_seconds=term.until_seconds,
                serve_after_seconds=term.serve_after_seconds,
            )
        )
        self._set_alarm(term)

    def _set_alarm(self, term: Term) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        left = max(0.0, term.until_seconds - self._clock())
        self._alarm = asyncio.get_running_loop().call_later(left, self._on_alarm)

    def _on_alarm(self) -> None:
        self._expire()
        if self._term is not None:  # the loop's clock was ahead
            self._set_alarm(self._term)

    def _expire(self) -> None:
        """Comes before everything else: a process that was frozen finds answers that its term has not lived to see."""
        if self._term is not None and self._clock() >= self._term.until_seconds:
            self._lose(f"its lease was not renewed: {self._problem or 'no answer in time'}")

    def _mind_the_fence(self) -> None:
        """A later epoch that another node was followed in: nobody who knows of it would follow this node's own."""
        epoch, master = self._fence()
        if epoch <= self._highest_epoch:
            return
        self._highest_epoch, self._highest_master = epoch, master
        if self._term is not None:
            self._lose(f"{master} was followed in epoch {epoch} already")

    def _lose(self, why: str) -> None:
        self._former, self._term = self._term, None
        self._publish(Standing("follower", self._highest_epoch, why=why))

    def _unfit(self) -> str:
        return self._why_unfit or "this node is not fit to be the master"

    def _follow(self, master: str, why: str) -> None:
        self._publish(Standing("follower", self._highest_epoch, master, why))

    def _failed(self, why: str) -> float:
        """One attempt has failed; seconds until the next one."""
        self._problem = why
        now = self._clock()
        out_of_touch = now - self._in_touch_seconds >= self.config.lease_seconds
        if self._term is None and out_of_touch and not self._out_of_touch:
            # What was known last stays: engines go on with that master's MetaService.
            known, self._out_of_touch = self._standing, True
            self._publish(Standing("unknown", known.epoch, known.master, why))
        self._failures += 1
        rounds = self._failures // len(self.config.endpoints)
        if self._failures % len(self.config.endpoints):
            return 0.0  # the next member may answer
        pause_seconds: float = min(
            self.config.longest_pause_seconds, _SHORTEST_PAUSE_SECONDS * 2 ** min(rounds, 8)
        )
        return pause_seconds * random.uniform(0.5, 1.0)

    def _publish(self, standing: Standing) -> None:
        if standing != self._standing:
            self._standing = standing
            self._heard(standing)
            self._changed(standing)

    async def _watch(self) -> None:
        """Rings the bell when something changes. What it was is read afresh, so nothing depends on this but speed."""
        while True:
            with contextlib.suppress(EtcdError):
                async with contextlib.aclosing(self.client.watch(self._keys.watch())) as answers:
                    async for answer in answers:
                        self._bell.set()
                        if answer.canceled:
                            break
            await asyncio.sleep(random.uniform(0.5, 1.0))


def _unreachable(to: str, why: str) -> ClusterError:
    return ClusterError(
        f"mastership was not handed over to {to}",
        why=why,
        hint="etcdctl endpoint health says how its members are; kvtierctl status whether this node is still the master",
        code="cluster.unreachable",
    )
