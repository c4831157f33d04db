"""The endpoint as a whole: mode, admission, target and what is known of the MetaService. No I/O, no clock.

Modes: ``serve``; ``quiesce`` (a planned stop: requests are held, then answered as misses); ``recover`` (the
MetaService died without a quiesced stop, so that keys may point at other keys' bytes: nothing is looked up until
the daemon has purged the pool and says ``serve``).

Admission: ``all``; ``survivors`` (only processes that had joined before). It closes by itself whenever the
MetaService goes away, because a newcomer that joins before the survivors are back is given a survivor's rank.
Only the daemon opens it again.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from kvtierd.endpoint.clients import ClientProcess, ClientTable, Identity
from kvtierd.endpoint.config import Target
from kvtierd.endpoint.link import Mode

MAX_SAVED_SURVIVORS = 512


class Admission(enum.StrEnum):
    """Who may connect."""

    ALL = "all"
    SURVIVORS = "survivors"


@dataclasses.dataclass(slots=True)
class Backend:
    """What is known of the MetaService. Times are unix seconds. ``deaths`` counts how often it was found gone."""

    reachable: bool = False
    since: float | None = None
    last_error: str = "not tried yet"
    deaths: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The ``backend`` object of ``status``."""
        return {
            "reachable": self.reachable,
            "reachable_since_unix_seconds": self.since if self.reachable else None,
            "last_error": self.last_error,
            "deaths": self.deaths,
        }


class EndpointState:
    """The rules of modes and admission, and the table of clients.

    ``revision`` grows with every change worth saving.
    """

    def __init__(
        self, target: Target, *, purge_on_unclean: bool, quiesce_limit_seconds: float = 60.0
    ) -> None:
        self.target = target
        self.configured_target = target
        self.mode = Mode.SERVE
        self.mode_reason = "start"
        self.admission = Admission.ALL
        self.backend = Backend()
        self.clients = ClientTable()
        self.quiesced = False
        self.revision = 0
        self._purge_on_unclean = purge_on_unclean
        self._quiesce_limit_seconds = quiesce_limit_seconds
        self._quiesce_ends_at: float | None = None

    # -- the MetaService comes and goes ----------------------------------------------------------

    def backend_found(self, unix_seconds: float) -> bool:
        """It answered. True when it had not done so before."""
        if self.backend.reachable:
            return False
        self.backend.reachable, self.backend.since, self.backend.last_error = True, unix_seconds, ""
        return True

    def backend_silent(self, why: str) -> None:
        """It does not answer, but it was not seen to be gone: no purge, no closed door."""
        self.backend.reachable, self.backend.last_error = False, why

    def backend_gone(self, why: str) -> None:
        """Nobody listens at the target. The first time after it was there counts as its death."""
        was_there = self.backend.since is not None
        self.backend.reachable, self.backend.last_error = False, why
        if not was_there:
            return
        self.backend.since = None
        self.backend.deaths += 1
        self.admission = Admission.SURVIVORS
        if self.mode is Mode.QUIESCE and self.quiesced:
            self.mode_reason = "stopped as planned"
        elif self._purge_on_unclean:
            self._set_mode(Mode.RECOVER, "the MetaService went away without a quiesced stop")
        else:
            self._set_mode(Mode.SERVE, "the MetaService went away; purge_on_unclean is false")
        self.revision += 1

    # -- commands --------------------------------------------------------------------------------

    def serve(self) -> None:
        """Data requests pass again."""
        self._set_mode(Mode.SERVE, "command")

    def recover(self) -> None:
        """Data requests are answered as misses until ``serve``."""
        self._set_mode(Mode.RECOVER, "command")

    def quiesce(self, now: float) -> None:
        """Data requests are held from now on. Ends by itself after the limit, should the daemon be gone."""
        self._set_mode(Mode.QUIESCE, "command")
        self._quiesce_ends_at = now + self._quiesce_limit_seconds

    def mark_quiesced(self) -> None:
        """Everything was answered and it was quiet: a death from now on is a planned stop."""
        self.quiesced = True
        self.revision += 1

    def admit(self, who: Admission) -> None:
        """Opens or closes the door for newcomers."""
        self.admission = who
        self.revision += 1

    def set_target(self, target: Target) -> None:
        """New connections go there. The MetaService there is a stranger until it has answered."""
        if target != self.target:
            self.target = target
            self.backend = Backend(deaths=self.backend.deaths)
            self.revision += 1

    def expire(self, now: float) -> bool:
        """True when a quiesce that nobody ended has ended itself."""
        if self.mode is not Mode.QUIESCE or self._quiesce_ends_at is None or now < self._quiesce_ends_at:
            return False
        self._set_mode(Mode.SERVE, "quiesce reached its limit")
        return True

    def _set_mode(self, mode: Mode, reason: str) -> None:
        self.mode, self.mode_reason = mode, reason
        self.quiesced = False
        self._quiesce_ends_at = None
        self.revision += 1

    # -- clients ---------------------------------------------------------------------------------

    def admits(self, client: ClientProcess) -> bool:
        """Whether this process may be connected to the MetaService now."""
        return self.admission is Admission.ALL or client.joined

    def joined(self, client: ClientProcess) -> None:
        """The MetaService shook hands with it."""
        if not client.joined:
            client.joined = True
            self.revision += 1

    # -- what survives a restart of the endpoint -------------------------------------------------

    def to_save(self) -> dict[str, Any]:
        """The content of the state file."""
        survivors = sorted(self.clients.survivors(), key=lambda c: c.links, reverse=True)[
            :MAX_SAVED_SURVIVORS
        ]
        return {
            "version": 1,
            "mode": self.mode.value,
            "mode_reason": self.mode_reason,
            "quiesced": self.quiesced,
            "admission": self.admission.value,
            "target": self.target.as_dict(),
            "configured_target": self.configured_target.as_dict(),
            "survivors": [
                {**dataclasses.asdict(c.identity), "name": c.name, "has_rank": c.has_rank} for c in survivors
            ],
        }

    def restore(self, saved: dict[str, Any], now: float, unix_seconds: float) -> None:
        """Takes over what ``to_save`` gave. Raises ``KeyError``, ``ValueError`` or ``TypeError`` if it is damaged.

        The restart has broken every connection, so with survivors to come back the door is closed; and if no
        MetaService is there now, it died while nobody looked.
        """
        mode, admission = Mode(saved["mode"]), Admission(saved["admission"])
        saved_target = Target.parse(saved["target"])
        follows = Target.parse(saved["configured_target"]) == self.configured_target
        survivors = [
            (
                Identity(int(s["pid"]), int(s["start_ticks"]), str(s["address"])),
                str(s["name"])[:64],
                s["has_rank"],
            )
            for s in saved["survivors"][:MAX_SAVED_SURVIVORS]
        ]
        if mode is Mode.QUIESCE:
            self.quiesce(now)
        else:
            self._set_mode(mode, str(saved["mode_reason"])[:200])
        self.quiesced = bool(saved["quiesced"]) and mode is Mode.QUIESCE
        self.admission = admission
        if follows:
            self.target = saved_target
        for identity, name, has_rank in survivors:
            client = self.clients.obtain(identity, name, unix_seconds)
            client.joined = True
            client.has_rank = has_rank if isinstance(has_rank, bool) else None
        if survivors:
            self.admission = Admission.SURVIVORS
            self.backend.since = unix_seconds
