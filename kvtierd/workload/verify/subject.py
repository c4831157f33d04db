"""What is verified: an engine that kvtierd runs, or one that somebody else does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from kvtierd.engines.talk import ask
from kvtierd.errors import UsageError, WorkloadError
from kvtierd.plan.engine import EngineContext, EngineDriver
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import EngineTalk, HttpCall, NodePlan, UnitSpec
from kvtierd.plugins import PluginSet

NEAR = ("L1+L2", "L1")
"""How the tiers above L3 are emptied: an engine with an L2 empties both at once, one without knows no L2."""


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """An engine and how to speak with it. ``flush`` empties L1 and L2; ``None``: it cannot, ``no_flush`` says why.

    ``restart`` starts it anew and returns when it is ready; ``None``: nobody here may.
    """

    spec: UnitSpec
    driver: EngineDriver
    flush: tuple[HttpCall, ...] | None
    no_flush: str = ""
    restart: Callable[[], None] | None = None
    bearer_file: str | None = None

    async def ask(self, call: HttpCall, *, timeout_seconds: float) -> bytes:
        """One request, with its key. Raises ``UnitError``."""
        if self.bearer_file is not None and call.bearer_file is None:
            call = call.model_copy(update={"bearer_file": self.bearer_file})
        return await ask(self.spec, call, timeout_seconds=timeout_seconds)


def managed(plan: NodePlan, name: str, plugins: PluginSet, restart: Callable[[str], None]) -> Subject:
    """An engine of this node's plan, by its name or its unit's id.

    Raises:
        WorkloadError: ``verify.unknown-engine``, ``verify.no-http``.
    """
    engines = [u for u in plan.units if u.kind == "engine"]
    spec = next((u for u in engines if name in {u.name, u.id}), None)
    if spec is None:
        known = ", ".join(u.name for u in engines) or "none"
        raise WorkloadError(
            f"there is no engine {name!r} here", why=f"engines: {known}", code="verify.unknown-engine"
        )
    talk = spec.talk or EngineTalk()
    if talk.base_url is None or spec.plugin is None:
        raise WorkloadError(
            f"{spec.name} serves no HTTP here",
            hint="verify it on the node of its head",
            code="verify.no-http",
        )
    flush = next((talk.flush[near] for near in NEAR if near in talk.flush), None)
    return Subject(
        spec=spec,
        driver=plugins.driver(spec.plugin),
        flush=flush,
        no_flush="" if flush is not None else talk.no_flush.get("L1", "its driver does not say why"),
        restart=lambda: restart(spec.id),
    )


def foreign(
    url: str, kind: str, plugins: PluginSet, *, env: Mapping[str, str], bearer_file: str | None
) -> Subject:
    """A server that kvtierd does not run. ``kind`` is a driver's name, or its beginning: ``vllm``, ``sglang``.

    Args:
        env: What of the server's environment its driver must know to flush it.

    Raises:
        UsageError: The address or the kind is wrong.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or 80
    except ValueError as error:
        raise UsageError(f"--url {url!r}: {error}") from None
    if parts.scheme != "http" or not parts.hostname:
        raise UsageError(
            f"--url {url!r} is not http://HOST:PORT", hint="put a TLS proxy's own address behind it"
        )
    base = url.rstrip("/").removesuffix("/v1")
    driver = _driver(kind, plugins)
    context = EngineContext(
        name="url", node="", series="", model="", host=parts.hostname, port=port, python="", env=dict(env),
        local_conf_path="", meta_service_url="", config_store_url="", pool_placement="", work_dir="/",
        inventory=Inventory(hostname="", memory_total_bytes=0, memory_available_bytes=0),
    )  # fmt: skip
    flush, reason = None, ""
    for tiers in (frozenset({"L1", "L2"}), frozenset({"L1"})):
        try:
            flush = tuple(driver.flush(context, tiers))  # type: ignore[arg-type]
            break
        except ValueError as error:
            reason = str(error)
    spec = UnitSpec(
        id=base,
        kind="engine",
        name=base,
        argv=(),
        env=dict(env),
        plugin=driver.name,
        metrics_url=driver.metrics_url(context),
        talk=EngineTalk(base_url=base),
    )
    return Subject(spec=spec, driver=driver, flush=flush, no_flush=reason, bearer_file=bearer_file)


def _driver(kind: str, plugins: PluginSet) -> EngineDriver:
    names = sorted(plugins.drivers)
    chosen = kind if kind in names else next((n for n in names if n.startswith(kind)), None)
    if chosen is None:
        raise UsageError(f"there is no engine driver {kind!r}", hint=f"known here: {', '.join(names)}")
    return plugins.driver(chosen)
