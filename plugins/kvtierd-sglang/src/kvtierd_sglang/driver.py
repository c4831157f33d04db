"""The driver ``sglang``: SGLang on Ascend, with MemCache as the L3 of its hierarchical cache."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping
from typing import Final

from kvtierd.plan.engine import (
    API_VERSION,
    ENGINE_BASE_ENV,
    EngineContext,
    EngineLaunch,
    EngineObservation,
    HttpCall,
    Remarks,
    Tier,
    TierTokens,
)
from kvtierd.plan.environment import is_hash_seed
from kvtierd.plan.model import (
    FileSpec,
    HttpProbe,
    LogProbe,
    Probe,
    Readiness,
    RestartPolicy,
    StopPolicy,
)
from kvtierd_sglang import READ_VERSION, answers, lines, metrics
from kvtierd_sglang.flags import Options, arguments_of, read_options
from kvtierd_sglang.sizing import is_deepseek_v4, ranks_of, size_l2, version_of
from kvtierd_sglang.storage import (
    BACKEND,
    Rendered,
    attach_call,
    detach_call,
    key_file,
    metaservice_file,
    storage_json,
)

_BOOTSTRAP_PORT: Final = 8998
_RENDEZVOUS_PORT: Final = 20000
_HEALTH_SECONDS: Final = 5.0  # /health always takes 1 s: it generates a token and looks once a second
_ARGUMENTS_EXIT: Final = 2
_LIBRARY_PATH: Final = "LD_LIBRARY_PATH"
_HASH_SEED: Final = "PYTHONHASHSEED"
_BEYOND_US: Final = "SGLANG_HICACHE_MEMCACHE_CONFIG_PATH"
_TALKING: Final = frozenset({"info", "debug"})


@dataclasses.dataclass(frozen=True, slots=True)
class Tiers:
    """Which tiers the engine has. L1 is always there."""

    l2: bool
    l3: bool


class SglangDriver:
    """Drives ``python -m sglang.launch_server`` on Ascend."""

    name = "sglang"
    api_version = API_VERSION
    default_port = 30000
    package: str | None = "sglang"
    versions = ">=0.5.23,<0.6"

    ready_deadline_seconds = 1800.0  # loading weights takes minutes, and a port in use never becomes ready
    drain_seconds = 120.0
    defaults: Mapping[str, str | bool] = {"attention-backend": "ascend"}
    io_backend = "kernel_ascend"
    backend = BACKEND
    uses_memcache = True
    one_rank_a_device = True

    # -- the launch

    def launch(self, context: EngineContext) -> EngineLaunch:
        """See :class:`kvtierd.plan.engine.EngineDriver`."""
        options = self._options(context)
        remarks = Remarks(refusals=[*options.refusals])
        tiers = self._tiers(context, options, remarks)
        files: list[FileSpec] = []
        ports: dict[str, int] = {}
        ranks_here = self._ranks_here(context, options, remarks)
        serves_http = hosts_spanned(options) == 1 or context.node_index == 0
        argv = [
            *(context.python, "-m", "sglang.launch_server"),
            *("--model-path", context.model),
            *("--host", context.host, "--port", str(context.port)),
            *("--enable-metrics", "--enable-cache-report"),
        ]
        if not context.model:
            remarks.refuse("engine.no-model", "the engine has no model", 'write model = "/path/to/weights"')
        argv += self._hosts(context, options, ports, remarks)
        argv += self._role(context, options, ports)
        for name, value in self.defaults.items():
            if name not in options.flags:
                argv += arguments_of(name, value)
        if tiers.l2:
            argv += self._l2(context, options, ranks_here, remarks)
        if tiers.l3:
            argv += self._l3(context, options, remarks, files)
            if context.l3_switch and serves_http:
                argv += self._key(context, options, remarks, files)
        argv += options.arguments()
        probes = self._probes(context, options, remarks, serves_http=serves_http)
        self._say(context, options, tiers, remarks)
        return EngineLaunch(
            argv=tuple(argv),
            env=self._env(context, tiers, remarks),
            files=tuple(files),
            extra_ports=ports,
            serves_http=serves_http,
            clients=ranks_here if tiers.l3 and self.uses_memcache else 0,
            readiness=Readiness(
                probes=probes,
                deadline_seconds=options.ready_deadline_seconds,
                interval_seconds=1.0,
                timeout_seconds=_HEALTH_SECONDS,
            ),
            restart=RestartPolicy(
                first_seconds=2.0,
                limit=5,
                fatal_patterns=(
                    lines.PORT_TAKEN,
                    lines.NO_MODEL,
                    lines.NOT_CACHED,
                    *lines.BAD_ARGUMENTS,
                ),
                fatal_exit_codes=(_ARGUMENTS_EXIT,),
            ),
            # SIGTERM waits for running requests, however long; then for its schedulers.
            stop=StopPolicy(timeout_seconds=options.drain_seconds),
            notes=tuple(remarks.notes),
            refusals=tuple(remarks.refusals),
        )

    def _options(self, context: EngineContext) -> Options:
        options = read_options(
            context.args,
            ready_deadline_seconds=self.ready_deadline_seconds,
            drain_seconds=self.drain_seconds,
        )
        if self.one_rank_a_device and context.devices and not options.says_ranks():
            ranks = len(context.devices) * options.number("nnodes")
            options = dataclasses.replace(options, flags={"tp-size": ranks, **options.flags})
        return options

    def _probes(
        self, context: EngineContext, options: Options, remarks: Remarks, *, serves_http: bool
    ) -> tuple[Probe, ...]:
        """That it listens, that it is warm, that it answers.

        When the port is taken by another SGLang, both /health and the warm-up are answered by that one: only the
        line of the HTTP server tells them apart. The hosts of an engine behind the first only have a /health that
        says nothing of the engine.
        """
        health = HttpProbe(url=f"{context.url}/health")
        if not serves_http:
            return (health,)
        level = options.flags.get("log-level", "info")
        http_level = options.flags.get("log-level-http", level)
        quiet = not {level, http_level} <= _TALKING or options.on("enable-http2")
        if quiet:
            remarks.note(
                "engine.quiet-log",
                "with log-level, log-level-http or enable-http2 as they are, SGLang does not log that it listens:"
                " if another engine has its port, this one looks ready",
            )
        return (health,) if quiet else (*(LogProbe(contains=c) for c in (lines.LISTENS, lines.READY)), health)

    def _tiers(self, context: EngineContext, options: Options, remarks: Remarks | None = None) -> Tiers:
        """Prefill computes the KV that is worth keeping; decode gets it handed over, so it has L1 only."""
        if context.role == "decode":
            if remarks is not None:
                if options.l2 or options.l3 or context.l2_bytes is not None:
                    remarks.refuse(
                        "engine.decode-tiers",
                        'l2 and l3 are for role = "prefill": a decode engine has no use for them',
                        "remove l2 and l3 from this engine",
                    )
                remarks.note(
                    "engine.decode-tiers", "role decode: L1 only, the L2 and L3 flags are on prefill engines"
                )
            return Tiers(l2=False, l3=False)
        l3 = self._l3_by_default(context) if options.l3 is None else options.l3
        l2 = options.l2 if options.l2 is not None else l3 or context.l2_bytes is not None
        if remarks is not None and l3 and not l2:
            remarks.refuse(
                "engine.l3-needs-l2",
                "SGLang moves KV between L1 and L3 through L2: it cannot have L3 without L2",
                'remove l2 = "off", or write l3 = "off" too',
            )
        if remarks is not None and not l2 and context.l2_bytes is not None:
            remarks.refuse("engine.l2-off", 'l2 has a size and args say l2 = "off"', "keep one of the two")
        return Tiers(l2=l2, l3=l3 and l2)

    def _l3_by_default(self, context: EngineContext) -> bool:
        return bool(context.local_conf_path)

    def _ranks_here(self, context: EngineContext, options: Options, remarks: Remarks) -> int:
        ranks, hosts = ranks_of(options), hosts_spanned(options)
        here = max(1, ranks // hosts)
        if context.devices and here != len(context.devices):
            remarks.refuse(
                "engine.ranks",
                f"{ranks} ranks (tp-size x pp-size x dp-size) over {hosts} host{'s' if hosts > 1 else ''} are {here}"
                f" here, but the engine has {len(context.devices)} devices",
                f"write tp-size = {len(context.devices) * hosts} in args, or correct devices",
            )
        return here

    def _hosts(
        self, context: EngineContext, options: Options, ports: dict[str, int], remarks: Remarks
    ) -> list[str]:
        hosts = hosts_spanned(options)
        if hosts == 1:
            return []
        if hosts != len(context.nodes):
            remarks.refuse(
                "engine.nodes",
                f"nnodes = {hosts}, but the engine runs on {len(context.nodes)} nodes: {', '.join(context.nodes)}",
                "name exactly those in [[engine]] nodes",
            )
            return []
        head = context.nodes[0]
        address = context.addresses.get(head, head)
        if context.node_index == 0:
            ports["rendezvous of its hosts"] = _RENDEZVOUS_PORT + context.index
        shown = f"[{address}]" if ":" in address else address
        return [
            *("--node-rank", str(context.node_index)),
            *("--dist-init-addr", f"{shown}:{_RENDEZVOUS_PORT + context.index}"),
        ]

    def _role(self, context: EngineContext, options: Options, ports: dict[str, int]) -> list[str]:
        if context.role == "both":
            return []
        argv = ["--disaggregation-mode", context.role]
        if "disaggregation-transfer-backend" not in options.flags:
            argv += ["--disaggregation-transfer-backend", "ascend"]
        if context.role == "prefill":
            given = "disaggregation-bootstrap-port" in options.flags
            port = options.number("disaggregation-bootstrap-port", default=_BOOTSTRAP_PORT + context.index)
            ports["meeting point of prefill and decode"] = port
            argv += [] if given else ["--disaggregation-bootstrap-port", str(port)]
        return argv

    def _layout(self, context: EngineContext) -> str:
        return "page_first_direct" if is_deepseek_v4(context.model) else "page_first_kv_split"

    def _l2(self, context: EngineContext, options: Options, ranks_here: int, remarks: Remarks) -> list[str]:
        size = size_l2(context, options, ranks_here)
        remarks.notes += size.notes
        remarks.refusals += size.refusals
        argv = ["--enable-hierarchical-cache", "--hicache-io-backend", self.io_backend]
        if "hicache-mem-layout" not in options.flags:
            argv += ["--hicache-mem-layout", self._layout(context)]
        if size.per_rank_gb is not None:
            argv += ["--hicache-size", str(size.per_rank_gb)]
        return argv

    def _l3(
        self, context: EngineContext, options: Options, remarks: Remarks, files: list[FileSpec]
    ) -> list[str]:
        storage = self._storage(context, options)
        remarks.notes += storage.notes
        remarks.refusals += storage.refusals
        file, refusals = metaservice_file(context)
        remarks.refusals += refusals
        if file is not None:
            files.append(file)
            remarks.note(
                "engine.metaservice",
                f"kvtierd's own unit runs the MetaService; {file.path} says the same addresses in SGLang's form",
            )
        return self._storage_arguments(storage)

    def _storage(self, context: EngineContext, options: Options) -> Rendered:
        """The JSON for the storage backend."""
        return storage_json(context, options.storage)

    def _storage_arguments(self, storage: Rendered) -> list[str]:
        argv = ["--hicache-storage-backend", self.backend]
        if storage.text is not None:
            argv += ["--hicache-storage-backend-extra-config", storage.text]
        return argv

    def _key(
        self, context: EngineContext, options: Options, remarks: Remarks, files: list[FileSpec]
    ) -> list[str]:
        """The admin key, without which SGLang detaches and attaches nothing."""
        if not ipaddress.ip_address(context.host).is_loopback:
            remarks.refuse(
                "engine.key-exposed",
                f"l3_switch gives SGLang an admin key, which SGLang {READ_VERSION} shows at /server_info to everybody who"
                f" reaches {context.host}:{context.port}; whoever has it can make the engine load code",
                'write host = "127.0.0.1", or remove l3_switch from this engine',
            )
        if "config" in options.flags:
            remarks.refuse(
                "engine.config-twice",
                "l3_switch gives SGLang a --config file with its admin key, and SGLang reads one such file only",
                f"write the flags of {options.flags['config']} into args, or remove l3_switch from this engine",
            )
        remarks.note(
            "engine.key-readable",
            f"every user of this host can read the admin key that l3_switch gives SGLang: SGLang {READ_VERSION} shows it at"
            f" {context.url}/server_info. With it they can have the engine load code, as the user that runs it",
        )
        file = key_file(context)
        files.append(file)
        return ["--config", file.path]

    def _say(self, context: EngineContext, options: Options, tiers: Tiers, remarks: Remarks) -> None:
        version = version_of(context.version)
        if version is None:
            remarks.note(
                "engine.version-unknown",
                f"the version of SGLang is not known; the flags are those of {READ_VERSION}"
                ' (say it: version = "..." in [[engine]])',
            )
        elif not (0, 5, 23) <= version < (0, 6):
            remarks.note(
                "engine.version-untested",
                f"SGLang {context.version} is not one that this driver knows ({self.versions});"
                f" the flags are those of {READ_VERSION}",
            )
        if tiers.l3 and not context.l3_switch:
            remarks.note(
                "engine.l3-at-run-time",
                "L3 is attached at the start and stays. l3_switch = true in [[engine]] lets kvtierctl take it off and on, at"
                f" a price: it needs SGLang's admin key, which SGLang {READ_VERSION} shows at /server_info",
            )
        if context.host not in {"127.0.0.1", "::1"}:
            remarks.note(
                "engine.open-admin",
                f"everybody who reaches {context.host}:{context.port} can empty the engine's caches"
                + (" and the whole pool" if tiers.l3 and self.uses_memcache else "")
                + ": SGLang's /flush_cache and /hicache/storage-backend/clear ask for no key",
            )
        if "config" in options.flags:
            remarks.note(
                "engine.config-file",
                f"kvtierd does not read {options.flags['config']}; flags on the command line win over it."
                " With an admin key in it, kvtierd cannot flush this engine",
            )

    # -- the environment

    def _env(self, context: EngineContext, tiers: Tiers, remarks: Remarks) -> dict[str, str]:
        env = {**ENGINE_BASE_ENV, **context.memcache_env, _HASH_SEED: "0"}
        if context.devices:
            env["ASCEND_RT_VISIBLE_DEVICES"] = ",".join(str(d) for d in context.devices)
        env |= context.env
        library_path = context.memcache_env.get(_LIBRARY_PATH)
        if library_path and _LIBRARY_PATH in context.env:
            # The operator's own libraries must not hide MemCache's.
            env[_LIBRARY_PATH] = f"{library_path}:{context.env[_LIBRARY_PATH]}"
        seed = env[_HASH_SEED]
        if not is_hash_seed(seed):
            remarks.refuse(
                "engine.hash-seed",
                f"PYTHONHASHSEED = {seed!r}: engines that hash differently never find each other's KV",
                "leave it out (kvtierd sets 0), or give the same number to every engine on every host",
            )
        if tiers.l3 and _BEYOND_US in context.env:
            remarks.refuse(
                "engine.env-ours",
                f"{_BEYOND_US} adds keys to MemCache's configuration that kvtierd cannot check",
                "write them as a table: hicache-storage-backend-extra-config = { ... } in args",
            )
        return env

    # -- watching and asking it

    def metrics_url(self, context: EngineContext) -> str | None:
        """See :class:`kvtierd.plan.engine.EngineDriver`. Only the first host of an engine has metrics."""
        spanned = hosts_spanned(self._options(context))
        return f"{context.url}/metrics" if spanned == 1 or context.node_index == 0 else None

    def observe(self, metrics_text: str) -> EngineObservation:
        """See :func:`kvtierd_sglang.metrics.observe`."""
        return metrics.observe(metrics_text)

    def read_line(self, line: str) -> EngineObservation | None:
        """See :func:`kvtierd_sglang.lines.read_line`."""
        return lines.read_line(line)

    def generation(self, context: EngineContext) -> HttpCall:
        """See :func:`kvtierd_sglang.answers.generation`."""
        return answers.generation(context)

    def generated(self, body: bytes) -> str:
        """See :func:`kvtierd_sglang.answers.generated`."""
        return answers.generated(body)

    def tokens(self, body: bytes) -> TierTokens:
        """See :func:`kvtierd_sglang.answers.tokens`."""
        return answers.tokens(body)

    def flush(self, context: EngineContext, tiers: frozenset[Tier]) -> tuple[HttpCall, ...]:
        """See :func:`kvtierd_sglang.answers.flush`. With an admin key, SGLang wants it for these too."""
        has = self._tiers(context, self._options(context))
        key = key_file(context).path if context.l3_switch and has.l3 else None
        return answers.flush(tiers, has_l2=has.l2, has_l3=has.l3, bearer_file=key)

    def l3_switch(self, context: EngineContext, *, on: bool) -> tuple[HttpCall, ...]:
        """SGLang does it between requests only, and with its admin key."""
        options = self._options(context)
        if not self._tiers(context, options).l3:
            raise ValueError("it has no L3")
        if not context.l3_switch:
            raise ValueError(
                "SGLang needs an admin key for it, which l3_switch = true in [[engine]] sets at the next start"
            )
        key = key_file(context).path
        if on:
            return (attach_call(key, self.backend, self._storage(context, options).text),)
        return (detach_call(key),)


def hosts_spanned(options: Options) -> int:
    """Hosts that the engine spans."""
    return options.number("nnodes")
