"""The daemon's commands, checked and carried out. ``control`` says what they are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvtierd.endpoint.actions import Mode
from kvtierd.endpoint.hop import MAX_EPOCH
from kvtierd.endpoint.service import PENDING_TICK_SECONDS, EndpointService
from kvtierd.endpoint.state import Admission
from kvtierd.endpoint.status import status
from kvtierd.endpoint.targets import AnyTarget, PeerTarget, parse_target, target_dict
from kvtierd.errors import EndpointError

_log = logging.getLogger(__name__)
_Command = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Commands:
    """``handle`` is the control server's handler. ``EndpointError`` tells the caller what was wrong."""

    def __init__(self, service: EndpointService) -> None:
        self._service = service
        self._quiescing = False
        self._table: dict[str, tuple[_Command, frozenset[str]]] = {
            "status": (self._status, frozenset()),
            "set_target": (self._set_target, frozenset({"meta", "config_store", "target", "epoch"})),
            "serve": (self._serve, frozenset()),
            "recover": (self._recover, frozenset()),
            "quiesce": (self._quiesce, frozenset({"timeout_seconds", "quiet_seconds"})),
            "admit": (self._admit, frozenset({"who"})),
            "cut": (self._cut, frozenset()),
            "drop_peer": (self._drop_peer, frozenset({"name"})),
            "reload": (self._reload, frozenset()),
        }

    async def handle(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """One command."""
        if command not in self._table:
            known = ", ".join(self._table)
            raise EndpointError(
                f"unknown command {command!r}", hint=f"known: {known}", code="endpoint.request"
            )
        method, known_arguments = self._table[command]
        unknown = set(arguments) - known_arguments
        if unknown:
            raise EndpointError(f"{command} takes no {min(unknown)!r}", code="endpoint.request")
        return await method(arguments)

    async def _status(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return status(self._service)

    async def _serve(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._service.state.serve()
        self._service.mode_changed()
        return {"mode": self._service.state.mode.value}

    async def _recover(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._service.state.recover()
        self._service.mode_changed()
        return {"mode": self._service.state.mode.value}

    async def _set_target(self, arguments: dict[str, Any]) -> dict[str, Any]:
        epoch = arguments.pop("epoch", None)
        if epoch is not None and (not isinstance(epoch, int) or not 0 < epoch <= MAX_EPOCH):
            raise EndpointError(f"epoch: expected a number from 1, got {epoch!r}", code="endpoint.request")
        target = self._target_of(arguments)
        await self._service.set_target(target, epoch)
        return {
            "target": target_dict(target),
            "epoch": self._service.state.epochs.told,
        }

    def _target_of(self, arguments: dict[str, Any]) -> AnyTarget | None:
        """Either the two addresses, or ``target`` in the form of the configuration."""
        if ("target" in arguments) == bool(arguments.keys() & {"meta", "config_store"}):
            raise EndpointError(
                "set_target takes either meta and config_store, or target", code="endpoint.request"
            )
        try:
            target = parse_target(arguments.get("target", arguments) if "target" in arguments else arguments)
            self._service.config.check_target(target)
        except EndpointError as error:
            raise EndpointError(error.message, hint=error.hint, code="endpoint.request") from None
        return target

    async def _admit(self, arguments: dict[str, Any]) -> dict[str, Any]:
        who = arguments.get("who")
        try:
            admission = Admission(str(who))
        except ValueError:
            raise EndpointError(
                f'who: expected "survivors" or "all", got {who!r}', code="endpoint.request"
            ) from None
        self._service.state.admit(admission)
        self._service.changed.notify()
        return {"admission": admission.value, "waiting": self._service.doorman.waiting}

    async def _cut(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self._service.state.target, PeerTarget):
            raise EndpointError(
                "links to another node's MetaService cannot be cut here",
                why="the clients of other nodes would let go of this node's memory for ever",
                hint="give the command to the master's endpoint, which cuts the links of all nodes together",
                code="endpoint.not-master",
            )
        return {"cut": self._service.cut()}

    async def _drop_peer(self, arguments: dict[str, Any]) -> dict[str, Any]:
        name = arguments.get("name")
        if not isinstance(name, str):
            raise EndpointError(f"name: expected a peer's name, got {name!r}", code="endpoint.request")
        return {"dropped": self._service.gate.drop(only=name)}

    async def _reload(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"peers": await self._service.reload()}

    # -- quiesce ---------------------------------------------------------------------------------

    async def _quiesce(self, arguments: dict[str, Any]) -> dict[str, Any]:
        timeout_seconds = _seconds(arguments, "timeout_seconds", None, 600.0)
        quiet_seconds = _seconds(arguments, "quiet_seconds", 0.5, 60.0)
        if self._quiescing:
            raise EndpointError("another quiesce is under way", code="endpoint.busy")
        service, state = self._service, self._service.state
        started = time.monotonic()
        self._quiescing = True
        try:
            state.quiesce(started)
            service.mode_changed()
            while (now := time.monotonic()) - started < timeout_seconds:
                if state.mode is not Mode.QUIESCE:
                    raise EndpointError(
                        f"the quiesce was overtaken by mode {state.mode.value}",
                        why=state.mode_reason,
                        code="endpoint.not-quiet",
                    )
                if service.quiet_for(now, started) >= quiet_seconds:
                    state.mark_quiesced()
                    return {"mode": state.mode.value, "took_seconds": now - started}
                await asyncio.sleep(PENDING_TICK_SECONDS / 2)
        except asyncio.CancelledError:
            self._end_quiesce()
            raise
        finally:
            self._quiescing = False
        in_flight = sum(len(link.in_flight) for _, link in service.all_links())
        self._end_quiesce()
        raise EndpointError(
            f"not quiet within {timeout_seconds:g} s: {in_flight} requests in flight",
            hint="try again with more time, or stop without it and let the pool be purged",
            code="endpoint.not-quiet",
        )

    def _end_quiesce(self) -> None:
        state = self._service.state
        if state.mode is Mode.QUIESCE and not state.quiesced:
            state.serve()
            self._service.mode_changed()


def _seconds(arguments: dict[str, Any], name: str, default: float | None, most: float) -> float:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise EndpointError(
            f"{name}: expected seconds from 0 to {most:g}, got {value!r}", code="endpoint.request"
        )
    return float(value)
