"""The endpoint as a whole: mode, admission, target and what is known of the MetaService. No I/O, no clock.

Modes: ``serve``; ``quiesce`` (a planned stop: requests are held, then answered as misses); ``recover`` (the
MetaService died without a quiesced stop, so that keys may point at other keys' bytes: nothing is looked up until
the daemon has purged the pool and says ``serve``).

Admission: ``all``; ``survivors`` (only processes that had joined before). It closes by itself whenever the
MetaService goes away, because a newcomer that joins before the survivors are back is given a survivor's rank.
Only the daemon opens it again.

The target is the MetaService of this host, the endpoint of the node that is master, or ``None``: no master at present.
Under a target with an epoch the rules of ``epochs`` hold: a higher epoch with another target is a change of master, and
counts like a death, because what the new MetaService knows is not what the old one knew. No target, or a higher epoch
that was seen and not told, only *suspends*: requests on data are answered as misses, nobody is let in, and links stay.
Perhaps the next target is the same, and a link that is dropped cannot always be had back (see ``hop``).
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from kvtierd.endpoint.actions import Mode
from kvtierd.endpoint.clients import ClientProcess, ClientTable, Identity
from kvtierd.endpoint.epochs import Epochs
from kvtierd.endpoint.targets import AnyTarget, PeerTarget, parse_target, target_dict

MAX_SAVED_SURVIVORS = 512


class Admission(enum.StrEnum):
    """Who may connect."""

    ALL = "all"
    SURVIVORS = "survivors"


@dataclasses.dataclass(slots=True)
class Backend:
    """What is known of the MetaService. Times are unix seconds. ``deaths`` counts how often it was found gone.

    ``since`` is set from when it was found until it is known to be gone. ``gone`` says that nobody listened when it was
    asked last. ``process`` is the process that answered, if it could be found; for ``life`` and ``era`` see ``hop``.
    """

    reachable: bool = False
    since: float | None = None
    last_error: str = "not tried yet"
    deaths: int = 0
    gone: bool = False
    process: Identity | None = None
    life: int = 0
    era: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The ``backend`` object of ``status``."""
        return {
            "reachable": self.reachable,
            "reachable_since_unix_seconds": self.since if self.reachable else None,
            "last_error": self.last_error,
            "deaths": self.deaths,
            "life": f"{self.life:016x}" if self.life else None,
        }


class EndpointState:
    """The rules of modes and admission, and the table of clients.

    ``revision`` grows with every change worth saving.
    """

    def __init__(
        self,
        target: AnyTarget | None,
        *,
        purge_on_unclean: bool,
        quiesce_limit_seconds: float = 60.0,
        cluster: str = "",
    ) -> None:
        self.target = target
        self.configured_target = target
        self.epochs = Epochs(cluster)
        self.suspended = False
        self.generation = 0  # grows when links made before it must not be used any more
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

    @property
    def route(self) -> AnyTarget | None:
        """Where new links may go now; ``None`` when there is no master, or what is known of it is out of date."""
        return self.target if self.may_relay else None

    @property
    def may_relay(self) -> bool:
        """False while there is no master, or what is known of it is out of date."""
        return not (self.suspended or self.epochs.outdated)

    @property
    def link_mode(self) -> Mode:
        """What links do: the mode, or ``recover`` while they may not relay."""
        return self.mode if self.may_relay else Mode.RECOVER

    # -- the MetaService comes and goes ----------------------------------------------------------

    def backend_found(
        self, unix_seconds: float, *, process: Identity | None = None, life: int = 0, era: int = 0
    ) -> bool:
        """It answered. True when it had not done so before.

        Behind a hop ``life`` and ``era`` are what the master's endpoint says; for a MetaService of this host they are
        fresh random numbers, used when it is another one than before. One that was replaced while nobody looked has
        died.
        """
        backend = self.backend
        if backend.since is not None and self._is_another(process, life):
            self.backend_gone("another MetaService answers")
        if isinstance(self.target, PeerTarget):
            backend.life, backend.era = life, era
        else:
            if not backend.life or (
                backend.since is None and (process is None or process != backend.process)
            ):
                backend.life = life
            backend.era = backend.era or era
        backend.process = process or backend.process
        backend.gone = False
        if backend.reachable:
            return False
        if backend.since is None:
            self.revision += 1
        backend.reachable, backend.since, backend.last_error = True, unix_seconds, ""
        return True

    def _is_another(self, process: Identity | None, life: int) -> bool:
        if isinstance(self.target, PeerTarget):
            return bool(self.backend.life) and life != self.backend.life
        return process is not None and self.backend.process not in (None, process)

    def backend_silent(self, why: str) -> None:
        """It does not answer, but it was not seen to be gone: no purge, no closed door."""
        self.backend.reachable, self.backend.gone, self.backend.last_error = False, False, why

    def backend_gone(self, why: str) -> None:
        """Nobody listens at the target. The first time after it was there counts as its death."""
        was_there = self.backend.since is not None
        self.backend.reachable, self.backend.gone, self.backend.last_error = False, True, why
        if not was_there:
            return
        self.backend.since = self.backend.process = None
        self.backend.era = 0
        self.backend.deaths += 1
        self._lost_sight("the MetaService went away")

    def _lost_sight(self, what: str) -> None:
        """The MetaService that comes next may know other things than the last one did."""
        self.admission = Admission.SURVIVORS
        if self.mode is Mode.QUIESCE and self.quiesced:
            self.mode_reason = "stopped as planned"
        elif self._purge_on_unclean:
            self._set_mode(Mode.RECOVER, f"{what}, not after a quiesced stop")
        else:
            self._set_mode(Mode.SERVE, f"{what}; purge_on_unclean is false")
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

    def new_era(self, era: int) -> None:
        """All links to the MetaService are cut together."""
        self.backend.era = era

    def set_target(self, target: AnyTarget | None, epochs: Epochs | None = None) -> bool:
        """New links go there. True when the links of before must be dropped now: the master is another one.

        Args:
            target: the new one; ``None`` suspends.
            epochs: what ``Epochs.told_target`` gave for it, and was saved; ``None``: no epochs, as on a host of its own.
        """
        if epochs is not None:
            self.epochs = epochs
        self.revision += 1
        if target is None and self.epochs.told and self.target is not None:
            self.suspended = True
            self.backend_silent("no master at present")
            return False
        self.suspended = False
        if target == self.target:
            return False
        self.target = target
        self.backend = Backend(deaths=self.backend.deaths)
        if not self.epochs.told:
            return False
        self.generation += 1
        self._lost_sight(f"epoch {self.epochs.told} has another master")
        return True

    def see_epoch(self, epochs: Epochs) -> None:
        """Another endpoint knows a higher epoch (``Epochs.saw``): what was told is not to be relied upon any more."""
        self.epochs = epochs
        self.revision += 1
        if epochs.outdated:
            self.backend_silent(f"epoch {epochs.seen} has begun; here epoch {epochs.told} is known")

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
        return (self.admission is Admission.ALL or client.joined) and not client.stranded

    def joined(self, client: ClientProcess) -> None:
        """The MetaService shook hands with it."""
        if not client.joined:
            client.joined = True
            self.revision += 1

    def strand(self, client: ClientProcess) -> bool:
        """The pool does not take this process back. True when that was not known."""
        if client.stranded:
            return False
        client.stranded = True
        self.revision += 1
        return True

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
            "target": target_dict(self.target),
            "configured_target": target_dict(self.configured_target),
            "epochs": self.epochs.to_save(),
            "suspended": self.suspended,
            "backend": {
                "life": self.backend.life,
                "process": None
                if self.backend.process is None
                else [self.backend.process.pid, self.backend.process.start_ticks],
            },
            "survivors": [
                {
                    **dataclasses.asdict(c.identity),
                    "name": c.name,
                    "has_rank": c.has_rank,
                    "rank": c.rank,
                    "provider": c.provider,
                    "stranded": c.stranded,
                    "eras": [[port, era] for port, era in c.eras.items()],
                }
                for c in survivors
            ],
        }

    def restore_epochs(self, saved: dict[str, Any]) -> None:
        """Takes over only the epochs: from a state file of before a reboot, or a damaged one.

        Which master an epoch has is then for the daemon to say: there is no target until it does.
        """
        same = saved.get("configured_target") == target_dict(self.configured_target)
        self.epochs = Epochs.restore(saved.get("epochs"), self.epochs.cluster, same_configuration=same)
        if self.epochs.told:
            self.target = None

    def restore(self, saved: dict[str, Any], now: float, unix_seconds: float) -> None:
        """Takes over what ``to_save`` gave. Raises ``KeyError``, ``ValueError`` or ``TypeError`` if it is damaged.

        The restart has broken every connection, so with survivors to come back the door is closed; and if no
        MetaService is there now, it died while nobody looked.
        """
        mode, admission = Mode(saved["mode"]), Admission(saved["admission"])
        saved_target = parse_target(saved["target"])
        follows = parse_target(saved["configured_target"]) == self.configured_target
        survivors = [_Survivor.parse(value) for value in saved["survivors"][:MAX_SAVED_SURVIVORS]]
        life, process = _saved_backend(saved.get("backend"))
        self.restore_epochs(saved)
        if mode is Mode.QUIESCE:
            self.quiesce(now)
        else:
            self._set_mode(mode, str(saved["mode_reason"])[:200])
        self.quiesced = bool(saved["quiesced"]) and mode is Mode.QUIESCE
        self.admission = admission
        if follows:
            self.target = saved_target
            self.suspended = bool(saved.get("suspended")) and saved_target is not None
            self.backend.life, self.backend.process = life, process
        for survivor in survivors:
            survivor.put_into(self.clients, unix_seconds)
        if survivors:
            self.admission = Admission.SURVIVORS
        if survivors or (self.epochs.told and self.backend.life):
            self.backend.since = unix_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class _Survivor:
    """A client as the state file has it. Files from before clusters lack the later fields."""

    identity: Identity
    name: str
    has_rank: bool | None
    rank: int | None
    provider: bool
    stranded: bool
    eras: dict[int, int]

    @classmethod
    def parse(cls, value: dict[str, Any]) -> _Survivor:
        has_rank, rank = value["has_rank"], value.get("rank")
        return cls(
            Identity(int(value["pid"]), int(value["start_ticks"]), str(value["address"])),
            str(value["name"])[:64],
            has_rank if isinstance(has_rank, bool) else None,
            rank if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 else None,
            value.get("provider") is True,
            value.get("stranded") is True,
            {int(port): int(era) for port, era in value.get("eras", [])[:2]},
        )

    def put_into(self, clients: ClientTable, unix_seconds: float) -> None:
        client = clients.obtain(self.identity, self.name, unix_seconds)
        client.joined, client.has_rank, client.rank = True, self.has_rank, self.rank
        client.provider, client.stranded, client.eras = self.provider, self.stranded, dict(self.eras)


def _saved_backend(value: object) -> tuple[int, Identity | None]:
    if not isinstance(value, dict):
        return 0, None
    process = value.get("process")
    return int(value["life"]), Identity(int(process[0]), int(process[1])) if process else None
