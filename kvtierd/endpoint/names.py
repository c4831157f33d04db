"""The names in a node's certificate. Pure: whoever issues certificates and whoever checks them use this.

A node's certificate carries the DNS names ``<node>`` and ``<node>.<cluster>.kvtierd`` and its IP address. The long
name is what counts: an authority that signs for two clusters must not make a node of one a node of the other. A
certificate from elsewhere, which has no name under ``.kvtierd``, may speak for the node whose plain name it carries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvtierd.errors import EndpointError

MAX_NAME_BYTES = 63
_SUFFIX = ".kvtierd"
_NODE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_CLUSTER = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def certificate_names(node: str, cluster: str) -> tuple[str, str]:
    """The DNS names for this node's certificate: the plain one and the one that counts.

    Raises:
        EndpointError: (``endpoint.names``) a name has other characters than small letters, digits, ``.``, ``_`` and
            ``-``, or more than 63; or the cluster's has a dot, with which ``a.b`` of ``c`` would be ``a`` of ``b.c``.
    """
    if not _NODE.fullmatch(node):
        raise EndpointError(f"{node!r} cannot be a node's name in a certificate", code="endpoint.names")
    if not _CLUSTER.fullmatch(cluster):
        raise EndpointError(
            f"{cluster!r} cannot be a cluster's name in a certificate",
            hint="small letters, digits, '_' and '-', at most 63, no dot",
            code="endpoint.names",
        )
    return node, f"{node}.{cluster}{_SUFFIX}"


def speaks_for(dns_names: Iterable[str], node: str, cluster: str) -> bool:
    """Whether a (verified) certificate with these DNS names is this node's."""
    carried = {name.lower() for name in dns_names}
    plain, full = certificate_names(node, cluster)
    if any(name.endswith(_SUFFIX) for name in carried):
        return full in carried
    return plain in carried


def dns_names(certificate: object) -> tuple[str, ...]:
    """The DNS names of a certificate in the form of ``SSLObject.getpeercert()``; none when there is none."""
    if not isinstance(certificate, dict):
        return ()
    return tuple(value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS")
