"""PURE: MemCache's own TLS: which keys turn it on, and which files it reads.

Measured on MemCache 1.3.0: RSA below 3072 bits is refused; key and certificate must have mode 0400 and be real files; a
directory with ``libssl.so`` and ``libcrypto.so``, mode 0500 at most, must be named for each block. A client or HTTP client
without a certificate of the authority is refused. Now and then (6 of 24 joins) the config store cannot send its first answer
over TLS ("Failed to send msg to peer"); the joiner then tries again 28 s later, so a join needs patience.
"""

from __future__ import annotations

from typing import Final, Literal

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.lookup import find_key
from kvtierd.mmc_conf.versions import resolve_version
from kvtierd.plan.model import HttpTls, MemcacheTls
from kvtierd.settings import Settings

DIRECTORY: Final = "memcache-tls"  # in the runtime directory
LIBRARIES: Final = ("libssl.so", "libcrypto.so")
CA, CERT, KEY = "ca.pem", "node.pem", "node.key"

OPENSSL: Final = "openssl"  # the libraries' directory in it

_HTTP = "ock.mmc.metrics.tls"
BLOCKS: Final = ("ock.mmc.tls", "ock.mmc.config_store.tls", _HTTP)


def plan_tls(settings: Settings, version: str, node: str) -> MemcacheTls | None:
    """The files of this node; ``None`` without ``[meta] tls``."""
    if not settings.meta.tls or settings.meta.endpoint == "relay":
        return None  # with the endpoint it is refused
    files, cluster = settings.cluster.tls, settings.cluster.name
    http = HttpTls(ca=files.ca, cert=files.cert, key=files.key, server_name=f"{node}.{cluster}.kvtierd")
    return MemcacheTls(
        directory=f"{settings.paths.runtime}/{DIRECTORY}",
        ca=files.ca,
        cert=files.cert,
        key=files.key,
        openssl=settings.meta.openssl,
        user=settings.meta.user,
        http=http if _known(f"{_HTTP}.enable", version) else None,
    )


def tls_keys(tls: MemcacheTls | None, kind: Literal["meta", "local"], version: str) -> dict[str, str]:
    """The keys that turn TLS on in a file of this kind."""
    if tls is None:
        return {}
    keys: dict[str, str] = {}
    for block in BLOCKS:
        if block == _HTTP and (kind == "local" or not _known(f"{_HTTP}.enable", version)):
            continue
        keys |= {
            f"{block}.enable": "true",
            f"{block}.ca.path": f"{tls.directory}/{CA}",
            f"{block}.cert.path": f"{tls.directory}/{CERT}",
            f"{block}.key.path": f"{tls.directory}/{KEY}",
            f"{block}.package.path": f"{tls.directory}/{OPENSSL}",
        }
    return keys


def _known(key: str, version: str) -> bool:
    spec = find_key("meta", key)
    try:
        return spec is not None and spec.known_in(resolve_version(version))
    except ConfError:
        return False
