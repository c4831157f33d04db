"""How the daemon talks to the endpoint: newline-delimited JSON over a unix socket.

Request: ``{"id": any, "command": NAME, ...arguments}``, at most 64 KiB a line, as many as wanted on one connection,
answered in order. Answer: ``{"id": same, "ok": true, "result": {...}}`` or ``{"id": same, "ok": false, "error":
{"code", "message", "why", "hint"}}``. After a line that is too long the connection is closed.

=============  ============================================  =====================================================
command        arguments                                     result
=============  ============================================  =====================================================
status                                                       the object described at ``status.status``
set_target     target: {meta, config_store} ``"host:port"``  ``{"target", "epoch"}``; see below
               or {peer} or null; epoch
serve                                                        ``{"mode"}``: requests on data pass
recover                                                      ``{"mode"}``: they are answered as misses
quiesce        timeout_seconds; quiet_seconds (default 0.5)  ``{"mode", "took_seconds"}`` once quiet; else the error
                                                             ``endpoint.not-quiet`` and the mode is serve again
admit          who: ``"survivors"`` or ``"all"``             ``{"admission", "waiting"}``
cut                                                          ``{"cut"}``: how many links were told to connect anew
drop_peer      name                                          ``{"dropped"}``: how many links of that node were ended
reload                                                       ``{"peers"}``: their names, read from the file again
=============  ============================================  =====================================================

What a daemon does in a cluster:

- On every node, whenever it learns who is master: ``set_target`` with the election's epoch. On the master the target is
  its own MetaService, elsewhere ``{"peer": name}``. Told again it does nothing, so it may be told again and again. The
  answer comes when the epoch is on disk and links to the old master are cut. Refused: ``endpoint.stale-epoch`` (a higher
  epoch is known: ask the election), ``endpoint.epoch-conflict`` (two masters in one epoch), ``endpoint.state-file``.
- The old master's MetaService must have ended before anybody is told of the new one: as long as it runs it tells those
  who stay that the others have left, and they never take each other's memory back (see ``hop``).
- ``null`` while nobody is known to be master: requests are answered as misses and links stay, in case the next master is
  the same. An endpoint does that by itself when it sees a higher epoch than it was told (``epoch_seen``, ``deposed``).
- After a change of master, as after a death, every endpoint is in ``recover`` and admits only ``survivors``. The master's
  mode and admission hold for the clients of all nodes; each node has its own as well, and both must be open. So: wait until
  ``survivors.back == survivors.expected`` and ``backend.life`` is the master's on all nodes that can be reached (or give up
  waiting); purge; ``serve`` and ``admit all`` on the master, then on the others.
- ``quiesce`` and ``cut`` on the master only: they reach the clients of all nodes.
- ``stranded`` above 0: start those processes (``clients[].stranded``) anew, pool holders at once.
- ``drop_peer`` on the master when a node is known to be dead, so that its memory leaves the pool before ``hop_seconds``
  are over. Never for a node that is only out of reach: its memory cannot come back after that.
- ``reload`` when the configuration file has other ``peers``; anything else in it needs a restart. ``state_file`` should be
  on a disk that outlives a reboot, because it has the highest epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from kvtierd.errors import EndpointError

MAX_REQUEST_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_CONNECTIONS = 32
IDLE_SECONDS = 3600.0

Handler = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class ControlServer:
    """Serves the socket. ``handler(command, arguments)`` gives the result or raises ``EndpointError``."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self._path = path
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Binds the socket (mode 0660). Raises ``EndpointError`` (``endpoint.control-socket``)."""
        try:
            if self._path.is_socket():
                await self._refuse_if_alive()
                self._path.unlink()
            self._server = await asyncio.start_unix_server(
                self._accept, str(self._path), limit=MAX_REQUEST_BYTES
            )
            self._path.chmod(0o660)
        except OSError as error:
            raise EndpointError(
                f"cannot listen on {self._path}: {error.strerror or error}", code="endpoint.control-socket"
            ) from error

    async def close(self) -> None:
        """Stops serving and removes the socket."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(OSError):
            self._path.unlink()

    async def _refuse_if_alive(self) -> None:
        try:
            async with asyncio.timeout(1.0):
                _, writer = await asyncio.open_unix_connection(str(self._path))
        except (OSError, TimeoutError):
            return
        writer.close()
        raise EndpointError(
            f"another endpoint serves {self._path}",
            hint="stop it, or give this one a control_socket of its own",
            code="endpoint.control-socket",
        )

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._converse(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                async with asyncio.timeout(IDLE_SECONDS):
                    line = await reader.readline()
                if not line:
                    return
                writer.write(json.dumps(await self._answer(line), separators=(",", ":")).encode() + b"\n")
                async with asyncio.timeout(10.0):
                    await writer.drain()
        except ValueError:  # a line beyond the limit
            error = EndpointError(
                f"a request is longer than {MAX_REQUEST_BYTES} bytes", code="endpoint.request"
            )
            writer.write(json.dumps({"id": None, "ok": False, "error": error.as_dict()}).encode() + b"\n")
        except (OSError, TimeoutError):
            pass
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        request_id: Any = None
        try:
            try:
                request = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise EndpointError(f"the request is not JSON: {error}", code="endpoint.request") from error
            if not isinstance(request, dict) or not isinstance(request.get("command"), str):
                raise EndpointError('a request is an object with a "command"', code="endpoint.request")
            request_id = request.pop("id", None)
            command = request.pop("command")
            return {"id": request_id, "ok": True, "result": await self._handler(command, request)}
        except EndpointError as error:
            return {"id": request_id, "ok": False, "error": error.as_dict()}


class EndpointControl:
    """The daemon's side. One connection, opened when needed and again after a failure; calls queue up.

    Every method raises ``EndpointError``: ``endpoint.unreachable`` when nobody answers in time, or the endpoint's
    own refusal with its code.
    """

    def __init__(self, path: Path | str, *, timeout_seconds: float = 3.0) -> None:
        self._path = Path(path)
        self._timeout_seconds = timeout_seconds
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._last_id = 0

    async def status(self) -> dict[str, Any]:
        """See ``kvtierd.endpoint.status`` for the shape."""
        return await self._call("status")

    async def set_target(self, target: Mapping[str, str] | None, *, epoch: int | None = None) -> None:
        """New links go to this MetaService or peer, ``None``: to nobody; see the module for the forms and refusals."""
        if epoch is None and target is not None and set(target) == {"meta", "config_store"}:
            # The form that endpoints of before epochs know.
            await self._call("set_target", meta=target["meta"], config_store=target["config_store"])
            return
        epoch_too = {} if epoch is None else {"epoch": epoch}
        await self._call("set_target", target=None if target is None else dict(target), **epoch_too)

    async def serve(self) -> None:
        """Requests on data pass again: after a start, a purge, or an aborted stop."""
        await self._call("serve")

    async def recover(self) -> None:
        """Requests on data are answered as misses until ``serve``."""
        await self._call("recover")

    async def quiesce(self, timeout_seconds: float, *, quiet_seconds: float = 0.5) -> float:
        """Holds new requests until all are answered and it has been quiet. Returns how long it took.

        ``quiet_seconds`` must cover the 200 ms after which the MetaService tells the pools what it wrote and evicted:
        killed before that, a pool replays keys whose memory holds something else.
        """
        result = await self._call(
            "quiesce",
            _wait_seconds=timeout_seconds,
            timeout_seconds=timeout_seconds,
            quiet_seconds=quiet_seconds,
        )
        return float(result["took_seconds"])

    async def admit(self, who: str) -> None:
        """``"all"`` or ``"survivors"``."""
        await self._call("admit", who=who)

    async def cut(self) -> int:
        """Has every client connect and report its role anew. Returns how many links."""
        return int((await self._call("cut"))["cut"])

    async def drop_peer(self, name: str) -> int:
        """Ends the links of a node that is known to be lost. Returns how many."""
        return int((await self._call("drop_peer", name=name))["dropped"])

    async def reload(self) -> list[str]:
        """Has the list of peers read again from the configuration file. Returns their names."""
        return list((await self._call("reload"))["peers"])

    async def close(self) -> None:
        """Closes the connection."""
        async with self._lock:
            self._hang_up()

    async def _call(self, command: str, *, _wait_seconds: float = 0.0, **arguments: Any) -> dict[str, Any]:
        async with self._lock:
            self._last_id += 1
            request = {"id": self._last_id, "command": command, **arguments}
            try:
                async with asyncio.timeout(self._timeout_seconds + _wait_seconds):
                    answer = await self._exchange(request)
            except BaseException as error:
                self._hang_up()
                if not isinstance(error, OSError | ValueError):
                    raise
                raise EndpointError(
                    f"the endpoint at {self._path} does not answer {command!r}",
                    why=str(error) or type(error).__name__,
                    hint="see whether the endpoint unit runs, and its log",
                    code="endpoint.unreachable",
                ) from error
        if answer.get("ok") is True and isinstance(answer.get("result"), dict):
            result: dict[str, Any] = answer["result"]
            return result
        told = answer.get("error")
        error_fields = told if isinstance(told, dict) else {}
        raise EndpointError(
            str(error_fields.get("message", f"{command!r} failed")),
            why=str(error_fields.get("why", "")),
            hint=str(error_fields.get("hint", "")),
            code=str(error_fields.get("code", "endpoint")),
        )

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(str(self._path), limit=MAX_ANSWER_BYTES)
        reader, writer = self._streams
        writer.write(json.dumps(request).encode() + b"\n")
        await writer.drain()
        line = await reader.readline()
        if not line:
            raise ConnectionResetError("it closed the connection")
        answer = json.loads(line)
        if not isinstance(answer, dict) or answer.get("id") not in (request["id"], None):
            raise ValueError(f"unexpected answer: {line[:200]!r}")
        return answer

    def _hang_up(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
