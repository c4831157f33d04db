"""Clusters without endpoints: which way each client takes to another master, and what is refused."""

import pytest
from plan_lab import GIB, FakeDriver, configured, engine, host, plan

from kvtierd.plan.direct import check_direct, repointed, way_of
from kvtierd.plan.remarks import Remarks

PEERS = [{"name": n, "address": f"10.0.0.{i}"} for i, n in enumerate("abc", start=1)]


def direct(*, meta=None, cluster=None, **more):
    return configured(
        meta={"endpoint": "direct", **(meta or {})},
        cluster={"mode": "lease", "name": "prod-1", "peers": PEERS, "insecure": True, **(cluster or {})},
        **more,
    )


def file(made, name):
    return next(f.content for f in made.files if f.path.endswith("/" + name))


def codes(entries):
    return [e.code for e in entries]


@pytest.mark.parametrize(
    ("version", "kind", "alias", "means"),
    [
        ("1.3.0", "pool", True, "conf"),
        ("1.3.0", "full", True, "alias"),
        ("1.3.0", "any", True, "alias"),
        ("1.3.0", "pool", False, "conf"),
        ("1.3.0", "full", False, "conf"),
        ("1.3.0", "any", False, "restart"),
        ("1.2.0", "any", True, "alias"),
        ("1.1.6", "any", True, "restart"),
        ("1.1.6", "full", True, "conf"),
        ("1.1.2", "full", True, "restart"),
        ("1.1.2", "pool", True, "restart"),
        ("1.0.4", "any", True, "restart"),
        ("", "pool", True, "restart"),
        ("7.0", "pool", True, "restart"),
    ],
)
def test_the_way_is_a_matter_of_release_and_kind_of_client(version, kind, alias, means):
    way = way_of(version, kind, alias=alias)
    assert way.means == means
    assert way.why


def test_every_node_can_become_the_master_and_listens_at_its_own_address():
    plans = {n: plan(direct(), host("a2-2cards"), node=n, master="b") for n in "abc"}
    for number, (name, made) in enumerate(plans.items(), start=1):
        assert made.refusals == ()
        assert made.unit("kvtier-meta-main").guard_file == "/run/kvtierd/lease"
        assert made.unit("kvtier-endpoint-main") is None
        assert f"ock.mmc.meta_service_url = tcp://10.0.0.{number}:5000\n" in file(made, "mmc-meta.conf"), name
        assert {p.address for p in made.ports if p.port in {5000, 6000}} == {f"10.0.0.{number}"}
        assert f"tcp://10.0.0.{number}:5000" in file(made, "mmc-local-admin.conf")
        assert "ock.mmc.meta_service.metrics_url = http://127.0.0.1:8000" in file(made, "mmc-meta.conf")


def test_engines_get_the_name_and_pool_holders_the_address():
    settings = direct(pool={"dram": 64 * GIB, "placement": "standalone"}, engine=[engine()])
    made = plan(settings, host("a3-16dies"), node="a", master="b")
    assert "ock.mmc.meta_service_url = tcp://kvtierd-meta.prod-1:5000\n" in file(made, "mmc-local.conf")
    assert "config_store_url = tcp://kvtierd-meta.prod-1:6000\n" in file(made, "mmc-local.conf")
    assert "ock.mmc.meta_service_url = tcp://10.0.0.2:5000\n" in file(made, "mmc-local-pool.conf")
    ways = {c.unit: c.means for c in made.direct.clients}
    assert ways["kvtier-engine-e"] == "alias"
    assert ways["kvtier-pool-0"] == "conf"
    assert "direct.alias" in codes(made.notes)
    # Nobody waits for the MetaService of this node: it may rest.
    assert {u.after for u in made.units if u.kind == "pool"} == {()}


def test_another_master_exchanges_the_addresses_and_changes_no_unit_that_follows_by_itself():
    settings = direct(pool={"dram": 64 * GIB, "placement": "standalone"}, engine=[engine()])
    first = plan(settings, host("a3-16dies"), node="a", master="a")
    second = repointed(first, "c")
    assert "tcp://10.0.0.3:5000" in file(second, "mmc-local-pool.conf")
    assert "tcp://10.0.0.3:6000" in file(second, "mmc-local-pool.conf")
    assert file(second, "mmc-meta.conf") == file(first, "mmc-meta.conf")
    assert file(second, "mmc-local-admin.conf") == file(first, "mmc-local-admin.conf")
    assert (second.master, second.direct.master) == ("c", "c")
    assert [u.digest for u in second.units] == [u.digest for u in first.units]
    # As if it had been planned so: a later reload finds nothing changed.
    assert second == plan(settings, host("a3-16dies"), node="a", master="c")
    assert repointed(second, "a") == first
    assert repointed(first, "nobody") is first


def test_an_address_in_the_command_line_makes_another_unit_of_it():
    class Dialler(FakeDriver):
        def launch(self, context):
            return (
                super()
                .launch(context)
                .model_copy(update={"argv": ("engine", context.meta_service_url, "tcp://10.0.0.1:50009")})
            )

    settings = direct(meta={"host_alias": False}, engine=[engine()])
    first = plan(settings, host("a2-2cards"), drivers={"fake": Dialler()}, node="b", master="a")
    assert {c.unit: c.means for c in first.direct.clients} == {"kvtier-engine-e": "restart"}
    assert "direct.restart" in codes(first.notes)
    second = repointed(first, "b")
    assert second.unit("kvtier-engine-e").argv[-2:] == ("tcp://10.0.0.2:5000", "tcp://10.0.0.1:50009")
    assert second.unit("kvtier-engine-e").digest != first.unit("kvtier-engine-e").digest


def test_an_engine_that_does_not_use_the_pool_has_no_way():
    made = plan(
        direct(engine=[engine()]), host("a2-2cards"), drivers={"fake": FakeDriver(clients=0)}, node="a"
    )
    assert made.direct.clients == ()


def test_without_a_known_master_the_files_name_some_node_and_the_plan_none():
    made = plan(direct(meta={"host_alias": False}), host("a2-2cards"), node="b")
    assert made.master == ""
    assert made.direct.master == "a"
    assert "tcp://10.0.0.1:5000" in file(made, "mmc-local.conf")


def test_a_listener_beyond_loopback_needs_tls_or_a_written_word():
    def refused(**how):
        return codes(plan(direct(**how), host("a2-2cards"), node="a").refusals)

    assert "direct.insecure" in refused(cluster={"insecure": False})
    assert refused(cluster={"insecure": False}, meta={"tls": True}) == []
    assert refused() == []
    loopback = [{"name": n, "address": f"127.0.20.{i}"} for i, n in enumerate("abc", start=1)]
    assert refused(cluster={"insecure": False, "peers": loopback}) == []


def test_a_single_host_has_neither_a_way_nor_a_refusal():
    made = plan(configured(meta={"endpoint": "direct"}, engine=[engine()]), host("a2-2cards"))
    assert made.direct is None
    assert made.refusals == ()
    assert "tcp://127.0.0.1:5000" in file(made, "mmc-local.conf")


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"cluster": {"name": "prod_1"}}, "direct.alias-name"),
        ({"cluster": {"peers": [{"name": "a", "address": "host-a.lan"}, *PEERS[1:]]}}, "direct.address"),
        (
            {"engine": [engine(runner="docker", image="i:1", mounts=["/srv/hosts:/etc/hosts:ro"])]},
            "direct.hosts-mounted",
        ),
    ],
)
def test_what_the_alias_cannot_do_is_refused_and_goes_without_it(changed, code):
    def found(meta):
        remarks = Remarks()
        check_direct(direct(meta=meta, **changed), "1.3.0", remarks)
        assert all(r.hint for r in remarks.refusals)
        return codes(remarks.refusals)

    assert found({}) == [code]
    assert found({"host_alias": False}) == []


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"meta": {"endpoint": "relay"}}, "meta.tls-relay"),
        ({"meta": {"runner": "docker", "image": "i:1", "version": "1.3.0"}}, "meta.tls-container"),
        ({"engine": [engine(runner="docker", image="i:1")]}, "meta.tls-container"),
        ({"engine": [engine(user="vllm")]}, "meta.tls-users"),
    ],
)
def test_tls_is_refused_where_it_cannot_be(changed, code):
    more = {"meta": {"endpoint": "direct", "tls": True}} | {
        k: ({"endpoint": "direct", "tls": True} | v if k == "meta" else v) for k, v in changed.items()
    }
    remarks = Remarks()
    check_direct(configured(**more), "1.3.0", remarks)
    assert codes(remarks.refusals) == [code]
    assert remarks.refusals[0].hint


def test_tls_stands_in_both_files():
    settings = direct(
        meta={"tls": True, "local_conf": {"ock.mmc.client.timeout.seconds": "30"}}, engine=[engine()]
    )
    made = plan(settings, host("a2-2cards"), node="a", master="a")
    meta, local = file(made, "mmc-meta.conf"), file(made, "mmc-local.conf")
    at = "/run/kvtierd/memcache-tls"
    for text in (meta, local):
        for block in ("ock.mmc.tls", "ock.mmc.config_store.tls"):
            assert f"{block}.enable = true\n" in text
            assert f"{block}.ca.path = {at}/ca.pem\n" in text
            assert f"{block}.cert.path = {at}/node.pem\n" in text
            assert f"{block}.key.path = {at}/node.key\n" in text
            assert f"{block}.package.path = {at}/openssl\n" in text
    assert "ock.mmc.metrics.tls.enable = true" in meta
    assert "metrics" not in local
    assert "timeout.seconds = 30" in local
    assert made.meta.metrics_url == "https://127.0.0.1:8000"
    probe = made.unit("kvtier-meta-main").readiness.probes[0]
    assert probe.url == "https://127.0.0.1:8000/health"
    assert probe.tls.server_name == "a.prod-1.kvtierd"
    assert made.tls.key == "/etc/kvtierd/tls/node.key"


def test_releases_before_1_2_have_no_tls_for_http():
    made = plan(direct(meta={"tls": True, "version": "1.1.6"}), host("a2-2cards"), node="a", master="a")
    assert made.refusals == ()
    assert made.meta.metrics_url == "http://127.0.0.1:8000"
    assert "metrics.tls" not in file(made, "mmc-meta.conf")
    assert made.unit("kvtier-meta-main").readiness.probes[0].tls is None


def test_the_operator_cannot_turn_a_block_of_tls_off_by_a_further_key():
    settings = direct(meta={"tls": True, "local_conf": {"ock.mmc.tls.enable": "false"}})
    made = plan(settings, host("a2-2cards"), node="a", master="a")
    assert "ock.mmc.tls.enable = true" in file(made, "mmc-local.conf")
