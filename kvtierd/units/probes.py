"""Runs the probes of a unit's readiness, with time limits. Nothing here raises: a probe that fails says why."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from kvtierd.http_get import HttpError, TlsFiles, http_get
from kvtierd.plan.model import HttpProbe, LogProbe, Probe, TcpProbe

LONGEST_BODY_BYTES = 256 * 1024
NO_STATUS = 0  # no answer has it: then no body is read
HTTP_SECONDS = 60.0  # never reached: the probe's own limit is around it


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeResult:
    """``reason`` is empty when all is well, else what was not, fit for a status line."""

    ok: bool
    reason: str = ""


OK = ProbeResult(ok=True)
HasLogged = Callable[[str], Awaitable[bool]]


async def run_probes(
    probes: Sequence[Probe], *, timeout_seconds: float, has_logged: HasLogged
) -> ProbeResult:
    """Runs all probes at once; the first failure in their order is the result.

    Args:
        probes: What to check. None at all is a success: then a living process is all that is asked for.
        timeout_seconds: Limit of each probe.
        has_logged: Whether the unit's current run wrote a text; for ``LogProbe``.
    """
    results = await asyncio.gather(
        *(run_probe(probe, timeout_seconds=timeout_seconds, has_logged=has_logged) for probe in probes)
    )
    return next((result for result in results if not result.ok), OK)


async def run_probe(probe: Probe, *, timeout_seconds: float, has_logged: HasLogged) -> ProbeResult:
    """Runs one probe; see ``run_probes``."""
    try:
        async with asyncio.timeout(timeout_seconds):
            match probe:
                case HttpProbe():
                    return await _http(probe)
                case TcpProbe():
                    return await _tcp(probe)
                case LogProbe():
                    found = await has_logged(probe.contains)
                    return OK if found else _failed(f"it has not logged {probe.contains!r} yet")
    except TimeoutError:
        return _failed(f"{_target(probe)} did not answer within {timeout_seconds:g} s")
    except OSError as error:
        return _failed(f"{_target(probe)}: {error.strerror or error}")
    except Exception as error:  # noqa: BLE001 - a probe may not take the daemon's loop down, whatever it meets
        return _failed(f"{_target(probe)}: {type(error).__name__}: {error}")


def _failed(reason: str) -> ProbeResult:
    return ProbeResult(ok=False, reason=reason)


def _target(probe: Probe) -> str:
    match probe:
        case HttpProbe():
            return probe.url
        case TcpProbe():
            return f"port {probe.address}:{probe.port}"
        case LogProbe():
            return "the log"


async def _tcp(probe: TcpProbe) -> ProbeResult:
    _, writer = await asyncio.open_connection(probe.address, probe.port)
    writer.close()
    return OK


async def _http(probe: HttpProbe) -> ProbeResult:
    try:
        answer = await http_get(
            probe.url,
            timeout_seconds=HTTP_SECONDS,
            most_body_bytes=LONGEST_BODY_BYTES,
            body_of_status=probe.status if probe.body_contains is not None else NO_STATUS,
            tls=TlsFiles(**probe.tls.model_dump()) if probe.tls is not None else None,
        )
    except HttpError as error:
        return _failed(f"{error.message}{f' ({error.why})' if error.why else ''}")
    if answer.status != probe.status:
        return _failed(f"{probe.url} answered {answer.status} instead of {probe.status}")
    if probe.body_contains is not None and probe.body_contains.encode() not in answer.body:
        shown = answer.body[:80].decode(errors="replace")
        return _failed(f"{probe.url} answered {shown!r} without {probe.body_contains!r}")
    return OK
