"""For authors of engine plugins: fakes to test against, and a conformance suite. See docs/plugins.md.

The suite is run with ``pytest --kvtierd-plugin NAME``; :func:`conformance_problems` runs it without pytest. Nothing
here is imported before it is used: every pytest run in this interpreter loads this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtierd.testing.checks import NonconformityError, Subject, conformance_problems
    from kvtierd.testing.contexts import engine_context
    from kvtierd.testing.fake_clock import FakeClock
    from kvtierd.testing.fake_engine import FakeEngine
    from kvtierd.testing.fake_meta import FakeMetaService, FakeRank

__all__ = [
    "FakeClock",
    "FakeEngine",
    "FakeMetaService",
    "FakeRank",
    "NonconformityError",
    "Subject",
    "conformance_problems",
    "engine_context",
]

_HOMES = {
    "FakeClock": "fake_clock",
    "FakeEngine": "fake_engine",
    "FakeMetaService": "fake_meta",
    "FakeRank": "fake_meta",
    "NonconformityError": "checks",
    "Subject": "checks",
    "conformance_problems": "checks",
    "engine_context": "contexts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
