"""The HTTP server under the fakes: a free port of the loopback address, threads that end with it, bounded waits."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

_MOST_BODY_BYTES = 4 * 1024**2
_MOST_REMEMBERED = 1000
_LONGEST_WAIT_SECONDS = 30.0


class Request(NamedTuple):
    """One request as it came. ``headers`` have lower-case names."""

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str]
    http_1_0: bool = False

    def json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        return json.loads(self.body)


class Answer(NamedTuple):
    """One answer. ``delay_seconds`` pass before its first byte; ``no_body`` sends the head alone and hangs up."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    delay_seconds: float = 0.0
    no_body: bool = False


class LoopbackServer:
    """A server on 127.0.0.1, a context manager. Subclasses say what it answers in :meth:`answer`.

    Args:
        port: A port, or 0 for a free one.
    """

    def __init__(self, *, port: int = 0) -> None:
        self.requests: deque[Request] = deque(maxlen=_MOST_REMEMBERED)
        self._running = threading.Event()
        self._running.set()
        self._closed = threading.Event()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.fake = self
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True, name=type(self).__name__
        )
        self._thread.start()

    def answer(self, request: Request) -> Answer:
        """What to answer. Called in a thread of the connection's own."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Requests get no answer until :meth:`thaw` (at most 30 s): like a process that was sent SIGSTOP."""
        self._running.clear()

    def thaw(self) -> None:
        """Answers again."""
        self._running.set()

    def close(self) -> None:
        """Stops listening and cuts every connection."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._running.set()
        self._server.shutdown()
        self._server.server_close()
        self._server.cut_connections()
        self._thread.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handle(self, request: Request) -> Answer:
        self.requests.append(request)
        self._running.wait(_LONGEST_WAIT_SECONDS)
        answer = self.answer(request)
        if answer.delay_seconds > 0:
            self._closed.wait(min(answer.delay_seconds, _LONGEST_WAIT_SECONDS))
        return answer


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    fake: LoopbackServer

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def cut_connections(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is nothing to print."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _LONGEST_WAIT_SECONDS
    server: _Server

    def _any(self) -> None:
        length = self.headers.get("Content-Length", "0")
        size = int(length) if length.isascii() and length.isdigit() else 0
        if size > _MOST_BODY_BYTES:
            self.send_error(413)
            self.close_connection = True
            return
        request = Request(
            self.command,
            urlsplit(self.path).path,
            self.rfile.read(size),
            {name.lower(): value for name, value in self.headers.items()},
            http_1_0=self.request_version == "HTTP/1.0",
        )
        answer = self.server.fake._handle(request)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        if answer.no_body:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if not answer.no_body and self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _any  # noqa: N815 - the standard library's names

    def log_message(self, *_: Any) -> None:
        """Quiet: tests print enough."""
