"""Settings of a small cluster, and certificates for it that trustme makes: right ones and wrong ones."""

import datetime
from pathlib import Path

import trustme

from kvtierd.settings import Settings

CLUSTER = "prod"
NAMES = ("host-a", "host-b", "host-c")


def cluster_settings(directory: Path | None = None, *, node="host-a", mode="lease", names=NAMES, **cluster):
    """Settings of one node whose certificate is in this directory (as ca.pem, node.pem, node.key)."""
    made = {"mode": mode, "name": CLUSTER, "peers": [{"name": n, "address": "127.0.0.1"} for n in names]}
    if directory is not None:
        made["tls"] = {
            "ca": str(directory / "ca.pem"),
            "cert": str(directory / "node.pem"),
            "key": str(directory / "node.key"),
        }
    return Settings.model_validate(
        {"node": {"name": node}, "pool": {"dram": "1GiB"}, "cluster": made | cluster}
    )


def put(
    directory: Path, ca: trustme.CA, node: str, *, cluster=CLUSTER, names=None, trust=None, expires_at=None
) -> Path:
    """A node's files. ``trust``: the authorities in its ca.pem, by default the one that signed."""
    directory.mkdir(parents=True, exist_ok=True)
    names = (node, f"{node}.{cluster}.kvtierd") if names is None else names
    issued = ca.issue_cert(*names, not_after=expires_at)
    (directory / "ca.pem").write_bytes(b"".join(a.cert_pem.bytes() for a in trust or [ca]))
    (directory / "node.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key = directory / "node.key"
    key.write_bytes(issued.private_key_pem.bytes())
    key.chmod(0o600)
    return directory


def yesterday() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
