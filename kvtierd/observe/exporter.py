"""The exporter: /metrics for Prometheus, / and /status.json for people. Read-only, on loopback or with mutual TLS."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Self

from kvtierd.errors import KvtierError
from kvtierd.observe.encode import encode
from kvtierd.observe.families import Exported, metric_families
from kvtierd.observe.http_server import HttpServer, Request, Response
from kvtierd.observe.page import load_page
from kvtierd.observe.status import History, status_json
from kvtierd.observe.tls import ServerFiles, ServerTls

OFF: Final = "off"
KEPT_SECONDS: Final = 0.5
"""What was made is given to everybody for so long: many clients cost little more than one."""
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class ExporterError(KvtierError):
    """The exporter cannot be as the settings have it."""

    code = "exporter"


class ListenAddress(NamedTuple):
    """Where the exporter listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, tls: bool) -> Self | None:
        """``HOST:PORT`` with an IP address, ``[...]`` around one of IPv6; ``None`` for "off".

        Raises:
            ExporterError: ``exporter.address``: it is none; ``exporter.plain``: it is not loopback and ``tls`` is false.
        """
        if text == OFF:
            return None
        host, colon, port = text.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        try:
            address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else bare)
        except ValueError:
            address = None
        bracketed = host.startswith("[")
        if (
            not colon
            or address is None
            or (address.version == 6) != bracketed
            or not (port.isascii() and port.isdigit() and 0 <= int(port) <= 65535)
        ):
            raise ExporterError(
                f"[observe] exporter is {text!r}, not an address to listen on",
                hint='write it as "127.0.0.1:9476" or "[::1]:9476"; "off" for none',
                code="exporter.address",
            )
        if not address.is_loopback and not tls:
            raise ExporterError(
                f"[observe] exporter = {text!r} would show this node to anybody in the network",
                why="it is not a loopback address, and there are no certificates",
                hint="write [observe] tls = { ca, cert, key }: whoever asks needs a certificate too; or listen on 127.0.0.1",
                code="exporter.plain",
            )
        return cls(str(address), int(port))


class Exporter:
    """Serves what ``look`` says.

    Args:
        look: The state now; it must not block. Called at most twice a second for each page.
        tls: For an address that is not loopback: whoever asks must show a certificate that ``ca`` has signed.
        clock: A monotonic clock.
    """

    def __init__(
        self,
        look: Callable[[], Exported],
        *,
        tls: ServerFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.history = History()
        self._look = look
        self._files = tls
        self._tls: ServerTls | None = None
        self._clock = clock
        self._document = load_page()
        self._kept: dict[str, tuple[float, bytes]] = {}
        self._server = HttpServer(
            {"/": self._page, "/metrics": self._metrics, "/status.json": self._status}, local_only=tls is None
        )

    @property
    def refused(self) -> int:
        """Requests that were not answered as asked for."""
        return self._server.refused

    @property
    def tls_problem(self) -> str:
        """Why renewed certificates could not be read; "" when they could."""
        return self._tls.problem if self._tls is not None else ""

    async def start(self, address: ListenAddress) -> int:
        """Begins to listen; the port, when that was 0.

        Raises:
            ExporterError: ``exporter.listen``: the port cannot be had; ``exporter.tls``: a certificate cannot be used.
        """
        if self._files is not None:
            try:
                self._tls = ServerTls(self._files)
            except OSError as error:
                raise ExporterError(
                    "the exporter's certificates cannot be used",
                    why=f"{getattr(error, 'filename', None) or self._files.cert}: {error.strerror or error}",
                    hint="[observe] tls names them",
                    code="exporter.tls",
                ) from error
        context = self._tls.context if self._tls is not None else None
        try:
            return await self._server.start(address.host, address.port, context)
        except OSError as error:
            raise ExporterError(
                f"the exporter cannot listen on {address.host}:{address.port}",
                why=error.strerror or str(error),
                hint="[observe] exporter names another address",
                code="exporter.listen",
            ) from error

    async def close(self) -> None:
        """Stops listening."""
        await self._server.close()

    def note(self) -> None:
        """Adds to the history and reads renewed certificates, if it is time: to be called after every new picture."""
        if self._tls is not None:
            self._tls.renew()
        with contextlib.suppress(Exception):  # the history is for show
            if (picture := self._look().picture) is not None:
                self.history.add(picture)

    def _metrics(self, request: Request) -> Response:
        openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
        kind = OPENMETRICS if openmetrics else TEXT
        return Response(
            self._made(kind, lambda: encode(metric_families(self._look()), openmetrics=openmetrics)), kind
        )

    def _status(self, _: Request) -> Response:
        body = self._made("status", lambda: status_json(self._look(), self.history))
        return Response(body, "application/json")

    def _page(self, _: Request) -> Response:
        more = {
            "Content-Security-Policy": self._document.policy,
            "Referrer-Policy": "no-referrer",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        return Response(self._document.body, "text/html; charset=utf-8", headers=more)

    def _made(self, what: str, make: Callable[[], bytes]) -> bytes:
        now = self._clock()
        kept = self._kept.get(what)
        if kept is None or not 0 <= now - kept[0] < KEPT_SECONDS:
            kept = self._kept[what] = (now, make())
        return kept[1]
