"""``vllm-ascend``: vLLM on Ascend NPUs, with MemCache through vllm-ascend's AscendStoreConnector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtierd.plan.engine import EngineContext, EngineLaunch, HttpCall, Remarks, Tier
from kvtierd.plan.model import LogProbe, Readiness, StopPolicy
from kvtierd_vllm.arguments import by_name, command_line, count_of
from kvtierd_vllm.ascend_env import DEFAULT_HASH_SEED, check_env, complete_env, host_cann_env
from kvtierd_vllm.forms import VERSIONS, Form, form_of
from kvtierd_vllm.hosts import Placement, place
from kvtierd_vllm.serving import (
    DEV_MODE,
    VllmServer,
    flush_calls,
    program_beside,
    restart_policy,
)
from kvtierd_vllm.transfer import (
    L3_KEY,
    OPTIONS_KEY,
    TransferOptions,
    ascend_transfer,
    kv_port,
    read_options,
    wants_l3,
)

READY_SECONDS: Final = 1800.0  # hundreds of GB of weights, then graph capture
_STOP_SECONDS: Final = 60.0
# vLLM 0.11 and later write it once the ranks of this node have their weights and their cache.
_FOLLOWER_READY: Final = "init engine (profile, create kv cache, warmup model) took"
_ADDITIONAL_CONFIG: Final = "additional-config"
_PIPELINE: Final = "pipeline-parallel-size"
_TENSOR: Final = "tensor-parallel-size"


class VllmAscendDriver(VllmServer):
    """One engine on a host's NPUs, or a host's part of one that spans hosts."""

    name = "vllm-ascend"
    package: str | None = "vllm-ascend"
    versions = VERSIONS
    ready_seconds = READY_SECONDS

    def launch(self, context: EngineContext) -> EngineLaunch:
        """See :class:`kvtierd.plan.engine.EngineDriver`."""
        findings = Remarks()
        named = by_name(context.args)
        form = form_of(context.version, findings)
        options = read_options(named.get(OPTIONS_KEY), findings)
        transfer = ascend_transfer(context, form, options, findings)
        uses_pool = wants_l3(named, findings)
        if not uses_pool and context.role != "both":
            findings.refuse(
                "engine.l3-off-role",
                f"role {context.role} hands its KV to the other half: it cannot be without a KV connector",
                'take args.l3 = "off" out',
            )
        placement = place(context, named, findings)
        workers = _check_devices(context, named, placement, findings)
        _check_graphs(named, options, findings)
        check_env(context, findings)
        args = _args_for(context.args, form, context.version, findings)
        argv = (
            *_program(context, placement),
            "--host",
            context.host,
            "--port",
            str(context.port),
            *placement.argv,
            *command_line(args, findings, handled={OPTIONS_KEY, L3_KEY, *placement.handled}),
            *(("--kv-transfer-config", transfer.rendered()) if uses_pool else ()),
        )
        ports = dict(placement.ports)
        if context.role != "both":
            ports["KV transfer between prefill and decode"] = kv_port(context, options)
        return EngineLaunch(
            argv=argv,
            env=_env(context, form, placement, findings),
            extra_ports=ports,
            serves_http=not placement.headless,
            clients=workers if uses_pool else 0,
            readiness=_follower_readiness() if placement.headless else self.readiness(context),
            restart=restart_policy(first_seconds=5.0, longest_seconds=300.0),
            stop=StopPolicy(timeout_seconds=_STOP_SECONDS),
            notes=tuple(findings.notes),
            refusals=tuple(findings.refusals),
        )

    def metrics_url(self, context: EngineContext) -> str | None:
        """``None`` on a headless follower: it has no HTTP server."""
        headless = place(context, by_name(context.args), Remarks()).headless
        return None if headless else f"{context.url}/metrics"

    def flush(self, context: EngineContext, tiers: frozenset[Tier]) -> tuple[HttpCall, ...]:
        """L1, when the engine's developer endpoints are on. vllm-ascend's connector cannot empty the pool."""
        if tiers and context.env.get(DEV_MODE) != "1":
            raise ValueError(f'flushing needs {DEV_MODE} = "1" under [engine.env]')
        return flush_calls(tiers, can_reset_pool=False)


def _program(context: EngineContext, placement: Placement) -> tuple[str, ...]:
    """The practice guide's two ways: the module on one host, ``vllm serve`` over several (only it has --headless)."""
    if placement.spans_hosts:
        return (program_beside(context.python, "vllm"), "serve", context.model)
    return (context.python, "-m", "vllm.entrypoints.openai.api_server", f"--model={context.model}")


def _args_for(args: Mapping[str, Any], form: Form, version: str | None, findings: Remarks) -> dict[str, Any]:
    """The arguments without what this version has dropped: off switches go, on switches are refused."""
    kept: dict[str, Any] = {}
    for key, value in args.items():
        if by_name({key: None}).keys() == {_ADDITIONAL_CONFIG} and isinstance(value, Mapping):
            kept[key] = _without_dropped(value, form, version, findings)
            if kept[key] or not value:
                continue
            del kept[key]
        else:
            kept[key] = value
    return kept


def _without_dropped(
    table: Mapping[str, Any], form: Form, version: str | None, findings: Remarks
) -> dict[str, Any]:
    gone = [key for key in table if key in form.dropped_additional_config]
    for key in gone:
        what = f"{_ADDITIONAL_CONFIG}.{key}"
        value = table[key]
        if isinstance(value, Mapping) and value.get("enabled") is False:
            findings.note(
                "engine.option-dropped",
                f"{what} is left out: vllm-ascend {version or form.name} has no such option any more, and it was off",
            )
        else:
            findings.refuse(
                "engine.option-dropped",
                f"vllm-ascend {version or form.name} does not know {what} any more",
                "remove it; what it switched on is decided otherwise there (see vllm-ascend's release notes)",
            )
    return {key: value for key, value in table.items() if key not in gone}


def _check_devices(
    context: EngineContext, named: Mapping[str, Any], placement: Placement, findings: Remarks
) -> int:
    """Worker processes on this node, each with a device and a MemCache rank of its own."""
    pipeline = count_of(named, _PIPELINE, findings)
    if pipeline > 1:
        findings.refuse(
            "engine.pipeline-parallel",
            f"{_PIPELINE} is {pipeline}: vllm-ascend's memcache back end does not work with pipeline parallelism",
            f"use {_TENSOR} or data parallelism",
        )
    workers = count_of(named, _TENSOR, findings) * pipeline * placement.ranks
    if not context.devices:
        findings.refuse("engine.no-devices", "an NPU engine needs devices", "write devices = [0, 1, ...]")
    elif workers > len(context.devices):
        findings.refuse(
            "engine.too-few-devices",
            f"{workers} worker processes on this node need as many devices; it has {len(context.devices)}",
            f"make {_TENSOR} times the node's data-parallel ranks the number of devices",
        )
    elif workers < len(context.devices):
        idle = len(context.devices) - workers
        findings.note(
            "engine.devices-unused",
            f"{idle} of {len(context.devices)} devices stay idle: {workers} worker(s)",
        )
    return workers


def _check_graphs(named: Mapping[str, Any], options: TransferOptions, findings: Remarks) -> None:
    """Layer-wise transfer hooks in between layers: a graph over all of them leaves no in-between."""
    if not options.use_layerwise or named.get("enforce-eager") is True:
        return
    compilation = named.get("compilation-config")
    mode = compilation.get("cudagraph_mode") if isinstance(compilation, Mapping) else None
    mode = named.get("compilation-config.cudagraph_mode", mode)
    if mode != "PIECEWISE":
        findings.refuse(
            "engine.layerwise-graphs",
            f"use_layerwise needs graphs that are cut at the layers, but cudagraph_mode is {mode or 'not set'}",
            'compilation-config = { cudagraph_mode = "PIECEWISE" }',
        )


def _env(context: EngineContext, form: Form, placement: Placement, findings: Remarks) -> dict[str, str]:
    own = {
        "MMC_LOCAL_CONFIG_PATH": context.local_conf_path,
        "ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, context.devices)),
        "ACL_OP_INIT_MODE": "1",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "PYTHONHASHSEED": DEFAULT_HASH_SEED,
        "HCCL_BUFFSIZE": "1024",
        **({"VLLM_USE_V1": "1"} if form.v1_switch else {}),
        **placement.env,
    }
    return complete_env(context, host_cann_env(context, findings), context.memcache_env, own)


def _follower_readiness() -> Readiness:
    return Readiness(probes=(LogProbe(contains=_FOLLOWER_READY),), deadline_seconds=READY_SECONDS)
