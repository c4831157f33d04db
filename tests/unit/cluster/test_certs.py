"""The authority and its certificates, as files, as OpenSSL sees them, and through kvtierctl certs."""

import datetime
import json
import os
import ssl
import stat
import time

import pytest
from certificates_lab import cluster_settings
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from kvtierd.cli import main
from kvtierd.cluster import certs
from kvtierd.cluster.identity import check_identity
from kvtierd.endpoint.names import speaks_for
from kvtierd.errors import ClusterError, EndpointError

SETTINGS = """\
[pool]
dram = "1GiB"
[cluster]
mode = "static"
name = "prod"
master = "host-a"
peers = [{ name = "host-a", address = "10.0.0.1" }, { name = "host-b", address = "fd00::2" }]
"""


FULL_KEY_BITS = certs.KEY_BITS


@pytest.fixture(autouse=True)
def quick_keys(monkeypatch):
    monkeypatch.setattr(certs, "KEY_BITS", 2048)  # a quarter of the time


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    for name in ("KVTIERD_SETTINGS", "KVTIERD_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("kvtierd.cli.common.DEFAULT_SETTINGS", tmp_path / "no-settings.toml")

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return ended.value.code or 0, out, err

    return call


@pytest.fixture
def ca(tmp_path):
    certs.make_authority(tmp_path / "ca")
    return tmp_path / "ca"


def put_in_place(ca, directory, node, cluster="prod", **more):
    directory.mkdir(exist_ok=True)
    made = certs.Authority.load(ca).issue(node, cluster, ["127.0.0.1"], **more)
    certs.write_pair(directory / "node.pem", made.certificate_pem, directory / "node.key", made.key_pem)
    (directory / "ca.pem").write_bytes((ca / "ca.pem").read_bytes())
    return directory


def mode(file):
    return stat.S_IMODE(file.stat().st_mode)


def test_keys_are_of_the_size_that_memcache_wants(tmp_path, monkeypatch):
    monkeypatch.setattr(certs, "KEY_BITS", FULL_KEY_BITS)
    made = certs.make_authority(tmp_path / "ca").issue("host-a", "prod")
    assert made.certificate.public_key().key_size == 3072
    assert certs.describe(tmp_path / "ca/ca.pem")[0].key == "RSA 3072"


def test_an_authority_s_files(tmp_path):
    before = os.umask(0o022)
    try:
        certs.make_authority(tmp_path / "new" / "ca")
    finally:
        os.umask(before)
    assert mode(tmp_path / "new" / "ca") == 0o700
    assert (mode(tmp_path / "new/ca/ca.key"), mode(tmp_path / "new/ca/ca.pem")) == (0o600, 0o644)
    (made,) = certs.describe(tmp_path / "new/ca/ca.pem")
    assert made.authority
    assert 3648 <= made.days_left <= 3650


def test_an_authority_is_not_overwritten(ca):
    before = (ca / "ca.key").read_bytes()
    with pytest.raises(ClusterError) as refused:
        certs.make_authority(ca)
    assert refused.value.stable_code == "certs.exists"
    (ca / "ca.pem").unlink()
    with pytest.raises(ClusterError):  # the key alone is worth keeping too
        certs.make_authority(ca)
    assert (ca / "ca.key").read_bytes() == before
    certs.make_authority(ca, force=True)
    assert (ca / "ca.key").read_bytes() != before
    assert mode(ca / "ca.key") == 0o600


def test_a_node_s_certificate(ca):
    made = certs.Authority.load(ca).issue("host-a", "prod", ["10.0.0.1", "::1", "10.0.0.1", "host-a.example"])
    certificate = made.certificate
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["host-a", "host-a.prod.kvtierd"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "::1"]
    uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {use._name for use in uses} == {"serverAuth", "clientAuth"}
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    now = datetime.datetime.now(datetime.UTC)
    assert certificate.not_valid_before_utc < now - datetime.timedelta(minutes=5)
    assert (certificate.not_valid_after_utc - now).days in {824, 825}
    assert load_pem_private_key(made.key_pem, None).public_key() == certificate.public_key()
    assert not made.shortened


def test_two_clusters_of_one_authority_do_not_mix(ca):
    names = certs.Authority.load(ca).issue("host-a", "other").certificate
    carried = names.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    dns = carried.get_values_for_type(x509.DNSName)
    assert speaks_for(dns, "host-a", "other")
    assert not speaks_for(dns, "host-a", "prod")


def test_a_certificate_does_not_outlive_its_authority(tmp_path):
    authority = certs.make_authority(tmp_path / "ca", days=100)
    made = authority.issue("host-a", "prod")
    assert made.shortened
    assert made.certificate.not_valid_after_utc == authority.certificate.not_valid_after_utc


@pytest.mark.parametrize("node", ["", "Host", "../x", "a b", "x" * 64])
def test_names_that_cannot_be_in_a_certificate(ca, node):
    with pytest.raises(EndpointError):
        certs.Authority.load(ca).issue(node, "prod")


@pytest.mark.parametrize("days", [0, -1, 36501])
def test_days_out_of_range(ca, tmp_path, days):
    for attempt in (
        lambda: certs.Authority.load(ca).issue("host-a", "prod", days=days),
        lambda: certs.make_authority(tmp_path / "x", days=days),
    ):
        with pytest.raises(ClusterError) as refused:
            attempt()
        assert refused.value.stable_code == "certs.days"


def code_of_loading(directory, **more):
    with pytest.raises(ClusterError) as refused:
        certs.Authority.load(directory, **more)
    return refused.value.stable_code


def test_authorities_that_cannot_sign(ca, tmp_path):
    assert code_of_loading(tmp_path) == "certs.no-authority"
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3651)
    assert code_of_loading(ca, now=later) == "certs.expired"
    certs.make_authority(tmp_path / "other")
    right = (ca / "ca.key").read_bytes()
    (ca / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    assert code_of_loading(ca) == "certs.key-mismatch"
    (ca / "ca.key").write_bytes(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    assert code_of_loading(ca) == "certs.unreadable"
    (ca / "ca.key").unlink()
    assert code_of_loading(ca) == "certs.unreadable"
    (ca / "ca.key").write_bytes(right)
    (ca / "ca.pem").write_bytes(b"")
    assert code_of_loading(ca) == "certs.unreadable"


def test_a_node_s_certificate_cannot_sign(ca, tmp_path):
    put_in_place(ca, tmp_path / "node", "host-a")
    (tmp_path / "node/ca.pem").write_bytes((tmp_path / "node/node.pem").read_bytes())
    (tmp_path / "node/ca.key").write_bytes((tmp_path / "node/node.key").read_bytes())
    assert code_of_loading(tmp_path / "node") == "certs.no-authority"


def test_openssl_s_own_rules_for_a_chain(ca, tmp_path):
    """X509_V_FLAG_X509_STRICT finds what lenient checks let pass, and Python 3.13 turns it on by default."""
    node = put_in_place(ca, tmp_path / "node", "host-a")
    server, client = (ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(node / "ca.pem")
        context.load_cert_chain(node / "node.pem", node / "node.key")
    server.verify_mode = ssl.CERT_REQUIRED
    for name in ("host-a", "host-a.prod.kvtierd", "127.0.0.1"):
        a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
        asks = client.wrap_bio(a, b, server_hostname=name)  # with ssl's own check of the name
        answers = server.wrap_bio(b, a, server_side=True)
        done = set()
        for _ in range(10):
            for side in (asks, answers):
                try:
                    side.do_handshake()
                    done.add(side)
                except ssl.SSLWantReadError:
                    pass
        assert done == {asks, answers}


# -- the node's own look at its certificate


def problems(directory, **more):
    return [p.code for p in check_identity(cluster_settings(directory), **more)]


def test_a_good_certificate_has_no_problems(ca, tmp_path):
    assert problems(put_in_place(ca, tmp_path / "n", "host-a")) == []


def test_a_node_that_needs_no_certificate(tmp_path):
    assert check_identity(cluster_settings(tmp_path, insecure=True)) == []


def test_missing_files_are_named_each(tmp_path):
    found = check_identity(cluster_settings(tmp_path))
    assert [p.code for p in found] == ["certs.missing"] * 3
    assert str(tmp_path / "node.key") in found[2].message


def test_times(ca, tmp_path):
    node = put_in_place(ca, tmp_path / "n", "host-a", days=100)
    day = 86400.0
    began = time.time()
    assert problems(node, now_unix_seconds=began + 60 * day) == []
    assert problems(node, now_unix_seconds=began + 71 * day) == ["certs.expires-soon"]
    assert problems(node, now_unix_seconds=began + 101 * day) == ["certs.expired"]
    assert problems(node, now_unix_seconds=began - day) == ["certs.not-yet-valid"]
    found = check_identity(cluster_settings(node), now_unix_seconds=began + 71 * day)
    assert not found[0].fatal
    assert "in 28 days" in found[0].message or "in 29 days" in found[0].message


def test_an_expired_certificate_is_told_by_the_real_clock_too(ca, tmp_path):
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=900)
    (tmp_path / "old").mkdir()
    certs.make_authority(tmp_path / "old" / "ca", now=long_ago)
    node = put_in_place(tmp_path / "old/ca", tmp_path / "n", "host-a", now=long_ago)
    assert problems(node) == ["certs.expired"]


def test_an_authority_that_ends(tmp_path):
    certs.make_authority(tmp_path / "ca", days=50)
    node = put_in_place(tmp_path / "ca", tmp_path / "n", "host-a", days=50)
    later = time.time() + 40 * 86400
    assert problems(node, now_unix_seconds=later) == ["certs.expires-soon", "certs.authority-expires-soon"]
    assert problems(node, now_unix_seconds=later + 20 * 86400) == ["certs.expired", "certs.authority-expired"]


def test_another_authority(ca, tmp_path):
    node = put_in_place(ca, tmp_path / "n", "host-a")
    certs.make_authority(tmp_path / "other")
    other = (tmp_path / "other" / "ca.pem").read_bytes()
    (node / "ca.pem").write_bytes(other)
    assert problems(node) == ["certs.wrong-ca"]
    (node / "ca.pem").write_bytes(
        other + (ca / "ca.pem").read_bytes()
    )  # while the authority is being changed
    assert problems(node) == []


def test_a_key_that_is_another_s_or_everybody_s(ca, tmp_path):
    node = put_in_place(ca, tmp_path / "n", "host-a")
    (node / "node.key").chmod(0o640)
    assert problems(node) == ["certs.key-readable"]
    put_in_place(ca, tmp_path / "m", "host-a")
    (node / "node.key").chmod(0o600)
    (node / "node.key").write_bytes((tmp_path / "m" / "node.key").read_bytes())
    assert problems(node) == ["certs.key-mismatch"]


def test_another_node_s_certificate(ca, tmp_path):
    node = put_in_place(ca, tmp_path / "n", "host-b")
    assert problems(node) == ["certs.name"]
    assert problems(node, node="host-b") == []
    assert problems(put_in_place(ca, tmp_path / "n", "host-a", cluster="other")) == ["certs.name"]


def test_what_is_no_certificate(ca, tmp_path):
    node = put_in_place(ca, tmp_path / "n", "host-a")
    (node / "ca.pem").write_text("no\n")
    assert problems(node) == ["certs.unreadable"]
    node = put_in_place(ca, tmp_path / "n", "host-a")
    (node / "node.pem").write_text("no\n")
    assert problems(node) == ["certs.unreadable"]


def test_a_certificate_for_servers_only(ca, tmp_path, monkeypatch):
    monkeypatch.setattr(certs.ExtendedKeyUsageOID, "CLIENT_AUTH", certs.ExtendedKeyUsageOID.CODE_SIGNING)
    assert problems(put_in_place(ca, tmp_path / "n", "host-a")) == ["certs.purpose"]


# -- kvtierctl certs


def test_certificates_for_all_peers(run, tmp_path):
    (tmp_path / "kvtierd.toml").write_text(SETTINGS)
    assert run("certs", "init", tmp_path / "ca")[0] == 0
    settings = ("--settings", tmp_path / "kvtierd.toml")
    code, out, _ = run("certs", "issue", "--all", "--ca", tmp_path / "ca", *settings, "--json")
    made = json.loads(out)["certificates"]
    assert code == 0
    assert [(m["node"], m["dns_names"][1], m["ip_addresses"], m["written"]) for m in made] == [
        ("host-a", "host-a.prod.kvtierd", ["10.0.0.1"], True),
        ("host-b", "host-b.prod.kvtierd", ["fd00::2"], True),
    ]
    assert mode(tmp_path / "ca" / "host-b.key") == 0o600
    # A host is added: the others' certificates stay.
    before = (tmp_path / "ca" / "host-a.pem").read_bytes()
    (tmp_path / "ca" / "host-b.pem").unlink()
    (tmp_path / "ca" / "host-b.key").unlink()
    code, out, _ = run("certs", "issue", "--all", "--ca", tmp_path / "ca", *settings)
    assert code == 0
    assert "host-a.key kept" in out
    assert "host-b.key written" in out
    assert (tmp_path / "ca" / "host-a.pem").read_bytes() == before
    run("certs", "issue", "--all", "--force", "--ca", tmp_path / "ca", *settings)
    assert (tmp_path / "ca" / "host-a.pem").read_bytes() != before


def test_what_is_there_is_kept_only_when_it_is_right(run, tmp_path):
    (tmp_path / "kvtierd.toml").write_text(SETTINGS)
    run("certs", "init", tmp_path / "ca")
    run("certs", "issue", "host-a", "--cluster", "other", "--ca", tmp_path / "ca")
    everybody = ("certs", "issue", "--all", "--ca", tmp_path / "ca", "-s", tmp_path / "kvtierd.toml")
    code, _, err = run(*everybody)
    assert code == 1
    assert "is not for host-a of cluster prod" in err
    run("certs", "init", tmp_path / "ca", "--force")
    code, _, err = run(*everybody)
    assert code == 1
    assert "was signed by another authority" in err
    assert not (tmp_path / "ca" / "host-b.pem").exists()  # nothing was written
    (tmp_path / "ca" / "host-a.pem").unlink()
    assert run(*everybody)[0] == 1  # a key alone is not overwritten either


def test_one_node(run, tmp_path):
    (tmp_path / "kvtierd.toml").write_text(SETTINGS)
    run("certs", "init", tmp_path / "ca")
    place = ("--ca", tmp_path / "ca", "--out", tmp_path / "out")
    settings = ("--settings", tmp_path / "kvtierd.toml")
    code, _, err = run("certs", "issue", "host-x", *place, *settings)
    assert (code, "is not among the peers: host-a, host-b" in err) == (2, True)
    assert run("certs", "issue", "host-x", "--address", "10.0.0.9", *place, *settings)[0] == 0
    assert certs.describe(tmp_path / "out" / "host-x.pem")[0].dns_names[1] == "host-x.prod.kvtierd"
    assert run("certs", "issue", "host-a", *place, *settings)[0] == 0
    code, _, err = run("certs", "issue", "host-a", *place, *settings)
    assert (code, "are there already" in err) == (1, True)


def test_usage_errors(run, tmp_path):
    run("certs", "init", tmp_path / "ca")
    place = ("--ca", tmp_path / "ca")
    assert run("certs", "issue", *place)[0] == 2
    assert run("certs", "issue", "host-a", "--all", *place)[0] == 2
    assert run("certs", "issue", "--all", "--address", "10.0.0.1", *place)[0] == 2
    code, _, err = run("certs", "issue", "host-a", *place)  # whose cluster?
    assert (code, "--cluster" in err) == (2, True)
    code, _, err = run("certs", "issue", "ca", "--cluster", "prod", "--force", *place)
    assert (code, "authority" in err) == (2, True)
    assert certs.Authority.load(tmp_path / "ca")
    code, _, err = run("certs", "issue", "host-a", "--cluster", "a.b", *place)
    assert (code, "no dot" in err) == (1, True)
    code, out, _ = run("certs", "issue", "host-a", "--cluster", "prod", "--ca", tmp_path / "none", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (1, "certs.no-authority")


def test_a_directory_that_cannot_be_written(run, ca, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(
        "certs", "issue", "host-a", "--cluster", "prod", "--ca", ca, "--out", tmp_path / "file"
    )
    assert (code, "cannot be written" in err) == (1, True)


def test_show(run, ca, tmp_path):
    node = put_in_place(ca, tmp_path / "n", "host-a")
    code, out, _ = run("certs", "show", node / "node.pem", ca / "ca.pem", "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["problems"] == []
    of_node, of_ca = shown["certificates"]
    assert of_node["issuer"] == of_ca["subject"]
    assert of_node["ip_addresses"] == ["127.0.0.1"]
    assert (of_node["authority"], of_ca["authority"]) == (False, True)
    assert len(of_node["fingerprint_sha256"].split(":")) == 32
    code, out, _ = run("certs", "show", node / "node.pem")
    assert (code, "host-a.prod.kvtierd" in out, "RSA 2048" in out) == (0, True, True)
    code, _, err = run("certs", "show", node / "node.key")
    assert (code, "private key" in err, "BEGIN" in err) == (1, True, False)
    code, _, err = run("certs", "show", tmp_path / "none.pem")
    assert (code, "No such file" in err) == (1, True)


def test_show_exits_1_for_an_expired_certificate(run, tmp_path):
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=900)
    certs.make_authority(tmp_path / "ca", now=long_ago)
    node = put_in_place(tmp_path / "ca", tmp_path / "n", "host-a", now=long_ago)
    code, out, _ = run("certs", "show", node / "node.pem")
    assert (code, "EXPIRED on" in out) == (1, True)


def test_show_this_node_s(run, ca, tmp_path):
    node = put_in_place(ca, tmp_path / "n", "host-b")
    tls = f'tls = {{ ca = "{node}/ca.pem", cert = "{node}/node.pem", key = "{node}/node.key" }}\n'
    (tmp_path / "kvtierd.toml").write_text('[node]\nname = "host-a"\n' + SETTINGS + tls)
    code, out, _ = run("certs", "show", "--settings", tmp_path / "kvtierd.toml")
    assert code == 1
    assert "is not host-a.prod.kvtierd's: its names are host-b" in out
    code, out, _ = run("certs", "show", "--settings", tmp_path / "kvtierd.toml", "--json")
    assert json.loads(out)["problems"][0]["code"] == "certs.name"
