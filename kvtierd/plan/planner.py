"""settings + inventory -> NodePlan. Pure: the same values give the same plan, anywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.lookup import find_key
from kvtierd.mmc_conf.model import LocalConf, MetaConf
from kvtierd.mmc_conf.render import render_local, render_meta
from kvtierd.mmc_conf.versions import resolve_version
from kvtierd.plan.engine import EngineContext, EngineDriver
from kvtierd.plan.engines import PlannedEngine, ask_driver, engine_unit, find_driver
from kvtierd.plan.environment import find_install, memcache_env, merge_env
from kvtierd.plan.hardware import uses_hcom
from kvtierd.plan.inventory import Inventory, MemcacheInstall
from kvtierd.plan.model import FileSpec, MetaAddress, NodePlan, PoolPlan, Series, UnitSpec
from kvtierd.plan.pool import check_memory, plan_hugepages, plan_pool
from kvtierd.plan.ports import PortPlan
from kvtierd.plan.remarks import Remarks
from kvtierd.plan.series import detect_series
from kvtierd.plan.toolchain import Toolchain
from kvtierd.plan.units import ENDPOINT_ID, META_ID, endpoint_unit, engine_id, meta_unit, pool_id, pool_unit
from kvtierd.settings import EngineSettings, Settings

LOOPBACK = "127.0.0.1"
DEFAULT_METRICS_PORT = 8000


def make_plan(
    settings: Settings,
    inventory: Inventory,
    drivers: Mapping[str, EngineDriver],
    toolchain: Toolchain,
    *,
    node: str | None = None,
    owned_pids: AbstractSet[int] = frozenset(),
    owned_pages: int = 0,
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

    Returns:
        The plan. What must not be applied is in ``refusals``; this function does not raise for it.
    """
    return _Planner(settings, inventory, drivers, toolchain, node, owned_pids, owned_pages).plan()


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
    ) -> None:
        self.settings = settings
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
        self.is_master = settings.cluster.mode == "standalone" or settings.cluster.master == self.node
        self.install = find_install(settings.meta, inventory)
        self.python = (
            settings.meta.python or (self.install.python if self.install else None) or toolchain.python
        )
        self.version = self._memcache_version()
        self.conf_dir = f"{settings.paths.state}/conf"

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
        ranks = self._engine_ranks(engines)
        nodes = max(1, len(self.settings.cluster.peers))
        pool = plan_pool(
            self.settings.pool, self.series, engine_ranks=ranks, nodes=nodes, remarks=self.remarks
        )
        hugepages = plan_hugepages(self.settings.pool, self.series, pool, self.inventory, self.remarks)
        check_memory(
            self.settings.pool, pool, hugepages, self.inventory, self.remarks, owned_pages=self.owned_pages
        )
        self._check_cluster()
        address = self._addresses(engines, pool)
        files = self._conf_files(address, pool)
        env = memcache_env(self.toolchain, self.series, pool.protocol, self.inventory, self.install)
        units = self._own_units(address, pool, env)
        for planned in self._engines(engines, address, pool, env):
            after = tuple(pool_id(i) for i in range(pool.providers)) if pool.placement == "standalone" else ()
            units.append(
                engine_unit(
                    planned,
                    self.toolchain,
                    after or ((META_ID,) if self.is_master else ()),
                    directories=(self.conf_dir, planned.context.work_dir),
                    blocked=self._held_card(planned.settings),
                )
            )
            files += planned.launch.files
        if self.emulated:
            self.remarks.note(
                "emulated", "EMULATED: the Ascend driver is a stand-in; for development and tests only"
            )
        return NodePlan(
            node=self.node,
            master=self.settings.cluster.master or self.node,
            series=self.series,
            emulated=self.emulated,
            memcache_version=self.version,
            hugepages=hugepages,
            pool=pool,
            meta=address,
            files=tuple(files),
            units=tuple(_with_files_digest(unit, files, self.version) for unit in units),
            ports=self.ports.uses,
            notes=tuple(self.remarks.notes),
            refusals=tuple(self.remarks.refusals),
        )

    def _engine_ranks(self, engines: list[EngineSettings]) -> int:
        """One rank a device; an engine without devices counts one; no engine at all: every die."""
        devices = [d for e in engines for d in e.devices]
        doubled = sorted({d for d in devices if devices.count(d) > 1})
        if doubled:
            users = ", ".join(e.name for e in engines if doubled[0] in e.devices)
            self.remarks.refuse(
                "engine.device-shared", f"device {doubled[0]} is given to several engines: {users}"
            )
        known = {npu.device for npu in self.inventory.npus}
        absent = sorted(set(devices) - known)
        if absent and not self.emulated:
            self.remarks.refuse(
                "engine.no-device",
                f"device {absent[0]} does not exist on this host (it has {_span(known)})",
                "correct the engine's devices",
            )
        if engines:
            return sum(len(e.devices) or 1 for e in engines)
        return len(self.inventory.npus)

    def _check_cluster(self) -> None:
        cluster, meta = self.settings.cluster, self.settings.meta
        if cluster.mode == "static" and meta.endpoint == "relay":
            self.remarks.refuse(
                "cluster.relay-needs-tls",
                "several nodes over the relaying endpoint need mutual TLS between nodes, which this version does not have",
                'write [meta] endpoint = "direct"',
            )

    # -- addresses and ports

    def _addresses(self, engines: list[EngineSettings], pool: PoolPlan) -> MetaAddress:
        meta = self.settings.meta
        relay = meta.endpoint == "relay"
        bind = LOOPBACK if relay or self.settings.cluster.mode == "standalone" else self._master_address()
        owner = ENDPOINT_ID if relay else META_ID
        written = {p for p in (meta.metrics_port, meta.backend_port, meta.backend_config_store_port) if p}
        written |= {p for e in engines if (p := e.port or self._default_port(e))}
        if relay or self.is_master:
            self.ports.claim(meta.port, owner, "MetaService for engines", address=bind, setting="[meta] port")
            self.ports.claim(
                meta.config_store_port, owner, "config store for engines", address=bind,
                setting="[meta] config_store_port",
            )  # fmt: skip
        written |= {meta.port, meta.config_store_port, *self._hcom_ports(pool)}
        server_port, server_store_port = meta.port, meta.config_store_port
        metrics_port = meta.metrics_port or DEFAULT_METRICS_PORT
        if self.is_master:
            if relay:
                server_port = self._backend(meta.backend_port, meta.port, "MetaService behind the endpoint",
                                            "[meta] backend_port", written)  # fmt: skip
                server_store_port = self._backend(
                    meta.backend_config_store_port, meta.config_store_port, "config store behind the endpoint",
                    "[meta] backend_config_store_port", written,
                )  # fmt: skip
            if meta.metrics_port:
                self.ports.claim(metrics_port, META_ID, "MetaService HTTP", setting="[meta] metrics_port")
            else:
                metrics_port = self.ports.claim_default(
                    metrics_port, META_ID, "MetaService HTTP", setting="[meta] metrics_port", avoid=written
                )
        for port in self._hcom_ports(pool):
            self.ports.claim(port, "pool", "links between ranks", setting="[meta] hcom_port")
        return MetaAddress(
            client_meta_url=f"tcp://{bind}:{meta.port}",
            client_config_store_url=f"tcp://{bind}:{meta.config_store_port}",
            server_meta_url=f"tcp://{bind}:{server_port}",
            server_config_store_url=f"tcp://{bind}:{server_store_port}",
            metrics_url=f"http://{LOOPBACK}:{metrics_port}",
        )

    def _backend(self, wanted: int | None, beside: int, purpose: str, setting: str, written: set[int]) -> int:
        if wanted:
            return self.ports.claim(wanted, META_ID, purpose, setting=setting)
        return self.ports.claim_default(beside + 1, META_ID, purpose, setting=setting, avoid=written)

    def _hcom_ports(self, pool: PoolPlan) -> range:
        if not uses_hcom(pool.protocol):
            return range(0)
        first = self.settings.meta.hcom_port
        return range(first, first + pool.providers + pool.clients)

    def _master_address(self) -> str:
        cluster = self.settings.cluster
        return next((p.address for p in cluster.peers if p.name == cluster.master), LOOPBACK)

    def _default_port(self, engine: EngineSettings) -> int | None:
        driver = self.drivers.get(engine.plugin)
        return driver.default_port if driver else None

    # -- files

    def _conf_files(self, address: MetaAddress, pool: PoolPlan) -> list[FileSpec]:
        meta, settings_pool = self.settings.meta, self.settings.pool
        files: list[FileSpec] = []
        if self.settings.meta.endpoint == "relay":
            files.append(
                FileSpec(path=f"{self.conf_dir}/endpoint.json", content=self._endpoint_config(address))
            )
        if not self.version:
            return files
        a3 = self.series == "A3"
        try:
            if self.is_master:
                conf = MetaConf(
                    meta_service_url=address.server_meta_url,
                    config_store_url=address.server_config_store_url,
                    metrics_url=address.metrics_url,
                    log_level=meta.log_level,
                    log_path=f"{self.settings.paths.logs}/memcache",
                    evict_threshold_high=settings_pool.evict_high,
                    evict_threshold_low=settings_pool.evict_low,
                    lease_ttl_ms=round(meta.lease_ttl * 1000),
                    extra=meta.conf,
                )
                files.append(self._rendered("mmc-meta.conf", render_meta(conf, self.version)))
            provider = self._local_conf(address, pool, dram_bytes=pool.dram_bytes_per_provider)
            client = self._local_conf(address, pool, dram_bytes=0)
            if pool.placement == "standalone":
                files.append(
                    self._rendered("mmc-local-pool.conf", render_local(provider, self.version, a3=a3))
                )
                files.append(self._rendered("mmc-local.conf", render_local(client, self.version, a3=a3)))
            else:
                files.append(self._rendered("mmc-local.conf", render_local(provider, self.version, a3=a3)))
            if self.is_master:
                # kvtierd's own client (purge) goes past the endpoint, which withholds everything meanwhile.
                own = client.model_copy(
                    update={
                        "meta_service_url": address.server_meta_url,
                        "config_store_url": address.server_config_store_url,
                    }
                )
                files.append(self._rendered("mmc-local-admin.conf", render_local(own, self.version, a3=a3)))
        except ConfError as error:
            self.remarks.refuse(error.stable_code, error.message, error.hint)
        return files

    def _hcom_address(self) -> str:
        """The address in hcom_url: in a cluster the master's, on every node the same, as the practice guide has it."""
        if self.settings.cluster.mode == "standalone":
            return self.settings.node.address or LOOPBACK
        return self._master_address()

    def _rendered(self, name: str, content: str) -> FileSpec:
        return FileSpec(path=f"{self.conf_dir}/{name}", content=content)

    def _local_conf(self, address: MetaAddress, pool: PoolPlan, *, dram_bytes: int) -> LocalConf:
        return LocalConf(
            meta_service_url=address.client_meta_url,
            config_store_url=address.client_config_store_url,
            world_size=pool.world_size,
            protocol=pool.protocol,
            hcom_url=f"tcp://{self._hcom_address()}:{self.settings.meta.hcom_port}",
            dram_size_bytes=dram_bytes,
            max_dram_size_bytes=pool.dram_bytes_per_provider,
            log_level=self.settings.meta.log_level,
            extra=self.settings.meta.local_conf,
        )

    def _endpoint_config(self, address: MetaAddress) -> str:
        config: dict[str, Any] = {
            "listen": {
                "meta": address.client_meta_url.removeprefix("tcp://"),
                "config_store": address.client_config_store_url.removeprefix("tcp://"),
            },
            "target": {
                "meta": address.server_meta_url.removeprefix("tcp://"),
                "config_store": address.server_config_store_url.removeprefix("tcp://"),
            },
            "control_socket": f"{self.settings.paths.runtime}/endpoint.sock",
            "state_file": f"{self.settings.paths.runtime}/endpoint-state.json",
            "purge_on_unclean": self.settings.pool.purge_on_unclean,
        }
        return json.dumps(config, indent=2) + "\n"

    # -- units

    def _own_units(self, address: MetaAddress, pool: PoolPlan, env: dict[str, str]) -> list[UnitSpec]:
        units: list[UnitSpec] = []
        if self.settings.meta.endpoint == "relay":
            units.append(endpoint_unit(self.toolchain, address, f"{self.conf_dir}/endpoint.json"))
        if self.is_master:
            units.append(
                meta_unit(
                    self.toolchain, address, install=self._binary(), python=self.python,
                    machine=self.inventory.machine, conf_path=f"{self.conf_dir}/mmc-meta.conf", env=env,
                    user=self.settings.meta.user,
                )
            )  # fmt: skip
        if pool.placement == "standalone":
            units += [
                pool_unit(
                    self.toolchain, index, pool, python=self.python, env=env, user=self.settings.meta.user,
                    conf_path=f"{self.conf_dir}/mmc-local-pool.conf", emulated=self.emulated,
                    after=(META_ID,) if self.is_master else (),
                )
                for index in range(pool.providers)
            ]  # fmt: skip
        return units

    def _binary(self) -> MemcacheInstall | None:
        if self.settings.meta.runtime != "binary":
            return None
        return self.install or MemcacheInstall(runtime="binary", home=self.settings.meta.home)

    def _held_card(self, engine: EngineSettings) -> str | None:
        """A process of somebody else on one of the engine's cards: it would fail minutes later for want of memory."""
        places = {(n.card, n.chip): n.device for n in self.inventory.npus if n.device in engine.devices}
        for process in self.inventory.npu_processes:
            device = places.get((process.card, process.chip))
            if device is not None and process.pid not in self.owned_pids:
                who = f"{process.name or 'a process'} (pid {process.pid})"
                return f"device {device} is held by {who}; end it, then kvtierctl reload"
        return None

    def _engine_version(self, driver: EngineDriver, engine: EngineSettings) -> str | None:
        """As installed in the engine's interpreter; an image's is not known."""
        if engine.runner == "docker":
            return None
        python = engine.python or self.python
        return _version_in(self.inventory.install_in(python), driver.package)

    def _nic_of_this_node(self) -> str | None:
        """The interface that carries this node's address among the peers."""
        peers = {p.name: p.address for p in self.settings.cluster.peers}
        address = peers.get(self.node) or self.settings.node.address
        return next((n.name for n in self.inventory.nics if address in n.addresses), None)

    def _engines(
        self, engines: list[EngineSettings], address: MetaAddress, pool: PoolPlan, env: dict[str, str]
    ) -> list[PlannedEngine]:
        planned: list[PlannedEngine] = []
        peers = self.settings.cluster.peers
        for index, engine in enumerate(engines):
            nodes = engine.nodes or tuple(p.name for p in peers) or (self.node,)
            driver = find_driver(engine, self.drivers, self.remarks)
            if driver is None:
                continue
            unit = engine_id(engine.name)
            port = self.ports.claim(
                engine.port or driver.default_port, unit, "HTTP API", address=engine.host,
                setting=f"[[engine]] {engine.name}: port",
            )  # fmt: skip
            context = EngineContext(
                name=engine.name,
                node=self.node,
                series=self.series,
                model=engine.model,
                devices=engine.devices,
                host=engine.host,
                port=port,
                python=engine.python or self.python,
                args=engine.args,
                env=engine.env,
                memcache_env=merge_env(self.toolchain.base_env, env),
                local_conf_path=f"{self.conf_dir}/mmc-local.conf",
                meta_service_url=address.client_meta_url,
                config_store_url=address.client_config_store_url,
                pool_placement=pool.placement,
                pool=pool,
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
                continue
            for purpose, extra in answer.launch.extra_ports.items():
                self.ports.claim(extra, unit, purpose)
            planned.append(answer)
        return planned


def _version_in(install: MemcacheInstall | None, package: str | None) -> str | None:
    return install.packages.get(package) if install is not None and package else None


def _span(devices: set[int]) -> str:
    if not devices:
        return "no devices"
    ordered = sorted(devices)
    return f"devices {ordered[0]} to {ordered[-1]}" if len(ordered) > 1 else f"device {ordered[0]}"


def _lasting(file: FileSpec, version: str) -> str:
    """A file without the lines that a running MetaService takes over by itself: they are no reason to restart it."""
    if not file.path.endswith("mmc-meta.conf") or not version:
        return file.content
    known = resolve_version(version)
    return "".join(
        line
        for line in file.content.splitlines(keepends=True)
        if not ((key := find_key("meta", line.partition("=")[0].strip())) and key.hot_in("meta", known))
    )


def _with_files_digest(unit: UnitSpec, files: list[FileSpec], version: str) -> UnitSpec:
    """Ties a unit to the content of its files, so that a changed conf shows up as a changed unit."""
    mine = sorted((f.path, _lasting(f, version)) for f in files if f.path in unit.files)
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()[:16]
    return unit.model_copy(update={"files_digest": digest})
