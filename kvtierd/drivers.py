"""A plugin's driver as the planner gets it: every call comes back in time, and what an older API lacks is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtierd.foreign import ForeignCalls
from kvtierd.plan.engine import EngineContext, EngineDriver, EngineLaunch, EngineObservation, TierTokens
from kvtierd.plan.model import HttpCall, Tier

CALL_SECONDS = 5.0  # drivers' methods are pure; this is for one that hangs, also on a very busy host


class BoundedDriver:
    """Passes every call on, in a thread of its own and with a deadline.

    Raises:
        PluginError: ``plugin.hangs``, from any method; else what the driver raises.
    """

    def __init__(self, driver: EngineDriver, calls: ForeignCalls, *, seconds: float = CALL_SECONDS) -> None:
        self._driver = driver
        self._calls = calls
        self._seconds = seconds
        self.name = driver.name
        self.api_version = driver.api_version
        self.default_port = driver.default_port
        self.package = driver.package
        self.versions = driver.versions

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        function: Callable[..., Any] = getattr(self._driver, method)
        return self._calls.call(
            f"{self.name}'s {method}()", lambda: function(*arguments, **named), seconds=self._seconds
        )

    def launch(self, context: EngineContext) -> EngineLaunch:
        """See :class:`kvtierd.plan.engine.EngineDriver`, as for all methods."""
        return self._call("launch", context)  # type: ignore[no-any-return]

    def metrics_url(self, context: EngineContext) -> str | None:
        """Bounded."""
        return self._call("metrics_url", context)  # type: ignore[no-any-return]

    def observe(self, metrics_text: str) -> EngineObservation:
        """Bounded."""
        return self._call("observe", metrics_text)  # type: ignore[no-any-return]

    def read_line(self, line: str) -> EngineObservation | None:
        """Bounded."""
        return self._call("read_line", line)  # type: ignore[no-any-return]

    def generation(self, context: EngineContext) -> HttpCall:
        """Bounded."""
        return self._call("generation", context)  # type: ignore[no-any-return]

    def generated(self, body: bytes) -> str:
        """Bounded."""
        return self._call("generated", body)  # type: ignore[no-any-return]

    def tokens(self, body: bytes) -> TierTokens:
        """Bounded."""
        return self._call("tokens", body)  # type: ignore[no-any-return]

    def flush(self, context: EngineContext, tiers: frozenset[Tier]) -> tuple[HttpCall, ...]:
        """Bounded."""
        return self._call("flush", context, tiers)  # type: ignore[no-any-return]

    def l3_switch(self, context: EngineContext, *, on: bool) -> tuple[HttpCall, ...]:
        """Bounded."""
        return self._call("l3_switch", context, on=on)  # type: ignore[no-any-return]
