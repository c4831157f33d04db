"""Real gRPC servers on loopback, and callers that are refused before or after the handshake."""

import contextlib

import grpc
import pytest
import trustme
from certificates_lab import cluster_settings, put, yesterday

from kvtierd.cluster import certs, tls
from kvtierd.cluster.tls import PeerTls
from kvtierd.errors import ClusterError

METHOD = "/test/Who"


class Who(grpc.GenericRpcHandler):
    """Answers with the peer that it takes the caller for; the request is the name that the caller claims."""

    def __init__(self, peer_tls):
        self.peer_tls = peer_tls

    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(self.answer)

    async def answer(self, request, context):
        try:
            return self.peer_tls.identify(context.auth_context(), request.decode()).encode()
        except ClusterError as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, error.stable_code)


@contextlib.asynccontextmanager
async def serving(peer_tls):
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Who(peer_tls),))
    port = peer_tls.add_port(server, "127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def ask(peer_tls, port, *, peer="host-a", claimed=""):
    """The name that the server knows the caller by, or the code of its refusal, or UNAVAILABLE."""
    channel = peer_tls.channel(peer, port=port, options=[("grpc.use_local_subchannel_pool", 1)])
    try:
        return (await channel.unary_unary(METHOD)(claimed.encode(), timeout=10)).decode()
    except grpc.aio.AioRpcError as error:
        return error.details() if error.code() is grpc.StatusCode.PERMISSION_DENIED else error.code().name
    finally:
        await channel.close()


@pytest.fixture
def ca():
    return trustme.CA()


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(tls, "LOOK_EVERY_SECONDS", 0.0)


def node(directory, name="host-a", **cluster):
    return PeerTls(cluster_settings(directory, node=name, **cluster).cluster)


@pytest.fixture
async def server(ca, tmp_path):
    served = node(put(tmp_path / "a", ca, "host-a"))
    async with serving(served) as port:
        yield port


async def test_a_listed_peer_is_known_by_its_certificate(server, ca, tmp_path):
    caller = node(put(tmp_path / "b", ca, "host-b"))
    assert await ask(caller, server) == "host-b"
    assert await ask(caller, server, claimed="host-b") == "host-b"


async def test_the_message_may_not_claim_another_name(server, ca, tmp_path):
    caller = node(put(tmp_path / "b", ca, "host-b"))
    assert await ask(caller, server, claimed="host-c") == "cluster.not-that-node"
    assert await ask(caller, server, claimed="host-x") == "cluster.not-listed"


async def test_a_certificate_for_a_node_that_is_not_listed(server, ca, tmp_path):
    caller = node(put(tmp_path / "x", ca, "host-x"))
    assert await ask(caller, server) == "cluster.not-listed"
    assert await ask(caller, server, claimed="host-b") == "cluster.not-that-node"


async def test_a_node_of_another_cluster_of_the_same_authority(server, ca, tmp_path):
    caller = node(put(tmp_path / "b", ca, "host-b", cluster="other"))
    caller.cluster = cluster_settings(tmp_path / "b").cluster  # it says that it is of this one
    assert await ask(caller, server) == "cluster.not-listed"


async def test_a_node_that_was_taken_off_the_list(ca, tmp_path):
    served = node(put(tmp_path / "a", ca, "host-a"))
    caller = node(put(tmp_path / "c", ca, "host-c"))
    async with serving(served) as port:
        assert await ask(caller, port) == "host-c"
        served.cluster = cluster_settings(tmp_path / "a", mode="etcd", names=("host-a", "host-b"),
                                          etcd={"endpoints": ["127.0.0.1:1"]}).cluster  # fmt: skip
        assert await ask(caller, port) == "cluster.not-listed"


async def test_another_authority(server, ca, tmp_path):
    other = trustme.CA()
    stranger = node(put(tmp_path / "b", other, "host-b", trust=[other, ca]))  # it takes the server's
    assert await ask(stranger, server) == "UNAVAILABLE"
    distrusts = node(put(tmp_path / "c", ca, "host-c"))
    (tmp_path / "c" / "ca.pem").write_bytes(other.cert_pem.bytes())
    with pytest.raises(ClusterError) as refused:  # found before the other side finds it
        await ask(distrusts, server)
    assert refused.value.stable_code == "certs.wrong-ca"


async def test_no_certificate(server, ca):
    credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
    options = [("grpc.ssl_target_name_override", "host-a")]
    async with grpc.aio.secure_channel(f"127.0.0.1:{server}", credentials, options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(METHOD)(b"host-b", timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_no_tls_at_all(server, tmp_path):
    plain = PeerTls(cluster_settings(insecure=True).cluster)
    assert await ask(plain, server, claimed="host-b") == "UNAVAILABLE"


async def test_an_expired_certificate_on_either_side(server, ca, tmp_path):
    expired = node(put(tmp_path / "b", ca, "host-b", expires_at=yesterday()))
    assert await ask(expired, server) == "UNAVAILABLE"
    async with serving(node(put(tmp_path / "c", ca, "host-c", expires_at=yesterday()))) as port:
        caller = node(put(tmp_path / "d", ca, "host-b"))
        assert await ask(caller, port, peer="host-c") == "UNAVAILABLE"


async def test_a_server_with_another_node_s_certificate(server, ca, tmp_path):
    caller = node(put(tmp_path / "b", ca, "host-b"))
    assert await ask(caller, server, peer="host-a") == "host-b"
    assert await ask(caller, server, peer="host-c") == "UNAVAILABLE"


async def test_a_server_of_another_cluster_of_the_same_authority(ca, tmp_path):
    served = node(put(tmp_path / "a", ca, "host-a", cluster="other"))
    async with serving(served) as port:
        assert await ask(node(put(tmp_path / "b", ca, "host-b")), port) == "UNAVAILABLE"


async def test_certificates_from_elsewhere_have_plain_names_only(ca, tmp_path):
    def plain(name):
        return node(put(tmp_path / name, ca, name, names=(name, f"{name}.example.com")))

    async with serving(plain("host-a")) as port:
        assert await ask(plain("host-b"), port) == "host-b"
        assert await ask(plain("host-x"), port) == "cluster.not-listed"
        assert await ask(plain("host-b"), port, peer="host-c") == "UNAVAILABLE"


async def test_a_certificate_for_two_peers_must_say_which(ca, tmp_path):
    both = node(put(tmp_path / "b", ca, "host-b", names=("host-b", "host-c")))
    async with serving(node(put(tmp_path / "a", ca, "host-a", names=("host-a",)))) as port:
        assert await ask(both, port) == "cluster.not-listed"
        assert await ask(both, port, claimed="host-c") == "host-c"


async def test_our_own_certificates_work(tmp_path, monkeypatch):
    monkeypatch.setattr(certs, "KEY_BITS", 2048)
    authority = certs.make_authority(tmp_path / "ca")
    nodes = {}
    for name in ("host_a", "host-b.x"):
        (tmp_path / name).mkdir()
        made = authority.issue(name, "prod", ["127.0.0.1"])
        certs.write_pair(
            tmp_path / name / "node.pem", made.certificate_pem, tmp_path / name / "node.key", made.key_pem
        )
        (tmp_path / name / "ca.pem").write_bytes((tmp_path / "ca" / "ca.pem").read_bytes())
        nodes[name] = node(tmp_path / name, names=("host_a", "host-b.x", "host-c"))
    async with serving(nodes["host_a"]) as port:
        assert await ask(nodes["host-b.x"], port, peer="host_a") == "host-b.x"


async def test_insecure_takes_the_callers_word(tmp_path):
    plain = PeerTls(cluster_settings(tmp_path, insecure=True).cluster)  # no files are looked for
    async with serving(plain) as port:
        assert await ask(plain, port, claimed="host-b") == "host-b"
        assert await ask(plain, port, claimed="host-x") == "cluster.not-listed"
        assert await ask(plain, port) == "cluster.no-certificate"
    assert plain.generation == 0


async def test_without_certificates_there_is_no_port(tmp_path):
    with pytest.raises(ClusterError) as refused:
        node(tmp_path).add_port(grpc.aio.server(), "127.0.0.1:0")
    assert refused.value.stable_code == "certs.missing"
    assert "kvtierctl certs" in refused.value.hint


async def test_a_port_that_is_taken(server, ca, tmp_path):
    second = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    with pytest.raises(ClusterError) as refused:
        node(put(tmp_path / "b", ca, "host-b")).add_port(second, f"127.0.0.1:{server}")
    assert refused.value.stable_code == "cluster.listen"


async def test_renewed_certificates_without_a_restart(ca, tmp_path, at_once):
    """The whole authority is changed while the server runs: first both are trusted, then only the new one."""
    new = trustme.CA()
    served = node(put(tmp_path / "a", ca, "host-a"))
    old_caller = node(put(tmp_path / "b", ca, "host-b", trust=[ca, new]))
    new_caller = node(put(tmp_path / "c", new, "host-c", trust=[ca, new]))
    async with serving(served) as port:
        assert await ask(old_caller, port) == "host-b"
        assert await ask(new_caller, port) == "UNAVAILABLE"
        before = served.generation
        put(tmp_path / "a", ca, "host-a", trust=[ca, new])
        assert await ask(new_caller, port) == "host-c"
        assert served.generation == before + 1
        put(tmp_path / "a", new, "host-a", trust=[new])
        assert await ask(new_caller, port) == "host-c"
        assert await ask(old_caller, port) == "UNAVAILABLE"


async def test_files_that_cannot_be_used_do_not_replace_those_that_can(ca, tmp_path, at_once):
    served = node(put(tmp_path / "a", ca, "host-a"))
    caller = node(put(tmp_path / "b", ca, "host-b"))
    async with serving(served) as port:
        assert await ask(caller, port) == "host-b"
        right = (tmp_path / "a" / "node.key").read_bytes()
        (tmp_path / "a" / "node.key").write_bytes((tmp_path / "b" / "node.key").read_bytes())
        assert await ask(caller, port) == "host-b"
        assert "is not the key of" in served.problem
        (tmp_path / "a" / "node.key").unlink()
        assert await ask(caller, port) == "host-b"
        assert "missing" in served.problem
        (tmp_path / "a" / "node.key").write_bytes(right)
        assert await ask(caller, port) == "host-b"
        assert served.problem == ""


async def test_a_channel_is_made_with_the_files_of_now(server, ca, tmp_path, at_once):
    caller = node(put(tmp_path / "b", ca, "host-b", expires_at=yesterday()))
    assert await ask(caller, server) == "UNAVAILABLE"
    before = caller.generation
    put(tmp_path / "b", ca, "host-b")
    assert await ask(caller, server) == "host-b"
    assert caller.generation == before + 1


def test_a_resumed_session_does_not_count(ca):
    context = {"peer_dns": [b"host-b", b"host-b.prod.kvtierd"], "x509_pem_cert": [b"pem"]}
    peer_tls = PeerTls(cluster_settings().cluster)
    assert peer_tls.identify(context | {"ssl_session_reused": [b"false"]}) == "host-b"
    for shown in (context | {"ssl_session_reused": [b"true"]}, context | {"x509_pem_cert": []}, {}):
        with pytest.raises(ClusterError) as refused:
            peer_tls.identify(shown, "host-b")
        assert refused.value.stable_code == "cluster.no-certificate"


def test_a_peer_that_is_not_listed_cannot_be_called(tmp_path):
    with pytest.raises(ClusterError) as refused:
        PeerTls(cluster_settings(insecure=True).cluster).channel("host-x")
    assert refused.value.stable_code == "cluster.no-such-node"
