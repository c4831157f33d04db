"""PURE: the life of the tier over restarts of its MetaService. Values in, actions out; no I/O, no clock.

Why it is needed (measured on MemCache 1.3.0):

- A MetaService killed under load can come back with keys that point at other keys' bytes. So after any end
  that was not a quiesced stop nothing may be read until the pool was purged.
- A purge before every survivor has replayed its blobs leaves what is replayed later. So survivors first.
- A client that joins before the survivors are back takes a survivor's rank and destroys the pool when it
  leaves. So nobody new before everybody old.
- A survivor's role report can get lost; joiners then hang. Cutting the connections once brings it back.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

from kvtierd.memcache.answers import PROVIDER
from kvtierd.memcache.health import ExpectedPool, PoolState, joinable, pool_ready, unknown_roles

SURVIVORS_SECONDS = 10.0  # survivors need 2.1 to 2.5 s; after this they count as gone
UNKNOWN_ROLE_SECONDS = 2.0  # a role report that has not come by then is lost
CUT_PAUSE_SECONDS = 5.0
MOST_CUTS = 5
PURGE_PAUSE_SECONDS = 2.0

Action = Literal["recover", "serve", "admit-all", "cut", "purge", "restart-providers"]
State = Literal["down", "meta_up", "pool_ready", "joinable"]
Phase = Literal["fresh", "recovering", "serving"]


@dataclasses.dataclass(frozen=True, slots=True)
class TierInputs:
    """One look at the tier.

    Attributes:
        now_seconds: A monotonic clock.
        instance: The MetaService's current run, ``None`` when it is not alive.
        meta_up: It is up, hold-off included.
        meta_problem: Why not.
        pool: What it says of its pool; ``None`` when it does not answer.
        endpoint_mode: "serve", "quiesce", "recover"; ``None`` without an endpoint or when it does not answer.
        endpoint_admission: "all" or "survivors"; ``None`` likewise.
        clean_stop: The run before this one was stopped after a quiesce.
        handed_over: The master before this one gave mastership to this node with nothing in flight: then the endpoint
            recovers because of the change, not because of a death.
        founding: Nothing has been there before: the endpoint recovers since it was pointed somewhere for the first time.
        survivors_missing: Client processes that the endpoint knew and that have not come back; also those without a
            rank count there.
        many_nodes: Ranks of other nodes are in the pool, and the endpoints of all of them count their survivors. One rank
            that is missing says nothing then: it may be a lost host's, and nobody waits for that one.
        inherited: Another node's MetaService was there before this one, and no endpoint tells of it: what clients bring back
            comes from there.
        survivors_seconds: How long survivors are waited for.
        clients_alive: Some process that may have a rank is running: without any there are no survivors to wait for.
    """

    now_seconds: float
    instance: str | None
    meta_up: bool
    meta_problem: str
    pool: PoolState | None
    endpoint_mode: str | None
    endpoint_admission: str | None
    clean_stop: bool = False
    handed_over: bool = False
    founding: bool = False
    survivors_missing: int = 0
    many_nodes: bool = False
    inherited: bool = False
    survivors_seconds: float = SURVIVORS_SECONDS
    clients_alive: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class TierView:
    """What the tier is, and why it is not more."""

    state: State = "down"
    reasons: tuple[str, ...] = ("not looked at yet",)
    phase: Phase = "fresh"
    purge_due: bool = False


class TierMachine:
    """Feed it looks with ``step``; carry out what it returns; tell it when a purge ended."""

    def __init__(self, expected: ExpectedPool, *, purge_on_unclean: bool) -> None:
        self.expected = expected
        self.view = TierView()
        self._purge_on_unclean = purge_on_unclean
        self._instance: str | None = None
        self._members: dict[int, str] = {}
        self._phase: Phase = "fresh"
        self._since_seconds: float | None = None
        self._purge_due = False
        self._purging: str | None = None  # the run that is being purged
        self._next_purge_seconds = 0.0
        self._unknown_since_seconds: float | None = None
        self._next_cut_seconds = 0.0
        self._cuts = 0
        self._given_up: tuple[int, ...] = ()

    # -- what a restarted daemon must still know

    def remember(self) -> dict[str, Any]:
        """The state as JSON values, to be kept over a restart of the daemon."""
        return {
            "instance": self._instance,
            "purge_due": self._purge_due,
            "members": {str(rank): role for rank, role in self._members.items()},
            "recovering": self._phase == "recovering",
        }

    def recall(self, kept: dict[str, Any]) -> Self:
        """Takes up ``remember``'s values; anything odd in them counts as an unclean end."""
        try:
            self._instance = kept["instance"]
            self._purge_due = bool(kept["purge_due"])
            self._members = {int(rank): str(role) for rank, role in kept["members"].items()}
            if kept["recovering"]:
                self._phase = "recovering"
        except (KeyError, TypeError, ValueError, AttributeError):
            self._instance, self._members = None, {}
            self._purge_due = self._purge_on_unclean
            self._phase = "recovering"
        return self

    # -- one look

    def step(self, seen: TierInputs) -> tuple[Action, ...]:
        """Takes a look into account; what must be done now, in order."""
        if seen.instance is None:
            self.view = self._make_view("down", (seen.meta_problem or "the MetaService is not running",))
            return ()
        if seen.instance != self._instance:
            self._new_run(seen)
        elif self._phase == "serving" and (
            seen.endpoint_mode == "recover"
            or (seen.endpoint_admission == "survivors" and seen.survivors_missing)
        ):
            # The run is the same, but its clients were cut off (a hang, a restarted endpoint): survivors first.
            self._begin_recovery(seen, unclean=False)
        if seen.pool is None:
            reason = seen.meta_problem or "the MetaService does not answer"
            self.view = self._make_view("down", (reason,))
            return ()
        actions = self._recover(seen, seen.pool) if self._phase != "serving" else self._serve(seen, seen.pool)
        self._judge(seen, seen.pool)
        return actions

    def purge_ended(self, *, ok: bool, now_seconds: float) -> None:
        """The purge that ``step`` asked for has ended. One that failed is asked for again after a pause."""
        purged, self._purging = self._purging, None
        if ok and purged == self._instance:
            self._purge_due = False
        elif not ok:  # one that ended well on an earlier run says nothing of this one
            self._next_purge_seconds = now_seconds + PURGE_PAUSE_SECONDS

    def _new_run(self, seen: TierInputs) -> None:
        first = self._instance is None and self._phase == "fresh"
        self._instance = seen.instance
        if first and seen.endpoint_mode != "recover" and not seen.inherited:
            return
        # An endpoint that recovers has seen the death: then the quiesce was over before the stop came.
        died = not seen.clean_stop or seen.endpoint_mode == "recover" or seen.inherited
        self._begin_recovery(seen, unclean=died and not seen.handed_over and not (first and seen.founding))

    def _begin_recovery(self, seen: TierInputs, *, unclean: bool) -> None:
        self._phase = "recovering"
        self._since_seconds = seen.now_seconds
        self._given_up = ()
        self._cuts = 0
        self._unknown_since_seconds = None
        if not seen.clients_alive or seen.many_nodes:
            self._members = {}
        if unclean and self._purge_on_unclean:
            self._purge_due = True

    def _recover(self, seen: TierInputs, pool: PoolState) -> tuple[Action, ...]:
        actions: list[Action] = []
        if self._purge_due and seen.endpoint_mode == "serve":
            actions.append("recover")
        actions += self._cure_unknown(seen, pool)
        if self._since_seconds is None:
            self._since_seconds = seen.now_seconds
        waited = seen.now_seconds - self._since_seconds
        back, _ = joinable(pool, self._members)
        missing = seen.survivors_missing if seen.clients_alive else 0
        if ((not back and self._members) or missing) and waited < seen.survivors_seconds:
            return tuple(actions)
        if not back:
            self._given_up = tuple(sorted(set(self._members) - {r.rank for r in pool.cluster.ranks}))
            if any(self._members.get(rank) == PROVIDER for rank in self._given_up):
                actions.append("restart-providers")
            self._members = {r: role for r, role in self._members.items() if r not in self._given_up}
        if self._purge_due:
            if self._purging is None and seen.now_seconds >= self._next_purge_seconds:
                self._purging = self._instance
                actions.append("purge")
            return tuple(actions)
        self._phase = "serving"
        self._learn_members(pool)
        return (*actions, *self._open(seen, restarted=True))

    def _serve(self, seen: TierInputs, pool: PoolState) -> tuple[Action, ...]:
        cure = self._cure_unknown(seen, pool)
        self._learn_members(pool)
        return (*cure, *self._open(seen))

    def _learn_members(self, pool: PoolState) -> None:
        if not unknown_roles(pool.cluster):
            self._members = pool.cluster.roles()

    def _open(self, seen: TierInputs, *, restarted: bool = False) -> tuple[Action, ...]:
        """What is still missing for everybody to be served and admitted.

        A quiesce is somebody's intent: it ends when the restart it was for is over, not before.
        """
        actions: list[Action] = []
        if seen.endpoint_mode == "recover" or (restarted and seen.endpoint_mode == "quiesce"):
            actions.append("serve")
        if seen.endpoint_admission == "survivors":
            actions.append("admit-all")
        return tuple(actions)

    def _cure_unknown(self, seen: TierInputs, pool: PoolState) -> list[Action]:
        if not unknown_roles(pool.cluster):
            self._unknown_since_seconds = None
            self._cuts = 0
            return []
        if self._unknown_since_seconds is None:
            self._unknown_since_seconds = seen.now_seconds
        lasting = seen.now_seconds - self._unknown_since_seconds >= UNKNOWN_ROLE_SECONDS
        if not lasting or seen.now_seconds < self._next_cut_seconds or self._cuts >= MOST_CUTS:
            return []
        self._cuts += 1
        self._next_cut_seconds = seen.now_seconds + CUT_PAUSE_SECONDS
        return ["cut"]

    # -- the verdict

    def _judge(self, seen: TierInputs, pool: PoolState) -> None:
        if not seen.meta_up:
            self.view = self._make_view("down", (seen.meta_problem,))
            return
        ready, why_not_ready = pool_ready(pool, self.expected, purge_due=self._purge_due)
        if not ready:
            self.view = self._make_view("meta_up", why_not_ready)
            return
        can_join, why_not_join = joinable(pool, self._members)
        reasons = list(why_not_join)
        if self._phase == "recovering":
            reasons.append("survivors of the MetaService's restart are still coming back")
        if self._cuts >= MOST_CUTS:
            reasons.append(f"cutting the connections {MOST_CUTS} times did not bring the roles back")
        if can_join and not reasons:
            gone = ", ".join(map(str, self._given_up))
            self.view = self._make_view(
                "joinable", (f"after its restart these ranks did not come back: {gone}",) if gone else ()
            )
        else:
            self.view = self._make_view("pool_ready", tuple(reasons))

    def _make_view(self, state: State, reasons: tuple[str, ...]) -> TierView:
        return TierView(state, reasons, self._phase, self._purge_due)
