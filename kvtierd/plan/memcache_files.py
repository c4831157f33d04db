"""MemCache's configuration of one node, as values and as the files that its processes read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.model import LocalConf, MetaConf
from kvtierd.mmc_conf.render import render_local, render_meta
from kvtierd.plan.addresses import LOOPBACK, bracketed, node_address
from kvtierd.plan.adjustments import NOTHING, Adjustments
from kvtierd.plan.direct import is_direct_cluster
from kvtierd.plan.model import FileSpec, MemcacheTls, MetaAddress, PoolPlan
from kvtierd.plan.remarks import Remarks
from kvtierd.plan.tls import tls_keys
from kvtierd.settings import Settings


@dataclasses.dataclass(frozen=True, slots=True)
class MemcacheConf:
    """What the settings, the addresses and the pool come to in MemCache's words.

    Attributes:
        settings: The settings.
        address: Where things listen.
        pool: The pool.
        directory: Where the files are.
        node: This node.
        master: The master, as far as it is known; "" where it does not matter.
        pointed: The node that clients without an endpoint are told to dial.
        tls: MemCache's own TLS, where it is on.
        version: MemCache's.
        adjustments: What kvtierd's own actions have changed; its holders are those that this node can have.
    """

    settings: Settings
    address: MetaAddress
    pool: PoolPlan
    directory: str
    node: str
    master: str
    pointed: str = ""
    tls: MemcacheTls | None = None
    version: str = ""
    adjustments: Adjustments = NOTHING

    @property
    def meta(self) -> MetaConf:
        """The MetaService's, with the addresses that it binds."""
        meta, pool = self.settings.meta, self.settings.pool
        high, low = self.adjustments.thresholds or (pool.evict_high, pool.evict_low)
        return MetaConf(
            meta_service_url=self.address.server_meta_url,
            config_store_url=self.address.server_config_store_url,
            metrics_url=self.address.metrics_url,
            log_level=meta.log_level,
            log_path=f"{self.settings.paths.logs}/memcache",
            evict_threshold_high=high,
            evict_threshold_low=low,
            lease_ttl_ms=round(meta.lease_ttl * 1000),
            extra=self._extra("meta", meta.conf),
        )

    @property
    def provider(self) -> LocalConf:
        """A rank's that brings memory."""
        return self._local(self.pool.dram_bytes_per_provider)

    @property
    def holder(self) -> LocalConf:
        """A pool holder's: it dials an address where engines have a name (see ``kvtierd.plan.direct``)."""
        if not is_direct_cluster(self.settings):
            return self.provider
        host = bracketed(node_address(self.settings.cluster, self.pointed))
        meta = self.settings.meta
        return self.provider.model_copy(
            update={
                "meta_service_url": f"tcp://{host}:{meta.port}",
                "config_store_url": f"tcp://{host}:{meta.config_store_port}",
            }
        )

    @property
    def engine(self) -> LocalConf:
        """An engine's rank's: it brings memory unless the pool has holders of its own."""
        return self.provider if self.pool.placement == "engine" else self._local(0)

    @property
    def admin(self) -> LocalConf:
        """kvtierd's own client's (purge): past the endpoint, which withholds everything meanwhile."""
        return self._local(0).model_copy(
            update={
                "meta_service_url": self.address.server_meta_url,
                "config_store_url": self.address.server_config_store_url,
            }
        )

    @property
    def engine_path(self) -> str:
        """The file of :attr:`engine`."""
        return f"{self.directory}/mmc-local.conf"

    def _local(self, dram_bytes: int) -> LocalConf:
        return LocalConf(
            meta_service_url=self.address.client_meta_url,
            config_store_url=self.address.client_config_store_url,
            world_size=self.pool.world_size,
            protocol=self.pool.protocol,
            hcom_url=f"tcp://{self._hcom_address()}:{self.settings.meta.hcom_port}",
            dram_size_bytes=dram_bytes,
            max_dram_size_bytes=self.pool.dram_bytes_per_provider,
            log_level=self.settings.meta.log_level,
            extra=self._extra("local", self.settings.meta.local_conf),
        )

    def _extra(self, kind: Literal["meta", "local"], written: Mapping[str, str]) -> dict[str, str]:
        """The operator's further keys and those of TLS, which are not theirs to change."""
        return {**written, **tls_keys(self.tls, kind, self.version)}

    def _hcom_address(self) -> str:
        """In a cluster the master's, on every node the same, as the practice guide has it; elected: the first node's."""
        cluster = self.settings.cluster
        if cluster.mode == "standalone":
            return self.settings.node.address or LOOPBACK
        return node_address(cluster, cluster.master or cluster.nodes[0].name)

    def files(self, version: str, remarks: Remarks, *, a3: bool, has_meta: bool) -> list[FileSpec]:
        """The files of this node; what MemCache would refuse becomes a refusal. Only the endpoint's without a version."""
        files: list[FileSpec] = []
        if self.settings.meta.endpoint == "relay":
            files.append(self._file("endpoint.json", self._endpoint_json()))
        if not version:
            return files
        try:
            if has_meta:
                # Whether it may listen beyond loopback, the planner has judged by then.
                exposed = is_direct_cluster(self.settings)
                text = render_meta(self.meta, version, allow_exposed=exposed)
                files.append(self._file("mmc-meta.conf", text))
            if self.pool.placement == "standalone":
                files.append(self._file("mmc-local-pool.conf", render_local(self.holder, version, a3=a3)))
            for added in self.adjustments.holders:
                conf = self.holder.model_copy(update={"dram_size_bytes": added.dram_bytes})
                files.append(self._file(f"mmc-local-{added.name}.conf", render_local(conf, version, a3=a3)))
            files.append(FileSpec(path=self.engine_path, content=render_local(self.engine, version, a3=a3)))
            if has_meta:
                files.append(self._file("mmc-local-admin.conf", render_local(self.admin, version, a3=a3)))
        except ConfError as error:
            remarks.refuse(error.stable_code, error.message, error.hint)
        return files

    def _file(self, name: str, content: str) -> FileSpec:
        return FileSpec(path=f"{self.directory}/{name}", content=content)

    def _endpoint_json(self) -> str:
        config: dict[str, Any] = {
            "listen": {
                "meta": self.address.client_meta_url.removeprefix("tcp://"),
                "config_store": self.address.client_config_store_url.removeprefix("tcp://"),
            },
            "target": {
                "meta": self.address.server_meta_url.removeprefix("tcp://"),
                "config_store": self.address.server_config_store_url.removeprefix("tcp://"),
            },
            "control_socket": f"{self.settings.paths.runtime}/endpoint.sock",
            "state_file": f"{self.settings.paths.runtime}/endpoint-state.json",
            "purge_on_unclean": self.settings.pool.purge_on_unclean,
        }
        if self.settings.cluster.mode != "standalone":
            config |= self._between_nodes()
        return json.dumps(config, indent=2) + "\n"

    def _between_nodes(self) -> dict[str, Any]:
        """Who the other nodes' endpoints are. Which of them is the master's, the daemon says when it knows."""
        cluster = self.settings.cluster
        tls = {"ca": cluster.tls.ca, "cert": cluster.tls.cert, "key": cluster.tls.key}
        return {
            "target": None,
            "cluster": cluster.name,
            "node": self.node,
            "peer_listen": _host_port(node_address(cluster, self.node), cluster.endpoint_port),
            "peers": [
                {"name": p.name, "address": _host_port(p.address, cluster.endpoint_port)}
                for p in cluster.nodes
            ],
            "tls": None if cluster.insecure else tls,
            "insecure": cluster.insecure,
            # The highest epoch must outlive a reboot.
            "state_file": f"{self.settings.paths.state}/endpoint-state.json",
        }


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
