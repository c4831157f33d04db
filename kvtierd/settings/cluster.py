"""[cluster]: several hosts, one pool; its peers, certificates and etcd."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvtierd.settings.section import AbsolutePath, Duration, Port, Section, UnitName


class PeerSettings(Section):
    """One entry of [cluster] peers."""

    name: UnitName = Field(description="node name", examples=["host-a"])
    address: str = Field(description="address of the node", examples=["10.0.0.1"])
    voter: bool = Field(True, description="takes part in elections (mode lease)")
    witness: bool = Field(
        False, description="only votes: a machine without NPUs and MemCache, which runs kvtierd --witness"
    )

    @model_validator(mode="after")
    def _address(self) -> Self:
        if not self.address or any(c.isspace() for c in self.address):
            raise ValueError(f"{self.address!r} is not an address")
        if self.witness and not self.voter:
            raise ValueError("a witness that is no voter does nothing; leave it out")
        return self


class TlsSettings(Section):
    """[cluster] tls: this node's certificate; kvtierctl certs makes them."""

    ca: AbsolutePath = Field(
        "/etc/kvtierd/tls/ca.pem", description="certificate that all nodes' certificates are signed with"
    )
    cert: AbsolutePath = Field("/etc/kvtierd/tls/node.pem", description="this node's certificate")
    key: AbsolutePath = Field("/etc/kvtierd/tls/node.key", description="its key, readable by root only")


class EtcdTlsSettings(Section):
    """[cluster.etcd] tls: certificates for talking to etcd; without this table there is no TLS, which is for loopback.

    An etcd with users (``auth enable``) takes the certificate's common name for the user's.
    """

    ca: AbsolutePath = Field(
        "/etc/kvtierd/tls/etcd-ca.pem", description="signs the certificates of etcd's members"
    )
    cert: AbsolutePath = Field("/etc/kvtierd/tls/etcd.pem", description="this node's certificate as a client")
    key: AbsolutePath = Field("/etc/kvtierd/tls/etcd.key", description="its key, readable by root only")


class EtcdSettings(Section):
    """[cluster] etcd: an etcd that you run, for mode etcd."""

    endpoints: tuple[str, ...] = Field(
        (), description="host:port of its members", examples=[["10.0.0.1:2379", "10.0.0.2:2379"]]
    )
    prefix: str = Field("/kvtierd", description="its keys are under PREFIX/NAME OF THE CLUSTER/")
    tls: EtcdTlsSettings | None = None

    @model_validator(mode="after")
    def _well_formed(self) -> Self:
        for endpoint in self.endpoints:
            host, _, port = endpoint.rpartition(":")
            if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(
                    f"{endpoint!r} is not HOST:PORT (without http://; TLS is for the table tls to say)"
                )
        if len(set(self.endpoints)) != len(self.endpoints):
            raise ValueError("an endpoint is given twice")
        if not self.prefix.startswith("/"):
            raise ValueError(f"prefix {self.prefix!r} does not begin with /")
        return self


class ClusterSettings(Section):
    """[cluster]: several hosts, one pool."""

    mode: Literal["standalone", "static", "lease", "etcd"] = Field(
        "standalone",
        description="standalone: one host; static: the named master; lease: 3 or 5 voters elect it; etcd: by your etcd",
        examples=["standalone", "static", "lease", "etcd"],
    )
    name: UnitName = Field("kvtier", description="name of the cluster", examples=["prod-1"])
    master: UnitName | None = Field(None, description="the master, mode static", examples=["host-a"])
    peers: tuple[PeerSettings, ...] = Field(
        (), description="all nodes of the cluster, this one included",
        examples=[[{"name": "host-a", "address": "10.0.0.1"}]],
    )  # fmt: skip
    lease: Duration = Field(
        6.0,
        ge=1.0,
        le=60.0,
        description="how long a master may be out of touch (modes lease, etcd)",
        examples=["6s"],
    )
    port: Port = Field(5500, description="port the nodes' daemons talk to each other at", examples=[5500])
    endpoint_port: Port = Field(
        5501, description="port the nodes' endpoints reach the master's at", examples=[5501]
    )
    tls: TlsSettings = TlsSettings()
    insecure: bool = Field(
        False,
        description="talk between nodes without certificates: anybody in the network can read and write the KV",
    )
    etcd: EtcdSettings = EtcdSettings()

    @property
    def nodes(self) -> tuple[PeerSettings, ...]:
        """The peers that may run engines and hold a part of the pool."""
        return tuple(p for p in self.peers if not p.witness)

    @property
    def voters(self) -> tuple[str, ...]:
        """The peers that elect, by name, in the order of the settings."""
        return tuple(p.name for p in self.peers if p.voter)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [p.name for p in self.peers]
        if len(set(names)) != len(names):
            raise ValueError("two peers have the same name")
        if self.mode == "standalone" and self.peers:
            raise ValueError('peers are given but mode is "standalone"; write mode = "static"')
        if self.mode != "standalone" and not self.peers:
            raise ValueError(f"mode {self.mode} needs peers")
        if self.mode == "static" and (self.master is None or self.master not in names):
            raise ValueError(f"mode static needs master = one of the peers ({', '.join(names)})")
        if self.mode == "static" and any(p.witness and p.name == self.master for p in self.peers):
            raise ValueError("a witness cannot be the master")
        if self.mode in {"lease", "etcd"} and self.master is not None:
            raise ValueError(f"mode {self.mode} elects its master; leave master out")
        if self.mode == "lease" and len(self.voters) not in {3, 5}:
            raise ValueError(_why_not_voters(self.voters))
        if self.mode == "etcd" and not self.etcd.endpoints:
            raise ValueError("mode etcd needs etcd = { endpoints = [...] }")
        if self.mode != "lease" and any(p.witness for p in self.peers):
            raise ValueError("a witness only votes, which is for mode lease")
        return self


def _why_not_voters(voters: tuple[str, ...]) -> str:
    listed = ", ".join(voters) or "none"
    if len(voters) < 3:
        return (
            f"mode lease needs 3 or 5 voters ({listed}): two that lose sight of each other cannot know which of them"
            ' still serves; for two hosts write mode = "static", or add a third machine with witness = true'
        )
    return (
        f"mode lease needs 3 or 5 voters, not {len(voters)} ({listed}): write voter = false for the others;"
        " they follow the master all the same"
    )
