import datetime

import pytest

from kvtierd.cluster.certs import make_authority

from .small_host import NOW, SmallHost

DAY = 86400.0


def settings(mode='mode = "static"\nmaster = "a"', peers=("10.0.0.1", "10.0.0.2"), name="a", more=""):
    listed = ", ".join(f'{{ name = "{n}", address = "{p}" }}' for n, p in zip("abcde", peers, strict=False))
    return f'[node]\nname = "{name}"\nseries = "emulated"\n[cluster]\nname = "prod"\n{mode}\npeers = [{listed}]\n{more}'


LEASE = 'mode = "lease"\n'
THREE = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


@pytest.fixture
def host(tmp_path):
    return SmallHost(tmp_path)


@pytest.mark.parametrize(
    ("check", "text", "severity"),
    [
        ("self", settings(), "ok"),
        ("self", settings(name="z"), "fail"),
        ("addresses", settings(), "ok"),
        ("addresses", settings(peers=("127.0.0.1", "10.0.0.2")), "fail"),
        ("addresses", settings(peers=("localhost", "10.0.0.2")), "fail"),
        ("addresses", settings(peers=("0.0.0.0", "10.0.0.2")), "fail"),
        ("addresses", settings(peers=("10.0.0.2", "10.0.0.2")), "fail"),
        ("addresses", settings(peers=("host-a.example", "10.0.0.2")), "ok"),
        ("voters", settings(), "note"),
        ("voters", settings(LEASE, THREE), "ok"),
        ("lease", settings(), "ok"),
        ("lease", settings(LEASE, THREE), "ok"),
        ("lease", settings(LEASE + 'lease = "1s"', THREE), "warn"),
        ("lease", settings(LEASE + 'lease = "60s"', THREE), "note"),
        ("insecure", settings(), "ok"),
        ("insecure", settings(more="insecure = true\n"), "warn"),
        ("insecure", settings('mode = "etcd"\netcd = { endpoints = ["10.0.0.9:2379"] }'), "warn"),
        ("insecure", settings('mode = "etcd"\netcd = { endpoints = ["127.0.0.1:2379"] }'), "ok"),
        ("certificate", settings(), "fail"),
        ("certificate", settings(more="insecure = true\n"), "ok"),
    ],
)
def test_what_the_settings_alone_tell(host, check, text, severity):
    found = host.find(f"cluster.{check}", settings=text)
    assert found.severity == severity
    assert "itself failed" not in found.found


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ca")
    return make_authority(
        directory, days=3650, now=datetime.datetime.fromtimestamp(NOW - 100 * DAY, datetime.UTC)
    ), directory


@pytest.mark.parametrize(
    ("node", "days_left", "severity", "said"),
    [
        ("a", 200, "ok", ""), ("a", 10, "warn", "expires"), ("a", -5, "fail", "expired"), ("b", 200, "fail", "not a.prod"),
    ],
)  # fmt: skip
def test_the_certificate_as_others_see_it(host, authority, node, days_left, severity, said):
    ca, directory = authority
    began = datetime.datetime.fromtimestamp(NOW - 50 * DAY, datetime.UTC)
    issued = ca.issue(node, "prod", days=50 + days_left, now=began)
    host.put("/etc/kvtierd/tls/ca.pem", (directory / "ca.pem").read_bytes())
    host.put("/etc/kvtierd/tls/node.pem", issued.certificate_pem)
    # Who can read it is security.keys' business: the checkout's modes say nothing of the host.
    host.put("/etc/kvtierd/tls/node.key", issued.key_pem).chmod(0o644)
    found = host.find("cluster.certificate", settings=settings())
    assert found.severity == severity
    assert said in found.found
    assert str(host.root) not in found.found


def told(**peer):
    return {
        "status": {},
        "peers": {"master": "a", "peers": [{"name": "a", "this_node": True}, {"name": "b", **peer}]},
    }


@pytest.mark.parametrize(
    ("check", "peer", "severity"),
    [
        ("agree", {}, "ok"),
        ("agree", {"differences": ["hash_seed is 1 there and 0 here: no hit"]}, "fail"),
        ("agree", {"differences": ["world_size is 8 there and 16 here: x"]}, "fail"),
        ("agree", {"differences": ["memcache_version is 1.2.0 there and 1.3.0 here: x"]}, "warn"),
        ("agree", {"differences": ["version is 0.2 there and 0.1 here: x"]}, "note"),
        ("reached", {}, "ok"),
        ("reached", {"problem": "not heard of for 20 s"}, "warn"),
        ("clock", {"clock_offset_seconds": 0.3}, "ok"),
        ("clock", {"clock_offset_seconds": -9.0}, "warn"),
        ("clock", {"clock_offset_seconds": None}, "ok"),
    ],
)
def test_what_a_running_daemon_tells(host, check, peer, severity):
    assert host.find(f"cluster.{check}", settings=settings(), daemon=told(**peer)).severity == severity


@pytest.mark.parametrize("check", ["agree", "reached", "clock"])
def test_no_daemon_is_an_ordinary_state(host, check):
    assert host.find(f"cluster.{check}", settings=settings()).severity == "ok"


def test_a_cluster_without_a_master_fails(host):
    daemon = told()
    daemon["peers"]["master"] = ""
    assert host.find("cluster.reached", settings=settings(), daemon=daemon).severity == "fail"
