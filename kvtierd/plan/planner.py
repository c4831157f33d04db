"""settings + inventory -> NodePlan. Pure: the same values give the same plan, anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from kvtierd.plan.addresses import plan_addresses
from kvtierd.plan.adjustments import NOTHING, Adjustments, check_holders
from kvtierd.plan.cluster_check import check_cluster
from kvtierd.plan.devices import check_devices, held_card
from kvtierd.plan.digest import with_files_digest
from kvtierd.plan.direct import (
    alias_name,
    check_direct,
    is_direct_cluster,
    plan_direct,
    uses_alias,
)
from kvtierd.plan.docker import IMAGE_CANN_HOME
from kvtierd.plan.engine import EngineContext, EngineDriver
from kvtierd.plan.engines import PlannedEngine, ask_driver, engine_unit, find_driver
from kvtierd.plan.environment import find_install, memcache_env, merge_env
from kvtierd.plan.inventory import Inventory, MemcacheInstall
from kvtierd.plan.memcache_files import MemcacheConf
from kvtierd.plan.model import (
    DirectPlan,
    MemcacheTls,
    MetaAddress,
    NodePlan,
    PoolPlan,
    Series,
    UnitSpec,
)
from kvtierd.plan.place import memcache_place
from kvtierd.plan.pool import check_memory, plan_hugepages, plan_pool
from kvtierd.plan.ports import PortPlan
from kvtierd.plan.remarks import Remarks
from kvtierd.plan.resources import engine_resources
from kvtierd.plan.series import detect_series
from kvtierd.plan.tls import plan_tls
from kvtierd.plan.toolchain import Toolchain
from kvtierd.plan.units import (
    ENDPOINT_ID,
    LEASE_FILE,
    META_ID,
    endpoint_unit,
    engine_id,
    meta_unit,
    pool_id,
    pool_unit,
)
from kvtierd.settings import EngineSettings, Settings


def make_plan(
    settings: Settings,
    inventory: Inventory,
    drivers: Mapping[str, EngineDriver],
    toolchain: Toolchain,
    *,
    node: str | None = None,
    owned_pids: AbstractSet[int] = frozenset(),
    owned_pages: int = 0,
    master: str | None = None,
    adjustments: Adjustments = NOTHING,
) -> NodePlan:
    """The plan of one node.

    Args:
        settings: validated settings.
        inventory: what the host has.
        drivers: engine drivers by name.
        toolchain: where kvtierd's own programs are.
        node: plan for this node of the cluster, instead of finding it by name and address.
        owned_pids: processes of running units, whose ports are not "taken by somebody".
        owned_pages: hugepages that kvtierd itself reserved earlier (from its ledger).
        master: the node that is the master now; default: the one the settings name. It makes a difference only to the
            addresses of clients without an endpoint: every node that may become the master has the MetaService in its plan.
        adjustments: what kvtierd's own actions have changed beside the settings.

    Returns:
        The plan. What must not be applied is in ``refusals``; this function does not raise for it.
    """
    given = (settings, inventory, drivers, toolchain, node, owned_pids, owned_pages, master, adjustments)
    planner = _Planner(*given)
    plan = planner.plan()
    if planner.clients_differ:
        # Drivers say how many MemCache clients an engine opens only with its launch, and the launch needs the pool.
        # They are pure, so they are simply asked again.
        second = _Planner(*given)
        second.clients = planner.clients
        plan = second.plan()
    return plan


class _Planner:
    def __init__(
        self,
        settings: Settings,
        inventory: Inventory,
        drivers: Mapping[str, EngineDriver],
        toolchain: Toolchain,
        node: str | None,
        owned_pids: AbstractSet[int],
        owned_pages: int,
        master: str | None,
        adjustments: Adjustments,
    ) -> None:
        self.settings = settings
        self.adjustments = adjustments
        self.inventory = inventory
        self.drivers = drivers
        self.owned_pages = owned_pages
        self.owned_pids = owned_pids
        self.remarks = Remarks()
        self.node = self._node_name(node)
        self.series = self._series()
        self.emulated = self.series == "emulated"
        self.toolchain = toolchain if self.emulated else toolchain.model_copy(update={"emulation": None})
        self.ports = PortPlan(inventory, self.remarks, owned_pids=owned_pids)
        self.alone = settings.cluster.mode == "standalone"
        self.master = self.node if self.alone else master or settings.cluster.master or ""
        # In a cluster any node can become the master.
        self.has_meta = settings.meta.endpoint == "relay" or self.alone or is_direct_cluster(settings)
        self.install = find_install(settings.meta, inventory)
        self.boxed = settings.meta.runner == "docker"
        self.python = (
            (None if self.boxed else settings.meta.python)
            or (self.install.python if self.install else None)
            or toolchain.python
        )
        self.version = self._memcache_version()
        self.conf_dir = f"{settings.paths.state}/conf"
        self.left_out: dict[str, str] = {}
        self.clients: dict[str, int] = {}  # engine -> MemCache clients, where the driver has said so
        self.clients_differ = False

    # -- who and what we are

    def _node_name(self, wanted: str | None) -> str:
        peers = self.settings.cluster.peers
        name = wanted or self.settings.node.name or self._by_address() or self.inventory.hostname
        if peers and name not in {p.name for p in peers}:
            self.remarks.refuse(
                "cluster.not-a-peer",
                f"this node ({name}) is not among the peers: {', '.join(p.name for p in peers)}",
                "add it to [cluster] peers, or write [node] name",
            )
        return name

    def _by_address(self) -> str | None:
        mine = {address for nic in self.inventory.nics for address in nic.addresses}
        if self.settings.node.address:
            mine.add(self.settings.node.address)
        return next((p.name for p in self.settings.cluster.peers if p.address in mine), None)

    def _series(self) -> Series:
        if self.settings.node.series != "auto":
            return self.settings.node.series
        guess = detect_series(self.inventory.npus)
        if guess.series is None:
            self.remarks.refuse(
                "plan.series",
                f"the hardware series is not known: {guess.note}",
                '[node] series = "300I-A2" | "800I-A2" | "A3" | "A5", or "emulated" on a machine without NPUs',
            )
            return "800I-A2"  # only so that the rest of the plan can be shown beside the refusal
        if guess.note:
            self.remarks.note("plan.series", guess.note)
        return guess.series

    def _memcache_version(self) -> str:
        meta = self.settings.meta
        if meta.version:
            return meta.version
        if self.boxed:
            self.remarks.refuse(
                "memcache.image-version",
                f"the MemCache version in the image {meta.image} is not known: kvtierd does not look into images",
                'write it: [meta] version = "1.3.0"; the image says it with: pip show memcache-hybrid',
            )
            return ""
        if self.install is not None and self.install.memcache_version:
            if self.install.problem:
                self.remarks.note("memcache.problem", self.install.problem)
            return self.install.memcache_version
        where = f"in {self.python}" if meta.runtime == "wheel" else f"at {meta.home}"
        why = f": {self.install.problem}" if self.install and self.install.problem else ""
        self.remarks.refuse(
            "memcache.missing",
            f"MemCache was not found {where}{why}",
            f"{self.python} -m pip install memcache-hybrid; or name its interpreter: [meta] python"
            if meta.runtime == "wheel"
            else "install the run package, or write [meta] home",
        )
        return ""

    # -- the plan

    def plan(self) -> NodePlan:
        engines = [e for e in self.settings.engine if not e.nodes or self.node in e.nodes]
        check_devices(engines, self.inventory, self.remarks, emulated=self.emulated)
        ranks = self._engine_ranks(engines)
        nodes = max(1, len(self.settings.cluster.nodes))
        pool = plan_pool(
            self.settings.pool,
            self.series,
            engine_ranks=ranks,
            nodes=nodes,
            remarks=self.remarks,
            spare_ranks=max(0, sum(map(_one_a_device, engines)) - ranks),
            growth=self.settings.policy.grow_holders,
        )
        dies = None if self.emulated else len(self.inventory.npus)
        added = check_holders(self.adjustments.holders, pool, dies, self.remarks)
        self.adjustments = self.adjustments.model_copy(update={"holders": added})
        pool = pool.model_copy(update={"added_bytes": self.adjustments.added_bytes})
        hugepages = plan_hugepages(self.settings.pool, self.series, pool, self.inventory, self.remarks)
        check_memory(
            self.settings.pool, pool, hugepages, self.inventory, self.remarks, owned_pages=self.owned_pages
        )
        check_cluster(self.settings, self.node, self.remarks)
        check_direct(self.settings, self.version, self.remarks)
        tls = plan_tls(self.settings, self.version, self.node)
        address = plan_addresses(
            self.settings,
            self.ports,
            pool,
            scheme="http" if tls is None or tls.http is None else "https",
            has_meta=self.has_meta,
            node=self.node,
            master=self._pointed(),
            alias=alias_name(self.settings.cluster.name) if uses_alias(self.settings, self.version) else "",
            engine_ports=self._engine_ports(engines),
        )
        memcache = MemcacheConf(
            self.settings,
            address,
            pool,
            self.conf_dir,
            self.node,
            self.master,
            self._pointed(),
            tls,
            self.version,
            self.adjustments,
        )
        files = memcache.files(self.version, self.remarks, a3=self.series == "A3", has_meta=self.has_meta)
        env = memcache_env(self.toolchain, self.series, pool.protocol, self.inventory, self.install)
        units = self._own_units(address, pool, tls, hugepages=hugepages.pages > 0)
        follow: dict[str, bool] = {}  # engine that uses the pool -> whether a change of its file reaches it
        for planned in self._engines(engines, memcache, env):
            after = tuple(pool_id(i) for i in range(pool.providers)) if pool.placement == "standalone" else ()
            units.append(
                engine_unit(
                    planned,
                    self.toolchain,
                    after or self._after_meta(),
                    directories=(self.conf_dir, planned.context.work_dir),
                    blocked=held_card(planned.settings, self.inventory, self.owned_pids),
                    resources=engine_resources(planned.settings, self.inventory, self.remarks),
                )
            )
            files += planned.launch.files
            if planned.launch.clients != 0:
                follow[units[-1].id] = planned.launch.follows_conf
        direct = plan_direct(self.settings, self.version, self._pointed(), units, follow)
        self._tell_of_direct(direct)
        if self.emulated:
            self.remarks.note(
                "emulated", "EMULATED: the Ascend driver is a stand-in; for development and tests only"
            )
        return NodePlan(
            node=self.node,
            master=self.master,
            series=self.series,
            emulated=self.emulated,
            memcache_version=self.version,
            hugepages=hugepages,
            pool=pool,
            meta=address,
            files=tuple(files),
            units=tuple(with_files_digest(unit, files, self.version, direct) for unit in units),
            ports=self.ports.uses,
            notes=tuple(self.remarks.notes),
            refusals=tuple(self.remarks.refusals),
            direct=direct,
            tls=tls,
            dies=len(self.inventory.npus),
            left_out=self.left_out,
        )

    def _pointed(self) -> str:
        """The node that clients' addresses name. While no master is known, any will do: nobody starts before it is."""
        if is_direct_cluster(self.settings):
            names = [p.name for p in self.settings.cluster.nodes]
            return self.master if self.master in names else names[0]
        return self.master

    def _tell_of_direct(self, direct: DirectPlan | None) -> None:
        if direct is None:
            return
        if direct.alias:
            self.remarks.note(
                "direct.alias",
                f"a line of kvtierd's in /etc/hosts will lead {direct.alias} to the master; kvtierd must be able to write"
                " that file",
            )
        for client in direct.clients:
            if client.means == "restart":
                self.remarks.note(
                    "direct.restart", f"{client.unit} is restarted with every change of master: {client.why}"
                )

    def _engine_ports(self, engines: list[EngineSettings]) -> set[int]:
        """Those that the settings name, and the drivers' defaults for the others."""
        wanted = ((e.port, self.drivers.get(e.plugin)) for e in engines)
        return {
            port for named, driver in wanted if (port := named or (driver.default_port if driver else None))
        }

    def _engine_ranks(self, engines: list[EngineSettings]) -> int:
        """What the drivers said; till then one rank a device, and one for an engine without. No engine: every die."""
        if engines:
            return sum(self.clients.get(e.name, _one_a_device(e)) for e in engines)
        return len(self.inventory.npus)

    def _after_meta(self) -> tuple[str, ...]:
        """What must be there before a client of the pool starts, where that is on this host."""
        if is_direct_cluster(self.settings):
            return ()  # the daemon knows whether the master's MetaService is there
        if self.settings.meta.endpoint == "relay" and not self.alone:
            return (ENDPOINT_ID,)  # which knows whether the master's MetaService is there
        return (META_ID,) if self.has_meta else ()

    # -- units

    def _own_units(
        self, address: MetaAddress, pool: PoolPlan, tls: MemcacheTls | None, *, hugepages: bool
    ) -> list[UnitSpec]:
        units: list[UnitSpec] = []
        place = memcache_place(
            self.settings.meta, self.inventory, self.toolchain, series=self.series, protocol=pool.protocol,
            install=self.install, python=self.python,
            directories=(self.conf_dir, f"{self.settings.paths.logs}/memcache"),
        )  # fmt: skip
        if self.settings.meta.endpoint == "relay":
            units.append(endpoint_unit(self.toolchain, address, f"{self.conf_dir}/endpoint.json"))
        if self.has_meta:
            elected = self.settings.cluster.mode in {"lease", "etcd"}
            units.append(
                meta_unit(
                    self.toolchain, address, place=place, conf_path=f"{self.conf_dir}/mmc-meta.conf",
                    guard_file=f"{self.settings.paths.runtime}/{LEASE_FILE}" if elected else None,
                    tls=tls.http if tls is not None else None,
                )
            )  # fmt: skip
        if pool.placement == "standalone":
            if place.container is not None and not self.emulated:
                self.remarks.note(
                    "memcache.image-cann",
                    f"pool holders look for CANN in {IMAGE_CANN_HOME} of {place.container.image},"
                    " as engines in containers do; the driver's libraries are the host's",
                )
            holders = [(str(i), i, "mmc-local-pool.conf") for i in range(pool.providers)]
            holders += [
                (h.name, pool.providers + h.index, f"mmc-local-{h.name}.conf")
                for h in self.adjustments.holders
            ]
            units += [
                pool_unit(
                    self.toolchain, die, place=place, conf_path=f"{self.conf_dir}/{file}", name=name,
                    emulated=self.emulated, hugepages=hugepages, after=self._after_meta(), tls=tls is not None,
                )
                for name, die, file in holders
            ]  # fmt: skip
        return units

    def _engine_version(self, driver: EngineDriver, engine: EngineSettings) -> str | None:
        """As installed in the engine's interpreter; an image's is not known."""
        if engine.runner == "docker":
            return None
        python = self._engine_python(engine)
        return _version_in(self.inventory.install_in(python), driver.package)

    def _engine_python(self, engine: EngineSettings) -> str:
        """Its own, else [meta] python where that is one of the same kind of place, else the host's."""
        named = self.settings.meta.python if engine.runner == "docker" or not self.boxed else None
        return engine.python or named or self.python

    def _nic_of_this_node(self) -> str | None:
        """The interface that carries this node's address among the peers."""
        peers = {p.name: p.address for p in self.settings.cluster.peers}
        address = peers.get(self.node) or self.settings.node.address
        return next((n.name for n in self.inventory.nics if address in n.addresses), None)

    def _leave_out(self, engine: EngineSettings) -> None:
        """Its reason is the newest note."""
        self.left_out[engine.name] = self.remarks.notes[-1].message

    def _engines(
        self, engines: list[EngineSettings], memcache: MemcacheConf, env: dict[str, str]
    ) -> list[PlannedEngine]:
        planned: list[PlannedEngine] = []
        peers = self.settings.cluster.peers
        for index, engine in enumerate(engines):
            nodes = engine.nodes or tuple(p.name for p in peers) or (self.node,)
            driver = find_driver(engine, self.drivers, self.remarks)
            if driver is None:
                self._leave_out(engine)
                continue
            unit = engine_id(engine.name)
            context = EngineContext(
                name=engine.name,
                node=self.node,
                series=self.series,
                model=engine.model,
                devices=engine.devices,
                host=engine.host,
                port=engine.port or driver.default_port,
                python=self._engine_python(engine),
                args=engine.args,
                env=engine.env,
                memcache_env=merge_env(self.toolchain.base_env, env),
                local_conf_path=memcache.engine_path,
                local_conf=memcache.engine,
                meta_conf=memcache.meta,
                meta_service_url=memcache.address.client_meta_url,
                config_store_url=memcache.address.client_config_store_url,
                pool_placement=memcache.pool.placement,
                pool=memcache.pool,
                work_dir=f"{self.settings.paths.state}/engines/{engine.name}",
                inventory=self.inventory,
                version=engine.version or self._engine_version(driver, engine),
                index=index,
                nodes=nodes,
                node_index=nodes.index(self.node) if self.node in nodes else 0,
                addresses={p.name: p.address for p in peers},
                nic=self.settings.node.nic or self._nic_of_this_node(),
                role=engine.role,
                l2_bytes=engine.l2,
                runner=engine.runner,
                l3_switch=engine.l3_switch,
            )
            answer = ask_driver(driver, engine, context, self.remarks)
            if answer is None:
                self._leave_out(engine)
                continue
            opens = _one_a_device(engine) if answer.launch.clients is None else answer.launch.clients
            self.clients_differ |= opens != self.clients.get(engine.name, _one_a_device(engine))
            self.clients[engine.name] = opens
            if answer.launch.serves_http:
                self.ports.claim(
                    context.port,
                    unit,
                    "HTTP API",
                    address=engine.host,
                    setting=f"[[engine]] {engine.name}: port",
                )
            for purpose, extra in answer.launch.extra_ports.items():
                self.ports.claim(extra, unit, purpose)
            planned.append(answer)
        return planned


def _one_a_device(engine: EngineSettings) -> int:
    return len(engine.devices) or 1


def _version_in(install: MemcacheInstall | None, package: str | None) -> str | None:
    return install.packages.get(package) if install is not None and package else None
