"""gRPC between nodes over mutual TLS: this node's credentials, and whose call it is that comes in.

Who a node is, its certificate says, not its message: a caller must be one of the peers of the settings, by the names
in its certificate (``kvtierd.endpoint.names``). Certificate files that change are read again without a restart. With
``[cluster] insecure = true`` there is no TLS, and a caller is who it claims to be.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from kvtierd.cluster.identity import read_identity
from kvtierd.endpoint.names import certificate_names, speaks_for
from kvtierd.errors import ClusterError, EndpointError, KvtierError
from kvtierd.settings.cluster import ClusterSettings, TlsSettings

_log = logging.getLogger(__name__)
LOOK_EVERY_SECONDS = 1.0
OURS = ".kvtierd"


class PeerTls:
    """What this node shows the others and what it asks of them.

    ``generation`` grows when other files have been read. A channel keeps the certificate that it began with, so whoever
    holds one makes a new one then. ``problem`` says why files could not be read the last time, "" when they could; what
    was read before stays in use.
    """

    def __init__(self, cluster: ClusterSettings) -> None:
        """Reads nothing yet.

        Args:
            cluster: May be replaced (``self.cluster``) when the settings are read again.
        """
        self.cluster = cluster
        self.problem = ""
        self._generation = 0
        self.handshakes = 0
        self._files: _Files | None = None
        self._looked_at = float("-inf")
        self._lock = threading.Lock()  # gRPC asks for certificates in a thread of its own

    @property
    def generation(self) -> int:
        """Looks at the files, once a second at most."""
        if not self.cluster.insecure:
            self._look()
        return self._generation

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Lets the server listen at ``host:port``; the port, when that was 0.

        Raises:
            ClusterError: a certificate cannot be used (``certs.*``); ``cluster.listen``: the port cannot be had.
        """
        try:
            if self.cluster.insecure:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._server_credentials())
        except RuntimeError as error:
            raise _cannot_listen(address, str(error)) from None
        if port == 0:
            raise _cannot_listen(address, "")
        return port

    def channel(
        self, peer: str, *, port: int | None = None, options: Sequence[tuple[str, Any]] = ()
    ) -> grpc.aio.Channel:
        """A channel to a listed peer, which nobody else can answer on.

        Args:
            peer: Its name.
            port: By default ``[cluster] port``.
            options: Further channel arguments.

        Raises:
            ClusterError: ``cluster.no-such-node``; a certificate cannot be used (``certs.*``).
        """
        listed = next((p for p in self.cluster.peers if p.name == peer), None)
        if listed is None:
            raise ClusterError(f"{peer} is not among the peers", code="cluster.no-such-node")
        host = f"[{listed.address}]" if ":" in listed.address else listed.address
        target = f"{host}:{port or self.cluster.port}"
        arguments: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0), *options]
        if self.cluster.insecure:
            return grpc.aio.insecure_channel(target, options=arguments)
        files = self._usable()
        arguments.append(("grpc.ssl_target_name_override", files.name_of(peer, self.cluster.name)))
        credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.certificate)
        return grpc.aio.secure_channel(target, credentials, options=arguments)

    def identify(self, auth_context: Mapping[str, Iterable[bytes]], claimed: str = "") -> str:
        """Which listed peer a caller is, by ``ServicerContext.auth_context()``.

        Args:
            auth_context: Of the call.
            claimed: Who its message says it is from; "" when the message does not say.

        Raises:
            ClusterError: ``cluster.not-listed``, ``cluster.not-that-node``, ``cluster.no-certificate``. The caller is to
                be refused.
        """
        listed = [peer.name for peer in self.cluster.peers]
        if claimed and claimed not in listed:
            raise _not_listed(claimed)
        if self.cluster.insecure:
            if not claimed:
                raise ClusterError(
                    "the caller does not say who it is", code="cluster.no-certificate"
                )  # fmt: skip
            return claimed
        names = _texts(auth_context.get("peer_dns", ()))
        # A resumed session is one whose certificate was looked at some other time.
        if not _texts(auth_context.get("x509_pem_cert", ())) or "true" in _texts(
            auth_context.get("ssl_session_reused", ())
        ):
            raise ClusterError("the caller has shown no certificate", code="cluster.no-certificate")
        if claimed and speaks_for(names, claimed, self.cluster.name):
            return claimed  # without a look at the others: it is asked with every call
        known_by = [name for name in listed if speaks_for(names, name, self.cluster.name)]
        shown = ", ".join(names) or "no names"
        if claimed:
            raise ClusterError(
                f"the caller says it is {claimed}, but its certificate is not: {shown}",
                hint="each node needs its own certificate: kvtierctl certs issue",
                code="cluster.not-that-node",
            )
        if len(known_by) != 1:
            raise _not_listed(shown)
        return known_by[0]

    # -- inside

    def _server_credentials(self) -> grpc.ServerCredentials:
        served = self._usable()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """Asked with every handshake; ``None``: as before."""
            nonlocal served
            self.handshakes += 1
            try:
                self._look()
                files = self._files
                if files is None or files is served:
                    return None
                configuration = files.configuration()
            except (OSError, ValueError, KvtierError) as error:
                _log.warning("certificates: %s", error)
                return None
            served = files
            return configuration

        return grpc.dynamic_ssl_server_credentials(
            served.configuration(),
            renewed,  # type: ignore[arg-type]  # the stubs do not know of None
            require_client_authentication=True,
        )

    def _usable(self) -> _Files:
        self._look()
        if self._files is None:
            self._files = _Files.read(self.cluster.tls)  # says what is wrong
            self._generation += 1
        return self._files

    def _look(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at < LOOK_EVERY_SECONDS:
                return
            self._looked_at = now
            tls = self.cluster.tls
            if self._files is not None and self._files.stamp == _stamp(tls):
                self.problem = ""
                return
            try:
                files = _Files.read(tls)
            except ClusterError as error:
                if error.message != self.problem:
                    _log.warning("certificates: %s", error.message)
                self.problem = error.message
                return
            self.problem = ""
            if self._files is not None:
                _log.info("certificate %s read again", tls.cert)
            self._files = files
            self._generation += 1


class _Files:
    """Three files that belong together, as they were at one time."""

    def __init__(
        self, stamp: object, ca: bytes, certificate: bytes, key: bytes, dns: tuple[str, ...]
    ) -> None:
        self.stamp = stamp
        self.ca = ca
        self.certificate = certificate
        self.key = key
        self._ours = any(name.endswith(OURS) for name in dns)

    @classmethod
    def read(cls, tls: TlsSettings) -> _Files:
        """Raises ``ClusterError`` (``certs.*``) when they cannot be used, or are just being replaced."""
        stamp = _stamp(tls)
        own = read_identity(tls)
        try:
            ca, certificate, key = (Path(path).read_bytes() for path in (tls.ca, tls.cert, tls.key))
        except OSError as error:
            raise ClusterError(f"{error.filename}: {error.strerror}", code="certs.unreadable") from None
        if stamp is None or _stamp(tls) != stamp:
            raise ClusterError("the certificate files are just being replaced", code="certs.unreadable")
        return cls(stamp, ca, certificate, key, own.dns_names)

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """For a server."""
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.certificate)], root_certificates=self.ca
        )

    def name_of(self, peer: str, cluster: str) -> str:
        """The name that a peer's certificate must carry.

        With certificates of ours it is the one with the cluster in it: a node of another cluster of the same authority
        may have the same plain name. Certificates from elsewhere have the plain one only.
        """
        try:
            plain, full = certificate_names(peer, cluster)
        except EndpointError as error:
            raise ClusterError(error.message, hint=error.hint, code="cluster.names") from None
        return full if self._ours else plain


def _stamp(tls: TlsSettings) -> object:
    try:
        return [
            (path, found.st_mtime_ns, found.st_size, found.st_ino)
            for path in (tls.ca, tls.cert, tls.key)
            for found in (Path(path).stat(),)
        ]
    except OSError:
        return None


def _texts(values: Iterable[bytes]) -> list[str]:
    return [value.decode("ascii", "replace") for value in values]


def _not_listed(who: str) -> ClusterError:
    return ClusterError(
        f"the caller is not among the peers: {who}",
        hint="all nodes need the same [cluster] name and peers",
        code="cluster.not-listed",
    )


def _cannot_listen(address: str, why: str) -> ClusterError:
    return ClusterError(
        f"cannot listen at {address}",
        why=why,
        hint="is another kvtierd running, or the port taken? [cluster] port",
        code="cluster.listen",
    )
