"""What is checked, in which situations, and how a check says no."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kvtierd.plan.engine import EngineContext, EngineDriver, EngineLaunch
from kvtierd.testing.contexts import engine_context, small_inventory
from kvtierd.testing.guard import TookTooLongError, timed

ResultT = TypeVar("ResultT")
CALL_SECONDS = 1.0  # what the daemon allows a driver


class NonconformityError(AssertionError):
    """A driver does not do what the plugin API asks; the message says what was expected."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A driver to check.

    Args:
        driver: The driver.
        metrics: Recorded scrapes of its engine. Those of vLLM and SGLang are known already.
        lines: Recorded lines of its engine's output, likewise.
    """

    driver: EngineDriver
    metrics: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Check:
    """One rule. ``run`` raises :class:`NonconformityError`."""

    name: str
    run: Callable[[Subject], None]


def expect(holds: object, message: str) -> None:
    """Raises NonconformityError unless it holds."""
    if not holds:
        raise NonconformityError(message)


def ask(what: str, call: Callable[[], ResultT], *, seconds: float = CALL_SECONDS) -> ResultT:
    """The driver's answer; any exception and any delay is a nonconformity."""
    try:
        return timed(call, seconds)
    except TookTooLongError as error:
        raise NonconformityError(f"{what}: {error}") from None
    except Exception as error:
        raise NonconformityError(f"{what} raised {type(error).__name__}: {error}") from error


def ask_or_refusal(
    what: str, call: Callable[[], ResultT], *, seconds: float = CALL_SECONDS
) -> ResultT | None:
    """The driver's answer, or ``None`` for a ValueError (pydantic's ValidationError is one)."""
    try:
        return timed(call, seconds)
    except ValueError:
        return None
    except TookTooLongError as error:
        raise NonconformityError(f"{what}: {error}") from None
    except Exception as error:
        raise NonconformityError(
            f"{what} raised {type(error).__name__}: {error}; only ValueError may come out of it"
        ) from error


def same_type(what: str, answer: object, expected: type) -> None:
    """The answer has exactly the type that the protocol says."""
    expect(isinstance(answer, expected), f"{what} returned {type(answer).__name__}, not {expected.__name__}")


def known_versions(driver: EngineDriver) -> tuple[str, ...]:
    """Versions that ``driver.versions`` admits, taken from its own bounds; empty when it admits any."""
    from packaging.specifiers import SpecifierSet

    if not driver.versions:
        return ()
    allowed = SpecifierSet(driver.versions)
    found = []
    for text in sorted(re.findall(r"\d+(?:\.\d+)*", driver.versions)):
        found += [v for v in (text, f"{text}.1") if allowed.contains(v, prereleases=True)]
    return tuple(dict.fromkeys(found))


def situations(driver: EngineDriver) -> Iterator[tuple[str, EngineContext]]:
    """(name, context) of every situation in which the planner may ask for a launch."""
    version = (known_versions(driver) or (None,))[-1]
    yield "version unknown", engine_context(version=None)
    for known in known_versions(driver):
        yield f"version {known}", engine_context(version=known)
    yield "a version from the future", engine_context(version="9999.0")
    yield "a version that is no version", engine_context(version="0+local.build-7")

    def at(**changes: Any) -> EngineContext:
        return engine_context(version=version, **changes)

    emulated = {"series": "emulated", "devices": (), "inventory": small_inventory(npus=0)}
    yield "emulated, no device", at(pool_placement="standalone", **emulated)
    for series in ("300I-A2", "A3", "A5"):
        yield f"series {series}", at(series=series, pool_placement="standalone")
    yield "one device", at(devices=(1,))
    yield "prefill", at(role="prefill", l2_bytes=8 * 1024**3)
    yield "decode", at(role="decode")
    yield "in a container", at(runner="docker")
    yield "IPv6", at(host="::1")
    yield "every address", at(host="0.0.0.0")
    yield "nameless model", at(model="")
    pair = {"nodes": ("node-a", "node-b"), "addresses": {"node-a": "192.0.2.10", "node-b": "192.0.2.11"}}
    yield "head of two hosts", at(**pair)
    yield "follower of two hosts", at(node="node-b", node_index=1, **pair)


def launches(subject: Subject) -> Iterator[tuple[str, EngineContext, EngineLaunch]]:
    """(situation, context, launch) of all situations."""
    for name, context in situations(subject.driver):
        launch = ask(f"launch() with {name}", functools.partial(subject.driver.launch, context))
        same_type(f"launch() with {name}", launch, EngineLaunch)
        yield name, context, launch


def accepted(subject: Subject) -> EngineContext:
    """A context that the driver launches without a refusal."""
    refusals = []
    for name, context, launch in launches(subject):
        if not launch.refusals:
            return context
        refusals.append(f"{name}: {launch.refusals[0].message}")
    raise NonconformityError("launch() refuses every situation:\n  " + "\n  ".join(refusals))
