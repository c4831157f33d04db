"""The plan as values: what one node should have. Pure data, JSON both ways.

The planner makes it, ``kvtierctl plan`` shows it, and the reconcile loop compares it with reality.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from kvtierd.plan.inventory import Record

Series = Literal["300I-A2", "800I-A2", "A3", "A5", "emulated"]
UnitKind = Literal["endpoint", "meta", "pool", "engine"]


SECRET_MARK: Final = "<secret>"  # noqa: S105 - the place of one
"""Where a file's content has this, the file on the disk has a random word that only that file knows."""


class FileSpec(Record):
    """A file that kvtierd owns: written atomically with this content and mode (octal text, e.g. ``"0640"``).

    Content with ``SECRET_MARK`` makes it a secret: the word is drawn when the file is first written and kept from then
    on, and it stands in no plan and no log. It must be the file's last word, and the mode must shut everybody else out
    (``"0600"``). ``user`` owns the file where kvtierd may give it away (as root); ``None``: kvtierd's own user.
    """

    path: str
    mode: str = Field("0644", pattern=r"^0?[0-7]{3,4}$")
    content: str
    user: str | None = None

    @property
    def secret(self) -> bool:
        """Whether the file on the disk holds a word that the plan does not."""
        return SECRET_MARK in self.content

    @property
    def private(self) -> bool:
        """Whether the mode lets nobody but the owner read it."""
        return not int(self.mode, 8) & 0o077

    @model_validator(mode="after")
    def _check_secret(self) -> Self:
        if self.secret and (self.content.count(SECRET_MARK) > 1 or self.content.split()[-1] != SECRET_MARK):
            raise ValueError(f"{self.path}: a file has one secret, and it is the last word")
        if self.secret and not self.private:
            raise ValueError(f"{self.path} holds a secret and its mode {self.mode} lets others read it")
        return self


class PortUse(Record):
    """A TCP port the plan uses, by whom and for what."""

    port: int
    address: str = "127.0.0.1"
    unit: str
    purpose: str


class HttpTls(Record):
    """For an ``https://`` address: whom to believe, what to show, and the name that the other side must have."""

    ca: str
    cert: str
    key: str
    server_name: str


class HttpProbe(Record):
    """Ready when an HTTP GET answers ``status`` and (if set) the body contains ``body_contains``.

    ``tls`` belongs to an ``https://`` address.
    """

    kind: Literal["http"] = "http"
    url: str
    status: int = 200
    tls: HttpTls | None = None
    body_contains: str | None = None


class TcpProbe(Record):
    """Ready when the port accepts a connection. Weak: use it beside a stronger probe."""

    kind: Literal["tcp"] = "tcp"
    address: str = "127.0.0.1"
    port: int


class LogProbe(Record):
    """Ready when a captured output line contains this text (since the unit's start)."""

    kind: Literal["log"] = "log"
    contains: str


Probe = HttpProbe | TcpProbe | LogProbe


class Readiness(Record):
    """When a started unit counts as ready: all probes hold, and still hold ``holdoff_seconds`` later.

    ``deadline_seconds`` is from the start; when it passes the unit is stopped and treated as failed to start.
    """

    probes: tuple[Probe, ...] = ()
    deadline_seconds: float = 30.0
    holdoff_seconds: float = 0.0
    interval_seconds: float = 0.2
    timeout_seconds: float = 2.0  # of one probe
    liveness_seconds: float | None = (
        None  # once ready: probes failing this long get the unit restarted; None = only degraded
    )
    kill_when_hung: bool = False  # such a unit has nothing to put in order: SIGKILL at once, no SIGTERM first


class RestartPolicy(Record):
    """When and how fast a unit that ended comes back.

    The n-th delay is ``min(first * factor**n, longest)``, spread by +- ``jitter`` (a fraction). After
    ``reset_after_seconds`` in ready the count starts anew. More than ``limit`` tries in a row: failed.
    ``fatal_patterns`` are texts in the last output lines, ``fatal_exit_codes`` statuses, that retrying cannot mend:
    failed at once.
    """

    first_seconds: float = 0.5
    factor: float = 2.0
    longest_seconds: float = 60.0
    jitter: float = 0.2
    limit: int = 10
    reset_after_seconds: float = 120.0
    fatal_patterns: tuple[str, ...] = ()
    fatal_exit_codes: tuple[int, ...] = ()


class StopPolicy(Record):
    """How a unit is stopped: ``signal`` to the main process, then SIGKILL to the whole tree after the time-out."""

    signal: str = "SIGTERM"
    timeout_seconds: float = 20.0


Tier = Literal["L1", "L2", "L3"]


class HttpCall(Record):
    """One request to an engine, as a value: the daemon makes it, with a deadline.

    ``bearer_file`` is the absolute path of a file whose last word goes along as ``Authorization: Bearer WORD``. It is
    read when the request is made; the word itself is in no value. ``needs_idle``: the engine must have no request
    running or waiting, so whoever makes the call waits for that first.
    """

    method: Literal["GET", "POST", "PUT", "DELETE"] = "POST"
    path: str
    body: dict[str, Any] | None = None
    ok: tuple[int, ...] = (200,)
    bearer_file: str | None = None
    needs_idle: bool = False


class EngineTalk(Record):
    """How the daemon speaks with an engine: its address, the proof that it generates, and how each tier is emptied.

    ``base_url`` ``None``: it serves no HTTP (the headless part of an engine that spans hosts). ``l3_detach`` and
    ``l3_attach`` take L3 off and on while it runs; both are empty when it cannot, and ``l3_fixed`` then says why.
    ``flush`` has the tiers that it can empty, joined by +; ``no_flush`` says of the others why not.
    """

    base_url: str | None = None
    generation: HttpCall | None = None
    flush: dict[str, tuple[HttpCall, ...]] = Field(default_factory=dict)
    no_flush: dict[str, str] = Field(default_factory=dict)
    l3_detach: tuple[HttpCall, ...] = ()
    l3_attach: tuple[HttpCall, ...] = ()
    l3_fixed: str = ""


class Resources(Record):
    """What the host gives a unit. Empty means: no limit, the kernel's choice.

    ``cpus`` is a list in the kernel's form ("0-23,96-119"). ``memory_max_bytes`` needs a control group: units of
    systemd and containers have one, those of a shim do not.
    """

    cpus: str = ""
    nice: int = 0
    memory_max_bytes: int | None = None


NO_RESOURCES = Resources()


class UnitSpec(Record):
    """A supervised process, complete: nothing else is needed to start it.

    ``id`` is ``kvtier-<kind>-<name>``. ``env`` is the whole environment: nothing is inherited.
    ``namespace`` is the emulation root whose private mounts the unit enters, or ``None``.
    ``after`` names units that must be ready first. ``files`` are the paths of plan files the unit reads;
    their content is part of ``digest`` only when ``restart_on_files`` says so. ``secret_files`` are those of them
    whose last word must not show in the unit's captured output.
    """

    id: str
    kind: UnitKind
    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    cwd: str = "/"
    devices: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    files_digest: str = ""
    secret_files: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    namespace: str | None = None
    readiness: Readiness = Readiness()
    restart: RestartPolicy = RestartPolicy()
    stop: StopPolicy = StopPolicy()
    plugin: str | None = None  # engines: the driver's name
    metrics_url: str | None = None  # engines: where their Prometheus metrics are
    talk: EngineTalk | None = None  # engines: how the daemon speaks with them
    group: str | None = None  # engines: those that can stand in for each other
    uses_pool: bool = False  # engines: L3 is the pool
    l2_bytes: int | None = None  # engines: host memory of their own that L2 takes
    blocked: str | None = None  # why it must not be started as things are (a held card)
    resources: Resources = NO_RESOURCES
    guard_file: str | None = (
        None  # says until when it may run; past that it is killed, without the daemon's help
    )

    @property
    def digest(self) -> str:
        """Changes exactly when a running process no longer matches the specification."""
        relevant = self.model_dump(
            include={"id", "argv", "env", "user", "cwd", "devices", "namespace", "files_digest"}, mode="json"
        )
        if self.resources != NO_RESOURCES:  # what runs without any stays what it was
            relevant["resources"] = self.resources.model_dump()
        if self.guard_file is not None:
            relevant["guard_file"] = self.guard_file
        return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


class HugepagePlan(Record):
    """Pages to reserve. ``pages`` 0 means that the plan needs none."""

    page_size_bytes: int = 2 * 1024 * 1024
    pages: int = 0
    per_numa_node: dict[int, int] = Field(default_factory=dict)


class PoolPlan(Record):
    """What the pool of this node should look like to the MetaService."""

    placement: Literal["standalone", "engine"] = "engine"
    protocol: str = ""
    budget_bytes: int = 0  # what the settings gave
    capacity_bytes: int = 0  # what is left after alignment: the sum over this node's providers
    providers: int = 0  # ranks that bring memory
    clients: int = 0  # ranks that bring none
    dram_bytes_per_provider: int = 0
    alignment_bytes: int = 0
    world_size: int = 0
    added_bytes: int = 0  # of holders that kvtierd has added by itself, beside the capacity


class Note(Record):
    """Something the operator should know about the plan; ``code`` is stable."""

    code: str
    message: str


class Refusal(Record):
    """A reason why this plan must not be applied, and what to do about it."""

    code: str
    message: str
    hint: str = ""


class MetaAddress(Record):
    """Where things listen: ``client_*`` is what engines are told, ``server_*`` what the MetaService binds."""

    client_meta_url: str
    client_config_store_url: str
    server_meta_url: str
    server_config_store_url: str
    metrics_url: str


Means = Literal["conf", "alias", "restart"]


class DirectClient(Record):
    """How one client of the pool comes to another master without an endpoint (``kvtierd.plan.direct``), and why so."""

    unit: str
    means: Means
    why: str


class DirectPlan(Record):
    """A node of a cluster whose clients talk to the master's MetaService themselves.

    ``alias`` is the host name that stands for the master, "" where nobody uses one. ``master`` is the node that the
    files of this plan point to, ``addresses`` those of all nodes that may become it.
    """

    alias: str = ""
    master: str
    addresses: dict[str, str]
    port: int
    config_store_port: int
    clients: tuple[DirectClient, ...] = ()


class MemcacheTls(Record):
    """MemCache's own TLS. Its files are copies in ``directory``, made for ``user`` alone; no key is in the plan."""

    directory: str
    ca: str
    cert: str
    key: str
    openssl: str | None = None
    user: str | None = None
    http: HttpTls | None = None  # how kvtierd asks the MetaService; None: its HTTP service has no TLS


class NodePlan(Record):
    """Everything one node should have, and what the operator should know about it."""

    node: str
    master: str = ""  # the node that runs the MetaService
    series: Series
    emulated: bool = False
    memcache_version: str = ""
    hugepages: HugepagePlan = HugepagePlan()
    pool: PoolPlan = PoolPlan()
    meta: MetaAddress | None = None
    files: tuple[FileSpec, ...] = ()
    units: tuple[UnitSpec, ...] = ()
    ports: tuple[PortUse, ...] = ()
    notes: tuple[Note, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    direct: DirectPlan | None = None  # only in a cluster without endpoints
    tls: MemcacheTls | None = None
    dies: int = 0  # of this node's NPUs
    left_out: dict[str, str] = Field(default_factory=dict)  # engines of this node that are not planned -> why

    def unit(self, unit_id: str) -> UnitSpec | None:
        """The specification with this id, if the plan has it."""
        return next((u for u in self.units if u.id == unit_id), None)
