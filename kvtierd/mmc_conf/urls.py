"""MemCache's addresses: ``tcp://host:port``, and the HTTP service's two forms.

MemCache reads addresses loosely: it stops at the first character of the port that is not a digit, takes a scheme
it does not know as part of a host name, and resolves names once at the start. This module takes the documented
forms only.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Literal, NamedTuple

MIN_PORT = 1025
MAX_PORT = 65535

Reach = Literal["loopback", "any", "private", "public", "name"]

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?", re.ASCII)
_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^:/\[\]\s]*)):(?P<port>\d+)", re.ASCII)


class UrlError(ValueError):
    """An address that is wrong. ``code`` is stable, ``hint`` says what would be right."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


class MmcUrl(NamedTuple):
    """An address in parts. ``scheme`` is empty for the bare form of metrics_url; ``host`` has no brackets."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}" if self.scheme else f"{host}:{self.port}"

    @property
    def reach(self) -> Reach:
        """From where the address can be reached, as far as the text tells."""
        if self.host.rstrip(".").lower() == "localhost":
            return "loopback"
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return "name"
        if address.is_loopback:
            return "loopback"
        if address.is_unspecified:
            return "any"
        return "public" if address.is_global else "private"

    def same_endpoint(self, other: MmcUrl) -> bool:
        """Whether both name the same host and port; ``localhost`` is 127.0.0.1."""
        return self.port == other.port and _canonical(self.host) == _canonical(other.host)


def parse_url(text: str, schemes: tuple[str, ...], *, min_port: int = MIN_PORT) -> MmcUrl:
    """An address in one of the given forms; the scheme "" stands for the bare ``host:port``.

    Raises:
        UrlError: ``url-scheme``, ``url-host``, ``url-port``, ``url-trailing`` or ``url``.
    """
    example = _example(schemes)
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    if scheme not in schemes:
        said = f"has the scheme {scheme!r}" if scheme else "has no scheme"
        raise UrlError("url-scheme", f"{text!r} {said}; expected {example}", f"write {example}")
    match = _ADDRESS.match(rest)
    if not match:
        raise UrlError("url", f"{text!r} is not an address of the form {example}", f"write {example}")
    if match.end() != len(rest):
        extra = rest[match.end() :]
        raise UrlError(
            "url-trailing",
            f"{text!r} goes on after the port with {extra!r}; MemCache reads no further than the digits",
            f"end the value after the port: {text.removesuffix(extra)}",
        )
    host = match["v6"] or match["host"] or ""
    _check_host(text, host, bracketed=match["v6"] is not None, example=example)
    port = int(match["port"]) if len(match["port"]) < 10 else MAX_PORT + 1
    if not min_port <= port <= MAX_PORT:
        raise UrlError(
            "url-port",
            f"{text!r}: the port must be between {min_port} and {MAX_PORT}",
            f"choose a port from {min_port} to {MAX_PORT}",
        )
    return MmcUrl(scheme, host, port)


def _check_host(text: str, host: str, *, bracketed: bool, example: str) -> None:
    if bracketed:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise UrlError(
                "url-host", f"{text!r}: {host!r} is not an IPv6 address", f"write {example}"
            ) from None
        return
    numeric = re.fullmatch(r"[\d.]+", host, re.ASCII) is not None
    if numeric:
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise UrlError(
                "url-host", f"{text!r}: {host!r} is not an IPv4 address", f"write {example}"
            ) from None
    elif not _HOST_NAME.fullmatch(host) or len(host) > 253:
        raise UrlError("url-host", f"{text!r}: {host!r} is not a host name or address", f"write {example}")


def _canonical(host: str) -> str:
    host = host.rstrip(".").lower()
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def _example(schemes: tuple[str, ...]) -> str:
    forms = [
        f"{scheme}://127.0.0.1:PORT" if scheme else "127.0.0.1:PORT" for scheme in schemes if scheme != "etcd"
    ]
    return " or ".join(forms)
