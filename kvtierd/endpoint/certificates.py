"""TLS between endpoints: contexts from three PEM files, made anew when a file changes; why a handshake failed.

TLS 1.3 only, both sides with certificates, no resumption: a resumed session would not look at the certificate again.
Names are checked by ``names.speaks_for`` after the handshake and not by ``ssl``: the asking side is named in the hello.
"""

from __future__ import annotations

import logging
import ssl
import time
from pathlib import Path
from typing import Any

from kvtierd.endpoint import hop
from kvtierd.endpoint.targets import TlsFiles
from kvtierd.errors import EndpointError

_log = logging.getLogger(__name__)
LOOK_EVERY_SECONDS = 1.0

# OpenSSL's numbers for what is wrong with a certificate.
_BY_VERIFY_CODE = {
    9: "not-yet-valid",
    10: "expired",
    18: "wrong-ca",
    19: "wrong-ca",
    20: "wrong-ca",
    21: "wrong-ca",
}
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "PACKET_LENGTH_TOO_LONG")


def refusal_of(error: BaseException) -> str:
    """The reason, for ``status``, that a handshake failed with this error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _BY_VERIFY_CODE.get(error.verify_code, "bad-certificate")
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return "no-certificate"
        if reason in _NOT_TLS:
            return "not-tls"
        if "ALERT" in reason:
            return "refused-by-peer"
        if reason in ("UNSUPPORTED_PROTOCOL", "NO_APPLICATION_PROTOCOL", "NO_SHARED_CIPHER"):
            return "tls-version"
        return "bad-handshake"
    if isinstance(
        error, TimeoutError | ConnectionAbortedError
    ):  # asyncio says the latter when its time is over
        return "slow"
    return "hung-up"


class Certificates:
    """The contexts of this node.

    ``problem`` says why the files could not be read the last time, and is empty when they could; what was read before
    that stays in use. Files are looked at once a second at most, when a connection is made.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._server: ssl.SSLContext | None = None
        self._client: ssl.SSLContext | None = None
        self._signature: object = None
        self._looked_at = float("-inf")
        self.loaded_unix_seconds: float | None = None
        self.problem = ""

    def server(self) -> ssl.SSLContext:
        """For links that come in. Raises ``EndpointError`` (``endpoint.tls``) when no files could ever be read."""
        self._look()
        return self._usable(self._server)

    def client(self) -> ssl.SSLContext:
        """For links that go out. Raises ``EndpointError`` as ``server`` does."""
        self._look()
        return self._usable(self._client)

    def as_dict(self) -> dict[str, Any]:
        """The ``tls`` object of ``status``."""
        return {"loaded_unix_seconds": self.loaded_unix_seconds, "problem": self.problem}

    def _usable(self, context: ssl.SSLContext | None) -> ssl.SSLContext:
        if context is None:
            raise EndpointError(
                f"no TLS between nodes: {self.problem}",
                hint="put ca, cert and key in place; they are read again without a restart",
                code="endpoint.tls",
            )
        return context

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_EVERY_SECONDS:
            return
        self._looked_at = now
        try:
            signature = [
                (path, stat.st_mtime_ns, stat.st_size, stat.st_ino)
                for path in (self._files.ca, self._files.cert, self._files.key)
                for stat in (Path(path).stat(),)
            ]
            if signature == self._signature:
                self.problem = ""
                return
            server, client = self._make(ssl.PROTOCOL_TLS_SERVER), self._make(ssl.PROTOCOL_TLS_CLIENT)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            problem = f"{getattr(error, 'filename', None) or 'certificate files'}: {_text(error)}"
            if problem != self.problem:
                _log.warning("TLS between nodes: %s", problem)
            self.problem = problem
            return
        self._signature, self._server, self._client = signature, server, client
        self.loaded_unix_seconds, self.problem = time.time(), ""
        _log.info("certificate %s read", self._files.cert)

    def _make(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cafile=self._files.ca)
        # A password would be asked for on the terminal.
        context.load_cert_chain(self._files.cert, self._files.key, password=lambda: b"")
        context.set_alpn_protocols([hop.ALPN])
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        return context


def _text(error: Exception) -> str:
    reason = getattr(error, "strerror", None) or getattr(error, "reason", None)
    return str(reason or error)
