"""What is wrong with this node's own certificate, found before another node finds it.

The node shakes hands with itself in memory, once in each role: what OpenSSL says there is what the other nodes' OpenSSL
would say. Only the standard library is needed, so the daemon can afford to look every hour.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import stat
import time
from pathlib import Path
from typing import Any

import psutil

from kvtierd.endpoint.names import certificate_names, dns_names, speaks_for
from kvtierd.errors import ClusterError, EndpointError
from kvtierd.settings import Settings
from kvtierd.settings.cluster import TlsSettings

EXPIRES_SOON_SECONDS = 30 * 86400.0
_DAY_SECONDS = 86400.0
_IGNORE_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which ssl has no name for
_MOST_FLIGHTS = 20
_RENEW = "issue a new one with kvtierctl certs issue, and put it in place; no restart is needed"
# OpenSSL's numbers for "no way from this certificate to one that is trusted".
_WRONG_CA = frozenset({2, 18, 19, 20, 21})
_WRONG_PURPOSE = 26


@dataclasses.dataclass(frozen=True, slots=True)
class IdentityProblem:
    """One thing that is wrong. ``fatal``: other nodes refuse this one because of it, or anybody could be this one."""

    code: str
    message: str
    hint: str = ""
    fatal: bool = True


def own_name(settings: Settings) -> str:
    """This node's name, found as the plan finds it: as written, by its address among the peers, else the host's."""
    if settings.node.name:
        return settings.node.name
    mine = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    if settings.node.address:
        mine.add(settings.node.address)
    by_address = (peer.name for peer in settings.cluster.peers if peer.address in mine)
    return next(by_address, socket.gethostname())


@dataclasses.dataclass(frozen=True, slots=True)
class OwnCertificate:
    """This node's certificate as another node sees it; ``ssl``'s form of certificates.

    Attributes:
        certificate: ``SSLSocket.getpeercert()``.
        authorities: Those that are trusted, ``SSLContext.get_ca_certs()``.
    """

    certificate: dict[str, Any]
    authorities: list[dict[str, Any]]

    @property
    def dns_names(self) -> tuple[str, ...]:
        """The DNS names it carries."""
        return dns_names(self.certificate)


def check_identity(
    settings: Settings, *, node: str = "", now_unix_seconds: float | None = None
) -> list[IdentityProblem]:
    """Everything that is wrong with this node's certificate, worst first; nothing for a node that needs none.

    Args:
        settings: Name the files.
        node: This node; by default what ``own_name`` finds.
        now_unix_seconds: Wall clock; by default the present.
    """
    cluster = settings.cluster
    if cluster.mode == "standalone" or cluster.insecure:
        return []
    tls = cluster.tls
    found = [p for p in (_unreadable(tls.ca), _unreadable(tls.cert), _unreadable(tls.key)) if p]
    if found:
        return found
    now = time.time() if now_unix_seconds is None else now_unix_seconds
    found = _exposed(tls.key)
    try:
        own = read_identity(tls)
    except ClusterError as error:
        return [IdentityProblem(error.stable_code, error.message, error.hint), *found]
    found += _times(tls.cert, own.certificate, now)
    found += _authority_times(tls.ca, own, now)
    found += _names(tls.cert, own, node or own_name(settings), cluster.name)
    return sorted(found, key=lambda problem: not problem.fatal)


def read_identity(tls: TlsSettings) -> OwnCertificate:
    """Shakes hands with itself. Whether the certificate is valid at this time is not looked at.

    Raises:
        ClusterError: ``certs.missing``, ``certs.unreadable``, ``certs.key-mismatch``, ``certs.wrong-ca``,
            ``certs.purpose``, ``certs.weak``, ``certs.refused``.
    """
    for path in (tls.ca, tls.cert, tls.key):
        if problem := _unreadable(path):
            raise ClusterError(problem.message, hint=problem.hint, code=problem.code)
    server, client = _contexts(tls)
    try:
        certificate = _shake_hands(server, client)
    except ssl.SSLError as error:
        raise _refused(error, tls) from None
    return OwnCertificate(certificate, client.get_ca_certs())


def _unreadable(path: str) -> IdentityProblem | None:
    try:
        with Path(path).open("rb"):
            return None
    except FileNotFoundError:
        hint = "make certificates with kvtierctl certs init and certs issue, and copy this node's there"
        return IdentityProblem("certs.missing", f"{path} is missing", hint)
    except OSError as error:
        return IdentityProblem("certs.unreadable", f"{path} cannot be read: {error.strerror or error}")


def _exposed(path: str) -> list[IdentityProblem]:
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if not mode & 0o077:
        return []
    message = f"{path} has mode {mode:04o}: who can read it can be this node"
    return [IdentityProblem("certs.key-readable", message, f"chmod 600 {path}")]


def _contexts(tls: TlsSettings) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in contexts:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= _IGNORE_TIME
        try:
            context.load_verify_locations(cafile=tls.ca)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise ClusterError(
                f"{tls.ca} is not a certificate in PEM form: {_text(error)}", code="certs.unreadable"
            ) from None
        try:
            # A password would be asked for on the terminal.
            context.load_cert_chain(tls.cert, tls.key, password=lambda: b"")
        except (ssl.SSLError, ValueError, OSError) as error:
            raise _no_pair(tls, error) from None
    return contexts


def _no_pair(tls: TlsSettings, error: Exception) -> ClusterError:
    reason = getattr(error, "reason", "")
    if reason == "KEY_VALUES_MISMATCH":
        hint = "both are made by one kvtierctl certs issue; put the pair that belongs together there"
        return ClusterError(f"{tls.key} is not the key of {tls.cert}", hint=hint, code="certs.key-mismatch")
    if reason in {"EE_KEY_TOO_SMALL", "CA_MD_TOO_WEAK", "CA_KEY_TOO_SMALL"}:
        return ClusterError(
            f"{tls.cert} is too weak for OpenSSL: {_text(error)}", hint=_RENEW, code="certs.weak"
        )
    return ClusterError(
        f"{tls.cert} and {tls.key} are not a certificate and its key in PEM form: {_text(error)}",
        code="certs.unreadable",
    )


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """The certificate as a client sees it. Raises ``ssl.SSLError`` when either side refuses it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(to_client, to_server, server_side=False)
    answers = server.wrap_bio(to_server, to_client, server_side=True)
    unfinished = [asks, answers]
    for _ in range(_MOST_FLIGHTS):
        for side in tuple(unfinished):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
                unfinished.remove(side)
        if not unfinished:
            break
    return asks.getpeercert() or {}


def _refused(error: ssl.SSLError, tls: TlsSettings) -> ClusterError:
    code = getattr(error, "verify_code", 0)
    if code in _WRONG_CA:
        return ClusterError(
            f"{tls.cert} was not signed by {tls.ca}",
            hint="all nodes need the same ca.pem, and certificates that were issued with it",
            code="certs.wrong-ca",
        )
    if code == _WRONG_PURPOSE:
        return ClusterError(
            f"{tls.cert} is not for servers and clients both", hint=_RENEW, code="certs.purpose"
        )
    return ClusterError(f"{tls.cert} would be refused: {_text(error)}", hint=_RENEW, code="certs.refused")


def _times(path: str, certificate: dict[str, Any], now: float) -> list[IdentityProblem]:
    begins, ends = validity(certificate)
    if now < begins:
        message = f"{path} is not valid yet, by this node's clock, for {(begins - now) / 3600:.1f} h"
        return [IdentityProblem("certs.not-yet-valid", message, "look at the clock")]
    if now >= ends:
        return [IdentityProblem("certs.expired", f"{path} expired on {_day(ends)}", _RENEW)]
    if ends - now < EXPIRES_SOON_SECONDS:
        message = f"{path} expires on {_day(ends)}, in {int((ends - now) / _DAY_SECONDS)} days"
        return [IdentityProblem("certs.expires-soon", message, _RENEW, fatal=False)]
    return []


def _authority_times(path: str, own: OwnCertificate, now: float) -> list[IdentityProblem]:
    """The authority that signed ours; others in the file may be on their way in or out."""
    issuers = [a for a in own.authorities if a.get("subject") == own.certificate.get("issuer")]
    if not issuers:
        return []
    ends = max(validity(issuer)[1] for issuer in issuers)
    hint = "make a new authority, add its ca.pem to every node's, then issue new certificates"
    if now >= ends:
        return [IdentityProblem("certs.authority-expired", f"{path} expired on {_day(ends)}", hint)]
    if ends - now < EXPIRES_SOON_SECONDS:
        message = f"{path} expires on {_day(ends)}, and all certificates of the cluster with it"
        return [IdentityProblem("certs.authority-expires-soon", message, hint, fatal=False)]
    return []


def _names(path: str, own: OwnCertificate, node: str, cluster: str) -> list[IdentityProblem]:
    try:
        wanted = certificate_names(node, cluster)[1]
        if speaks_for(own.dns_names, node, cluster):
            return []
    except EndpointError as error:
        return [IdentityProblem("certs.name", error.message, error.hint)]
    return [
        IdentityProblem(
            "certs.name",
            f"{path} is not {wanted}'s: its names are {', '.join(own.dns_names) or 'none'}",
            "put this node's own certificate there",
        )
    ]


def validity(certificate: dict[str, Any]) -> tuple[float, float]:
    """From when until when a certificate holds, in Unix seconds."""
    return (
        ssl.cert_time_to_seconds(certificate["notBefore"]),
        ssl.cert_time_to_seconds(certificate["notAfter"]),
    )


def _day(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(unix_seconds))


def _text(error: Exception) -> str:
    return str(getattr(error, "verify_message", "") or getattr(error, "reason", "") or error)
