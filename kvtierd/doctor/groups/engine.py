"""Engines: a command line given after ``--`` and the planned ones. What is known not to work, and what works unlike it looks.

Sources: vllm-ascend's KV pool guide and the issues and pull requests that a check names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final

from kvtierd.checks import Group, Outcome, Patient, absent, fail, note, unknown, warn, worst
from kvtierd.doctor.engine_lines import STORES, EngineLine, engine_lines, running_lines
from kvtierd.host.view import READ_LIMIT_BYTES
from kvtierd.mmc_conf.parse import parse_conf

GROUP = Group("engine")
Version = tuple[int, ...]

LOOKUP_SINCE: Final = (0, 17)  # lookup_rpc_port; mooncake_rpc_port before (vllm-ascend PR 6476)
CVE_FLOOR: Final = (0, 8, 5)  # of vLLM, for both advisories below
SMALL_BLOCK: Final = 128
METRICS_DEFAULT: Final = 8000
NONE: Final = "no engine is planned, and no command line was given"
_DROPPED: Final = (("torchair_graph_config", (0, 13)), ("ascend_scheduler_config", (0, 17)))
_MEMCACHE_RECONNECTS: Final = (1, 1)


def version_of(text: str | None) -> Version | None:
    """``"0.18.0rc1"`` -> ``(0, 18, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(int(part) for part in match[0].split(".")[:3]) if match else None


@GROUP.check(
    "command",
    title="The engine's command line says what was meant",
    why="vLLM ends with status 2 on a --kv-transfer-config that is no JSON (samples with # comments are not), 15 s after its"
    " start. A connector of another name, or none, gives an engine that works and reuses nothing.",
    fix="write the engine under [[engine]]: kvtierd renders the JSON from checked values",
)
async def command(patient: Patient) -> Outcome:
    """Whether it is an engine's, whether its JSON can be read, which L3 it has."""
    found: list[Outcome] = []
    lines = await engine_lines(patient)
    if patient.engine_argv and not any(line.source == "given" for line in lines):
        found.append(
            note(
                "the command line is none of vllm serve, python -m vllm.entrypoints..., sglang.launch_server"
            )
        )
    for line in lines:
        found += _command(line)
    if not lines and not found:
        return absent(NONE)
    return worst(found, "; ".join(_told(line) for line in lines))


def _command(line: EngineLine) -> Iterable[Outcome]:
    if "config" in line.flags:
        yield note(f"{line.who}: options in {line.flags['config']} are not looked at")
    if line.kind != "vllm":
        return
    try:
        transfer = line.transfer
    except ValueError as error:
        where = (
            f" (column {error.colno}: {error.msg})"
            if isinstance(error, json.JSONDecodeError)
            else f": {error}"
        )
        yield fail(f"{line.who}: --kv-transfer-config is not JSON{where}")
        return
    if transfer is None:
        yield note(f"{line.who}: no --kv-transfer-config, so nothing is put into L3")
        return
    if "kv_connector" not in transfer:
        yield fail(f"{line.who}: --kv-transfer-config names no kv_connector")
    if transfer.get("kv_role") not in {"kv_both", "kv_producer", "kv_consumer"}:
        yield fail(
            f"{line.who}: kv_role is {transfer.get('kv_role')!r}, not kv_both, kv_producer or kv_consumer"
        )
    if line.store is None and any(c.get("kv_connector") in STORES for c in line.connectors):
        yield warn(f"{line.who}: the connector's backend is not memcache (its default is mooncake)")
    store = line.store or {}
    mode = re.search(r"cudagraph_mode\W+(\w+)", line.flags.get("compilation-config", ""))
    graphs = line.flags.get("compilation-config.cudagraph_mode") or (mode[1] if mode else "")
    if store.get("use_layerwise") is True and "enforce-eager" not in line.flags and graphs != "PIECEWISE":
        yield fail(
            f"{line.who}: use_layerwise needs graphs cut at the layers",
            '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or --enforce-eager',
        )


def _told(line: EngineLine) -> str:
    tier = " + ".join(str(c.get("kv_connector")) for c in line.connectors)
    if line.kind == "sglang":
        tier = line.flags.get("hicache-storage-backend", "no L3")
    return f"{line.who}: {line.kind} with {tier}"


@GROUP.check(
    "versions",
    title="The engine, its plugin and MemCache go together",
    why="Options changed their names between releases, and what a release does not know it ignores: two engines then share a"
    " socket, or a policy has no effect. vllm-ascend works with the vLLM of its own number only.",
    fix='leave these options to kvtierd and say the version: version = "0.23.0" in [[engine]]',
)
async def versions(patient: Patient) -> Outcome:
    """vllm against vllm-ascend, option names against the release, MemCache's oldest that reconnects."""
    lines = await engine_lines(patient)
    if not lines:
        return absent(NONE)
    found: list[Outcome] = []
    for line in lines:
        found += _versions(line)
    return worst(found, "; ".join(f"{line.who}: {_versions_told(line)}" for line in lines))


def _versions(line: EngineLine) -> Iterable[Outcome]:
    memcache = version_of(line.memcache)
    if line.uses_memcache and memcache is not None and memcache < _MEMCACHE_RECONNECTS:
        yield warn(
            f"{line.who}: MemCache {line.memcache} does not come back by itself when the MetaService is restarted",
            "pip install 'memcache-hybrid>=1.1', or restart the engines after each change of master",
        )
    if line.kind != "vllm":
        return
    ascend, plain = version_of(line.versions.get("vllm-ascend")), version_of(line.versions.get("vllm"))
    if ascend and plain and ascend[:2] != plain[:2]:
        yield fail(
            f"{line.who}: vllm-ascend {line.versions['vllm-ascend']} with vllm {line.versions['vllm']}",
            f"pip install 'vllm=={ascend[0]}.{ascend[1]}.*'",
        )
    store = line.store
    if store is None:
        return
    if ascend is None:
        yield unknown(f"{line.who}: the version of vllm-ascend is not known")
        return
    right, wrong = "lookup_rpc_port", "mooncake_rpc_port"
    if ascend < LOOKUP_SINCE:
        right, wrong = wrong, right
    shown = line.versions["vllm-ascend"]
    if wrong in store and right not in store:
        yield warn(f"{line.who}: vllm-ascend {shown} does not know {wrong}", f"call it {right}")
    for option, gone in _DROPPED:
        if option in line.flags.get("additional-config", "") and ascend >= gone:
            yield warn(f"{line.who}: vllm-ascend {shown} has no {option} any more")
    if ascend < LOOKUP_SINCE:
        yield note(
            f"{line.who}: vllm-ascend {shown} wants Mooncake's libraries for backend memcache too (vllm-ascend 6229)",
            "add the directory of libmooncake to LD_LIBRARY_PATH if the engine ends with a missing library",
        )
        if any("kv_load_failure_policy" in c for c in line.connectors):
            yield warn(f"{line.who}: vllm-ascend {shown} does nothing with kv_load_failure_policy")


def _versions_told(line: EngineLine) -> str:
    known = [f"{name} {version}" for name, version in sorted(line.versions.items())]
    known += [f"MemCache {line.memcache}"] if line.memcache else []
    return ", ".join(known) or "versions not known"


@GROUP.check(
    "pipeline",
    title="No pipeline parallelism over MemCache",
    why="vllm-ascend's memcache back end counts ranks without pipeline stages: stages overwrite each other's blocks or the engine"
    " ends in its initialisation (vllm-ascend issue 13418).",
    fix="use tensor or data parallelism: --pipeline-parallel-size 1",
    blocks=("engine",),
)
async def pipeline(patient: Patient) -> Outcome:
    """--pipeline-parallel-size of engines whose L3 is MemCache."""
    lines = [line for line in await engine_lines(patient) if line.kind == "vllm" and line.uses_memcache]
    if not lines:
        return absent("no vLLM over MemCache")
    sizes = [(line, line.number("pipeline-parallel-size", 1)) for line in lines]
    return worst(
        (fail(f"{line.who}: {size} pipeline stages") for line, size in sizes if size > 1),
        f"one stage ({', '.join(line.who for line in lines)})",
    )


@GROUP.check(
    "failure-policy",
    title="A failed load leads to a failed request, not to a wrong text",
    why="With kv_load_failure_policy = recompute over memcache, one block evicted between lookup and load was followed by garbled"
    " text (vllm-ascend issue 12522, 0.22.1rc1, no release with a fix known). Models with hybrid attention do not support it"
    " at all, and a MultiConnector reads it from the outermost connector only.",
    fix='"kv_load_failure_policy": "fail", on the outermost connector',
)
async def failure_policy(patient: Patient) -> Outcome:
    """Where the policy stands, and whether it can work with this model."""
    lines = [line for line in await engine_lines(patient) if line.connectors]
    if not lines:
        return absent("no KV connector")
    found: list[Outcome] = []
    for line in lines:
        outer, *inner = line.connectors
        if any("kv_load_failure_policy" in c for c in inner):
            found.append(
                warn(
                    f"{line.who}: kv_load_failure_policy on an inner connector has no effect",
                    "write it beside the MultiConnector's kv_role",
                )
            )
        if outer.get("kv_load_failure_policy") != "recompute":
            continue
        # A planned engine's driver refuses this unless the settings say that the model is not hybrid.
        if line.hybrid and line.source != "plan":
            found.append(fail(f"{line.who}: recompute does not work for hybrid attention ({line.model})"))
        elif line.uses_memcache:
            found.append(warn(f"{line.who}: recompute over memcache"))
    policies = (f"{line.who}: {line.connectors[0].get('kv_load_failure_policy', 'fail')}" for line in lines)
    return worst(found, "; ".join(policies))


@GROUP.check(
    "port",
    title="The engine's port is its own",
    why="vLLM's API and the MetaService's HTTP service both like 8000. Who comes second ends: vLLM after 15 s with status 1, the"
    " MetaService with status 0; SGLang stays up and never answers.",
    fix="--port 8113 for the engine, or [meta] metrics_port",
)
async def port(patient: Patient) -> Outcome:
    """Ports of the engines against each other, against MemCache's (of the plan or of --conf files), and against listeners."""
    lines = await engine_lines(patient)
    if not lines:
        return absent(NONE)
    listening = {owner.port for owner in (await patient.inventory()).ports_in_use}
    plan = await patient.plan() if patient.settings else None
    ours = {use.port: f"{use.unit} ({use.purpose})" for use in plan.ports} if plan else {}
    metrics = await patient.look("--conf files", lambda: _metrics_ports(patient))
    found: list[Outcome] = []
    for line in lines:
        told = f"{line.who}: port {line.port}"
        if line.source == "given" and line.port in ours:
            found.append(fail(f"{told} is wanted by {ours[line.port]}"))
        if line.port in metrics:
            found.append(fail(f"{told} is the MetaService's HTTP port in {metrics[line.port]}"))
        if line.source == "given" and line.port in listening:
            found.append(fail(f"{told} is taken"))
        if (
            line.source == "given"
            and plan is None
            and not metrics
            and line.uses_memcache
            and line.port == METRICS_DEFAULT
        ):
            found.append(warn(f"{told} is also the default of the MetaService's HTTP service"))
    return worst(found, ", ".join(f"{line.who}: {line.port}" for line in lines))


def _metrics_ports(patient: Patient) -> dict[int, str]:
    """HTTP ports in hand-written MetaService files."""
    ports: dict[int, str] = {}
    for path in patient.confs:
        try:
            with path.open("rb") as stream:
                data = stream.read(READ_LIMIT_BYTES)
        except OSError:
            continue
        for entry in parse_conf(data).entries:
            number = re.search(r":(\d{1,5})/?$", entry.value)
            if entry.key == "ock.mmc.meta_service.metrics_url" and number:
                ports[int(number[1])] = str(path)
    return ports


@GROUP.check(
    "lookup-port",
    title="Each engine has a lookup channel of its own",
    why="vllm-ascend's scheduler asks its workers over a socket named after lookup_rpc_port (default 0). Two engines of one host"
    " with the same number answer each other's lookups: blocks are loaded that are not there.",
    fix='"lookup_rpc_port": "1" for the second engine, and so on; kvtierd numbers its engines',
)
async def lookup_port(patient: Patient) -> Outcome:
    """The port of every engine over the store: planned, given, running."""
    lines = [line for line in await engine_lines(patient) if line.store is not None]
    running = [line for line in await running_lines(patient) if line.store is not None]
    if not lines and not running:
        return absent("no engine over vllm-ascend's store")
    # Planned engines may be the very ones that run: those two are not compared with each other.
    users: dict[tuple[str, str, str], list[str]] = {}
    for line in (*lines, *running):
        store = line.store or {}
        number = str(store.get("lookup_rpc_port", store.get("mooncake_rpc_port", "0")))
        for side in {"plan": ("plan",), "running": ("running",)}.get(line.source, ("plan", "running")):
            users.setdefault((side, line.box, number), []).append(line.who)
    shared = dict.fromkeys(
        f"{' and '.join(who)} share {number}" for (_, _, number), who in users.items() if len(who) > 1
    )
    told = dict.fromkeys(f"{who[0]}: {number}" for (_, _, number), who in sorted(users.items()))
    return worst((fail(text) for text in shared), ", ".join(told))


@GROUP.check(
    "reuse",
    title="Prompts can be reused at all",
    why="KV is kept in whole blocks, and at least one token of a prompt is always computed: a prompt of one block hits nothing,"
    " one of k blocks and a token hits k. Hybrid models have blocks of about 2,000 tokens. A hit rate of 0 % is then true.",
    fix="measure with prompts of several blocks and one token more; kvtierctl verify does",
)
async def reuse(patient: Patient) -> Outcome:
    """Block size, prefix caching, and the model's kind."""
    lines = await engine_lines(patient)
    if not lines:
        return absent(NONE)
    found: list[Outcome] = []
    for line in lines:
        block = line.number("block-size", 0) or line.number("page-size", 0)
        if line.kind == "vllm" and 0 < block < SMALL_BLOCK and "vllm-ascend" in line.versions:
            found.append(
                warn(
                    f"{line.who}: vllm-ascend reuses nothing with blocks of {block} (issue 732)",
                    f"--block-size {SMALL_BLOCK}",
                )
            )
        if "no-enable-prefix-caching" in line.flags:
            found.append(
                note(f"{line.who}: prefix caching is off, so L1 keeps nothing from one request to the next")
            )
        if "disable-radix-cache" in line.flags:
            found.append(fail(f"{line.who}: --disable-radix-cache turns L1 off, and L2 and L3 hang on it"))
        if line.hybrid:
            found.append(
                note(
                    f"{line.who}: {line.model} is hybrid: nothing below a block of about 2,000 tokens is reused"
                )
            )
    return worst(found, "; ".join(f"{line.who}: {_block(line)}" for line in lines))


def _block(line: EngineLine) -> str:
    block = line.number("block-size", 0) or line.number("page-size", 0)
    return f"blocks of {block or 'the default size'}"


@GROUP.check(
    "advisories",
    title="KV transfer does not load code from the network",
    why="vLLM before 0.8.5 takes pickled objects from a ZeroMQ socket on every interface when a Mooncake connector is used"
    " (CVE-2025-32444, CVE-2025-29783): whoever reaches the port runs code.",
    fix="pip install 'vllm>=0.8.5'",
)
async def advisories(patient: Patient) -> Outcome:
    """Version floors of vLLM, where its version is known."""
    lines = [line for line in await engine_lines(patient) if line.kind == "vllm"]
    if not lines:
        return absent("no vLLM")
    found: list[Outcome] = []
    for line in lines:
        # vllm-ascend has the number of the vLLM it is for.
        text = line.versions.get("vllm") or line.versions.get("vllm-ascend")
        version = version_of(text)
        if version is None:
            found.append(unknown(f"{line.who}: the version of vLLM is not known"))
        elif version < CVE_FLOOR:
            told = f"{line.who}: vLLM {text}"
            found.append(fail(told) if line.connectors else note(f"{told}, without a connector"))
    return worst(found, f"vLLM is {'.'.join(map(str, CVE_FLOOR))} or later")
