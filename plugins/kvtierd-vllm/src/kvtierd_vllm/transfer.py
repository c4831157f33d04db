"""``--kv-transfer-config`` as typed values.

The operator's part is the table ``[engine.args.kv-transfer]`` under vLLM's and vllm-ascend's own names; kvtierd adds
the connector, the role, the back end and a lookup port of the instance's own (two instances with the same one on a
host would share a socket).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtierd.plan.engine import EngineContext, Remarks
from kvtierd.plan.inventory import Record
from kvtierd_vllm.arguments import compact_json
from kvtierd_vllm.forms import Form, note_recompute

OPTIONS_KEY: Final = "kv-transfer"
L3_KEY: Final = "l3"
DEFAULT_KV_PORT: Final = 20001  # vllm-ascend's guide; ranks count up from it
_KV_PORTS_PER_ENGINE: Final = 100

Policy = Literal["fail", "recompute"]
Role = Literal["kv_both", "kv_producer", "kv_consumer"]
_ROLES: Final[dict[str, Role]] = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}

# Models whose layers do not all keep the same kind of KV, by name: vllm-ascend's guide names the first two, and
# Qwen3-Next mixes linear and full attention as well. Others say hybrid = true.
_HYBRID: Final = re.compile(r"deepseek[-_]?v4|qwen[-_]?3[._]5|qwen[-_]?3[-_]next", re.IGNORECASE)


class KvTransferConfig(Record):
    """The argument's value, in vLLM's names. The failure policy belongs to the outermost connector only."""

    kv_connector: str
    kv_connector_module_path: str | None = None
    kv_role: Role
    kv_port: str | None = None
    kv_load_failure_policy: Policy | None = None
    kv_connector_extra_config: dict[str, Any] = Field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Only what is set."""
        return self.model_dump(exclude_none=True)

    def rendered(self) -> str:
        """As the argument's text."""
        return compact_json(self.fields())


class Side(BaseModel):
    """How one side of prefill/decode disaggregation is split."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dp_size: int = Field(1, ge=1)
    tp_size: int = Field(ge=1)


class TransferOptions(BaseModel):
    """``[engine.args.kv-transfer]`` of a vllm-ascend engine. What is not set is left to the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kv_load_failure_policy: Policy | None = None
    hybrid: bool | None = None  # kvtierd's own: the model has hybrid attention; default: known by its name
    kv_port: int | None = Field(None, ge=1024, le=65535)
    prefill: Side | None = None
    decode: Side | None = None
    load_async: bool | None = None
    use_layerwise: bool | None = None
    layerwise_prefetch_layers: int | None = None
    consumer_is_to_put: bool | None = None
    consumer_is_to_load: bool | None = None
    discard_partial_chunks: bool | None = None
    memcache_dp_init_barrier: bool | None = None
    prefill_pp_size: int | None = None
    prefill_pp_layer_partition: str | None = None

    def for_the_store(self) -> dict[str, Any]:
        """The options of AscendStoreConnector among these."""
        return self.model_dump(
            exclude_none=True, exclude={"kv_load_failure_policy", "hybrid", "kv_port", "prefill", "decode"}
        )


def read_options(table: object, findings: Remarks) -> TransferOptions:
    """The operator's table, checked; what is wrong with it is refused by name."""
    try:
        return TransferOptions.model_validate({} if table is None else table)
    except ValidationError as error:
        for problem in error.errors():
            place = ".".join(str(part) for part in problem["loc"])
            hint = ""
            message = f"args.{OPTIONS_KEY}.{place}: {problem['msg']}" if place else str(problem["msg"])
            if problem["type"] == "extra_forbidden":
                near = difflib.get_close_matches(place, TransferOptions.model_fields, n=1)
                message = f"args.{OPTIONS_KEY}.{place} is not an option of the KV connector"
                hint = f"did you mean {near[0]}?" if near else ""
            findings.refuse("engine.kv-transfer", message, hint)
        return TransferOptions()


def ascend_transfer(
    context: EngineContext, form: Form, options: TransferOptions, findings: Remarks
) -> KvTransferConfig:
    """The whole value for vllm-ascend: the store alone, or under a MultiConnector for prefill and decode."""
    role = _ROLES[context.role]
    policy = _policy(context, form, options, findings)
    store = KvTransferConfig(
        kv_connector="AscendStoreConnector",
        kv_role=role,
        kv_connector_extra_config={
            "backend": "memcache",
            form.rpc_port_key: str(context.index),
            **options.for_the_store(),
        },
    )
    if context.role == "both":
        for name in ("kv_port", "prefill", "decode"):
            if getattr(options, name) is not None:
                findings.refuse(
                    "engine.kv-transfer",
                    f'args.{OPTIONS_KEY}.{name} belongs to prefill/decode, but role is "both"',
                    'write role = "prefill" or "decode", or leave it out',
                )
        return store.model_copy(update={"kv_load_failure_policy": policy})
    if options.prefill is None or options.decode is None:
        findings.refuse(
            "engine.kv-transfer",
            f'role "{context.role}" needs the split of both sides',
            f"[engine.args.{OPTIONS_KEY}] prefill = {{ dp_size = 1, tp_size = 8 }} and decode = {{ ... }}",
        )
    sides = {
        name: side.model_dump()
        for name, side in (("prefill", options.prefill), ("decode", options.decode))
        if side is not None
    }
    mooncake = KvTransferConfig(
        kv_connector="MooncakeConnectorV1",
        kv_role=role,
        kv_port=str(kv_port(context, options)),
        kv_connector_extra_config=sides,
    )
    return KvTransferConfig(
        kv_connector="MultiConnector",
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": [mooncake.fields(), store.fields()]},
    )


def kv_port(context: EngineContext, options: TransferOptions) -> int:
    """First port of the direct transfer between prefill and decode; apart for several engines on a host."""
    return options.kv_port or DEFAULT_KV_PORT + _KV_PORTS_PER_ENGINE * context.index


def _policy(context: EngineContext, form: Form, options: TransferOptions, findings: Remarks) -> Policy | None:
    wanted = options.kv_load_failure_policy
    if not form.failure_policy:
        if wanted is not None:
            findings.refuse(
                "engine.kv-transfer",
                f"vllm-ascend {form.name} does nothing with kv_load_failure_policy",
                "leave it out, or run a newer vllm-ascend",
            )
        return None
    hybrid = options.hybrid if options.hybrid is not None else bool(_HYBRID.search(context.model))
    if wanted == "recompute":
        if hybrid:
            findings.refuse(
                "engine.recompute-hybrid",
                f'kv_load_failure_policy = "recompute" does not work for models with hybrid attention'
                f" ({context.model})",
                f'write kv_load_failure_policy = "fail"; if the model is not hybrid: {OPTIONS_KEY}.hybrid = false',
            )
        note_recompute(context.version, findings)
    return wanted or "fail"  # vLLM's default, written out so that the plan shows it


def wants_l3(named: Mapping[str, Any], findings: Remarks) -> bool:
    """Whether the engine is to use the pool: always, unless ``args.l3`` is "off"."""
    value = named.get(L3_KEY, "on")
    if value not in {"on", "off", True, False}:
        findings.refuse("engine.bad-argument", f"args.{L3_KEY} is {value!r}", 'write "on" or "off"')
    return value not in {"off", False}
