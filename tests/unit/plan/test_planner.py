"""The planner on recorded hosts: the seed's numbers, refusals, ports."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from plan_lab import GIB, MIB, FakeDriver, configured, engine, host, plan

from kvtierd.plan.engine import EngineLaunch, HttpCall
from kvtierd.plan.inventory import NpuProcess, PortOwner
from kvtierd.plan.model import FileSpec, NodePlan, Note, Refusal
from kvtierd.settings import load_settings


def codes(entries):
    return [e.code for e in entries]


def file(made: NodePlan, name: str) -> str:
    return next(f.content for f in made.files if f.path.endswith("/" + name))


def test_the_seed_s_single_host_comes_out_exactly():
    made = plan(load_settings(Path("examples/single-host-a2.toml"), {}), host("a2-2cards"))
    assert (made.hugepages.page_size_bytes, made.hugepages.pages) == (2 * MIB, 133120)
    assert made.pool.dram_bytes_per_provider == 128 * GIB
    assert made.pool.providers == 2
    assert made.refusals == ()
    local = file(made, "mmc-local.conf")
    assert "ock.mmc.local_service.dram.size = 128GB\n" in local
    assert "ock.mmc.local_service.max.dram.size = 128GB\n" in local
    assert "ock.mmc.local_service.protocol = device_rdma\n" in local
    assert "ock.mmc.meta_service_url = tcp://127.0.0.1:5000\n" in local
    assert "ock.mmc.meta_service_url = tcp://127.0.0.1:5001\n" in file(made, "mmc-meta.conf")


def test_both_of_the_seed_s_two_hosts_come_from_one_file():
    settings = load_settings(Path("examples/two-hosts-a2.toml"), {})
    first, second = (plan(settings, host("a2-8cards"), node=n) for n in ("host-a", "host-b"))
    assert first.refusals == second.refusals == ()
    assert [u.kind for u in first.units] == [u.kind for u in second.units] == ["endpoint", "meta"]
    assert file(first, "mmc-local.conf") == file(second, "mmc-local.conf")
    assert first.pool.world_size == second.pool.world_size >= 16


def test_a_node_finds_itself_by_its_address():
    settings = load_settings(Path("examples/two-hosts-a2.toml"), {})
    nics = host("a2-8cards").nics
    mine = nics[0].model_copy(update={"addresses": ("10.20.0.11",)})
    assert plan(settings, host("a2-8cards", nics=(mine,))).node == "host-b"


def test_a_stranger_is_refused():
    settings = load_settings(Path("examples/two-hosts-a2.toml"), {})
    assert "cluster.not-a-peer" in codes(
        plan(settings, host("a2-8cards", hostname="other", nics=())).refusals
    )


def test_a3_has_a_holder_and_engines_without_memory_and_no_hugepages():
    made = plan(load_settings(Path("examples/a3-standalone.toml"), {}), host("a3-16dies"))
    assert made.pool.placement == "standalone"
    assert made.hugepages.pages == 0
    assert [u.kind for u in made.units] == ["endpoint", "meta", "pool"]
    assert "ock.mmc.local_service.dram.size = 640GB\n" in file(made, "mmc-local-pool.conf")
    client = file(made, "mmc-local.conf")
    assert "ock.mmc.local_service.dram.size = 0" in client
    assert "ock.mmc.local_service.max.dram.size = 640GB\n" in client
    assert "device_sdma" in client


def test_alignment_is_downward_and_said():
    made = plan(configured(pool={"dram": "257GB"}, engine=[engine()]), host("a2-2cards"))
    assert made.pool.dram_bytes_per_provider == 119 * GIB
    note = next(n for n in made.notes if n.code == "pool.aligned-down")
    assert "119 GiB each" in note.message
    assert "stay unused" in note.message


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    dram=st.integers(1, 900 * GIB),
    devices=st.integers(1, 8),
    protocol=st.sampled_from(["auto", "host_shm", "device_rdma"]),
)
def test_no_plan_takes_more_than_was_granted(dram, devices, protocol):
    made = plan(
        configured(pool={"dram": dram, "protocol": protocol}, engine=[engine(devices=list(range(devices)))]),
        host("a2-8cards"),
    )
    pool = made.pool
    assert pool.capacity_bytes == pool.dram_bytes_per_provider * pool.providers <= dram
    assert pool.dram_bytes_per_provider % pool.alignment_bytes == 0
    if pool.dram_bytes_per_provider == 0:
        assert "pool.too-small" in codes(made.refusals)
    if made.hugepages.pages:
        assert made.hugepages.pages * made.hugepages.page_size_bytes >= pool.capacity_bytes
    assert NodePlan.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize(
    ("memory_gib", "dram_gib", "fits"),
    [
        (384, 256, True),
        (384, 344, False),
        (128, 100, True),
        (128, 110, False),
        (64, 40, True),
        (64, 46, False),
    ],
)
def test_the_host_keeps_what_it_needs(memory_gib, dram_gib, fits):
    inventory = host(
        "a2-2cards", memory_total_bytes=memory_gib * GIB, memory_available_bytes=(memory_gib - 2) * GIB
    )
    made = plan(configured(pool={"dram": dram_gib * GIB}, engine=[engine()]), inventory)
    assert ("memory.host-starves" not in codes(made.refusals)) == fits


def test_a_small_machine_can_say_what_it_spares():
    small = configured(node={"series": "emulated"}, pool={"dram": "256MiB"})
    inventory = host("emulated-small", memory_total_bytes=8 * GIB, memory_available_bytes=7 * GIB)
    assert codes(plan(small, inventory).refusals) == ["memory.host-starves"]
    lowered = configured(node={"series": "emulated"}, pool={"dram": "256MiB", "host_reserve": "1GiB"})
    assert plan(lowered, inventory).refusals == ()


def test_a_pool_in_shared_memory_has_to_fit_there():
    settings = configured(node={"series": "emulated"}, pool={"dram": "256MiB", "host_reserve": "1GiB"})
    assert plan(settings, host("emulated-small", shm_total_bytes=256 * MIB)).refusals == ()
    (refusal,) = plan(settings, host("emulated-small", shm_total_bytes=64 * MIB)).refusals
    assert refusal.code == "memory.shm"
    assert "256 MiB do not fit into /dev/shm, which has 64 MiB" in refusal.message
    assert "--shm-size" in refusal.hint
    in_hugepages = configured(engine=[engine()])
    assert "memory.shm" not in codes(plan(in_hugepages, host("a2-2cards", shm_total_bytes=64 * MIB)).refusals)


def test_what_is_available_now_counts_too():
    made = plan(configured(engine=[engine()]), host("a2-2cards", memory_available_bytes=200 * GIB))
    assert "memory.busy-now" in codes(made.refusals)


def test_pages_of_an_earlier_start_are_not_asked_for_twice():
    inventory = host("a2-2cards", memory_available_bytes=50 * GIB)
    pools = tuple(
        p.model_copy(update={"total_pages": 133120, "free_pages": 100}) if p.page_size_bytes == 2 * MIB else p
        for p in inventory.hugepages
    )
    used = inventory.model_copy(update={"hugepages": pools})
    settings = configured(engine=[engine()])
    assert plan(settings, used, owned_pages=133120).refusals == ()
    assert plan(settings, used, owned_pages=0).refusals != (), "without the ledger they are somebody else's"


def test_a_kernel_without_hugepages_is_refused_with_what_it_has():
    made = plan(configured(engine=[engine()]), host("no-hugepages"))
    assert "hugepages.size" in codes(made.refusals)
    assert "it has: none" in next(r.message for r in made.refusals if r.code == "hugepages.size")


def test_hugepages_off_where_they_are_needed():
    made = plan(
        configured(pool={"dram": 256 * GIB, "hugepages": "off"}, engine=[engine()]), host("a2-2cards")
    )
    assert "hugepages.needed" in codes(made.refusals)


def test_hugepages_by_numa_node_add_up():
    settings = configured(pool={"dram": 256 * GIB, "numa": "spread"}, engine=[engine()])
    made = plan(settings, host("a2-2cards"))
    assert sum(made.hugepages.per_numa_node.values()) == made.hugepages.pages == 133120
    assert len(made.hugepages.per_numa_node) == len(host("a2-2cards").numa_nodes)


def test_one_gigabyte_pages():
    settings = configured(pool={"dram": 256 * GIB, "hugepage_size": "1GiB"}, engine=[engine()])
    inventory = host("a2-2cards")
    if not any(p.page_size_bytes == GIB for p in inventory.hugepages):
        extra = inventory.hugepages[0].model_copy(
            update={"page_size_bytes": GIB, "total_pages": 0, "free_pages": 0}
        )
        inventory = inventory.model_copy(update={"hugepages": (*inventory.hugepages, extra)})
    assert plan(settings, inventory).hugepages.pages == 260


# -- ports


def test_vllm_s_default_port_makes_the_metrics_port_give_way():
    made = plan(configured(engine=[engine(port=None)]), host("a2-2cards"))
    assert made.refusals == ()
    assert made.meta.metrics_url == "http://127.0.0.1:8001"
    assert "port.moved" in codes(made.notes)


def test_a_written_port_does_not_give_way_but_is_refused():
    made = plan(configured(meta={"metrics_port": 8000}, engine=[engine(port=8000)]), host("a2-2cards"))
    assert codes(made.refusals) == ["port.collision"]
    assert "8000" in made.refusals[0].message


def test_two_engines_on_one_port():
    made = plan(configured(engine=[engine(devices=[0]), engine(name="f", devices=[1])]), host("a2-2cards"))
    assert codes(made.refusals) == ["port.collision"]


def test_a_stranger_s_port_is_refused_by_the_stranger_s_name():
    made = plan(configured(engine=[engine()]), host("a2-port-taken"))
    taken = [r.message for r in made.refusals if r.code == "port.taken"]
    assert any("5000" in m and "pid" in m for m in taken)
    assert made.meta.metrics_url != "http://127.0.0.1:8000", "8000 is taken too, but only a default"


def test_our_own_units_ports_are_not_taken_by_somebody():
    owner = PortOwner(address="127.0.0.1", port=5000, pid=77, process="python")
    inventory = host("a2-2cards", ports_in_use=(owner,))
    settings = configured(engine=[engine()])
    assert codes(plan(settings, inventory).refusals) == ["port.taken"]
    assert plan(settings, inventory, owned_pids=frozenset({77})).refusals == ()


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([5000, 5001, 6000, 6001, 8000, 8001, 8113]), min_size=4, max_size=4))
def test_no_accepted_plan_uses_a_port_twice(ports):
    meta = {"port": ports[0], "config_store_port": ports[1], "metrics_port": ports[2]}
    made = plan(configured(meta=meta, engine=[engine(port=ports[3])]), host("a2-2cards"))
    used = [p.port for p in made.ports]
    if not made.refusals:
        assert len(set(used)) == len(used)
    if len(set(ports)) < 4:
        assert "port.collision" in codes(made.refusals)


# -- engines and plugins


def test_a_driver_gets_what_it_needs():
    driver = FakeDriver()
    made = plan(
        configured(engine=[engine(env={"A": "1"}, args={"x": 2})]), host("a2-2cards"), {"fake": driver}
    )
    context = driver.contexts[0]
    assert context.local_conf_path == "/var/lib/kvtierd/conf/mmc-local.conf"
    assert context.meta_service_url == "tcp://127.0.0.1:5000"
    assert (context.args, context.env) == ({"x": 2}, {"A": "1"})
    assert "memcache_hybrid" in context.memcache_env["LD_LIBRARY_PATH"]
    unit = made.unit("kvtier-engine-e")
    assert unit.after == ("kvtier-meta-main",)
    assert unit.metrics_url == "http://127.0.0.1:8113/metrics"
    assert unit.talk.base_url == "http://127.0.0.1:8113"
    assert unit.talk.generation.path == "/v1/completions"
    assert set(unit.talk.flush) == {"L1", "L1+L2"}, "what the driver cannot flush is left out"


def test_l3_can_be_switched_only_where_the_settings_say_so():
    talk = plan(configured(engine=[engine()]), host("a2-2cards")).unit("kvtier-engine-e").talk
    assert (talk.l3_attach, talk.l3_detach, talk.l3_fixed) == ((), (), "not asked for")
    made = plan(configured(engine=[engine(l3_switch=True)]), host("a2-2cards"))
    talk = made.unit("kvtier-engine-e").talk
    assert [c.method for c in (*talk.l3_attach, *talk.l3_detach)] == ["PUT", "DELETE"]
    assert talk.l3_fixed == ""
    assert made.refusals == ()


class Fixed(FakeDriver):
    def l3_switch(self, context, *, on):
        if on:
            return (HttpCall(path="/l3"),)
        raise ValueError("its connector stays")


def test_an_engine_that_cannot_switch_its_l3_is_refused_when_it_is_asked_to():
    drivers = {"fake": Fixed()}
    made = plan(configured(engine=[engine(l3_switch=True)]), host("a2-2cards"), drivers)
    assert codes(made.refusals) == ["engine.l3-fixed"]
    assert "its connector stays" in made.refusals[0].message
    assert plan(configured(engine=[engine()]), host("a2-2cards"), drivers).refusals == ()


def test_a_secret_is_in_no_plan_and_its_file_is_the_engines_own():
    files = (
        FileSpec(path="/w/key", mode="0600", content="key: <secret>\n"),
        FileSpec(path="/w/conf", content="x"),
    )
    made = plan(
        configured(engine=[engine(user="serve")]), host("a2-2cards"), {"fake": FakeDriver(files=files)}
    )
    unit = made.unit("kvtier-engine-e")
    assert unit.secret_files == ("/w/key",)
    assert set(unit.files) >= {"/w/key", "/w/conf"}
    owners = {f.path: f.user for f in made.files}
    assert (owners["/w/key"], owners["/w/conf"]) == ("serve", None)
    assert next(f for f in made.files if f.path == "/w/key").content == "key: <secret>\n"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"mode": "0640", "content": "key: <secret>\n"}, "lets others read"),
        ({"mode": "0600", "content": "key: <secret> more\n"}, "last word"),
        ({"mode": "0600", "content": 'key: "<secret>"\n'}, "last word"),
        ({"mode": "0600", "content": "a: <secret>\nb: <secret>\n"}, "one secret"),
        ({"mode": "rw-------", "content": "x"}, "mode"),
    ],
)
def test_a_file_that_would_give_its_secret_away_is_a_fault_of_the_plugin(fields, why):
    class Careless(FakeDriver):
        def launch(self, context):
            return EngineLaunch(argv=("x",), files=(FileSpec(path="/w/key", **fields),))

    made = plan(configured(engine=[engine()]), host("a2-2cards"), {"fake": Careless()})
    assert why in made.left_out["e"]
    assert [f for f in made.files if f.path == "/w/key"] == []


@pytest.mark.parametrize(
    "driver",
    [
        FakeDriver(argv=()),
        type("Raises", (FakeDriver,), {"launch": lambda self, context: 1 / 0})(),
        type("Lies", (FakeDriver,), {"launch": lambda self, context: {"argv": ["x"]}})(),
        type("LiesOfHttp", (FakeDriver,), {"generation": lambda self, context: 1 / 0})(),
    ],
)
def test_a_broken_driver_costs_its_engine_and_is_named(driver):
    made = plan(configured(engine=[engine()]), host("a2-2cards"), {"fake": driver})
    assert made.refusals == ()
    note = next(n for n in made.notes if n.code == "engine.plugin-failed")
    assert "engine 'e' is left out: a fault of the driver 'fake'" in note.message
    assert made.left_out == {"e": note.message}
    assert [u.kind for u in made.units] == ["endpoint", "meta"]
    assert made.pool.providers == 2, (
        "its devices still count: the pool must not change when the plugin is mended"
    )


def test_engines_that_do_not_use_the_pool_bring_nothing_to_it():
    class SomeWithout(FakeDriver):
        def launch(self, context):
            return (
                super()
                .launch(context)
                .model_copy(update={"clients": 0 if context.name == "decode" else None})
            )

    driver = SomeWithout()
    both = [engine(name="prefill", devices=[0]), engine(name="decode", devices=[1], port=8114)]
    made = plan(configured(engine=both), host("a2-2cards"), {"fake": driver})
    assert (made.pool.providers, made.pool.clients) == (1, 0)
    assert {c.pool.providers for c in driver.contexts[-2:]} == {1}, "launches know the pool as it will be"
    assert len({u.port for u in made.ports}) == len(made.ports), "planning twice claims nothing twice"
    all_use = plan(configured(engine=both), host("a2-2cards"), {"fake": FakeDriver()})
    assert made.pool.world_size == all_use.pool.world_size, "one size on all hosts, whatever their roles"


def test_a_pool_that_no_engine_would_hold_is_refused():
    made = plan(configured(engine=[engine()]), host("a2-2cards"), {"fake": FakeDriver(clients=0)})
    assert "pool.no-provider" in codes(made.refusals)


def test_a_part_without_http_claims_no_port():
    made = plan(configured(engine=[engine()]), host("a2-2cards"), {"fake": FakeDriver(serves_http=False)})
    assert made.unit("kvtier-engine-e").ports == ()
    assert "kvtier-engine-e" not in {u.unit for u in made.ports}


def test_launches_know_memcache_s_configuration_as_values():
    driver = FakeDriver()
    made = plan(
        configured(pool={"dram": "64GB", "evict_high": 70, "evict_low": 60}, engine=[engine()]),
        host("a2-2cards"),
        {"fake": driver},
    )
    context = driver.contexts[-1]
    written = next(f for f in made.files if f.path == context.local_conf_path).content
    assert f"= {context.local_conf.world_size}\n" in written
    assert context.local_conf.meta_service_url == context.meta_service_url
    assert context.local_conf.dram_size_bytes == made.pool.dram_bytes_per_provider
    assert (context.meta_conf.evict_threshold_high, context.meta_conf.metrics_url) == (
        70,
        made.meta.metrics_url,
    )


def test_a_driver_s_own_notes_and_refusals_are_told():
    driver = FakeDriver(
        notes=(Note(code="n", message="hello"),), refusals=(Refusal(code="r", message="no", hint="do"),)
    )
    made = plan(configured(engine=[engine()]), host("a2-2cards"), {"fake": driver})
    assert "engine e: hello" in [n.message for n in made.notes]
    assert [(r.code, r.hint) for r in made.refusals] == [("r", "do")]


def test_a_missing_plugin_leaves_the_engine_out_and_says_so():
    made = plan(configured(engine=[engine(plugin="nope")]), host("a2-2cards"))
    assert "engine.plugin-missing" in codes(made.notes)
    assert list(made.left_out) == ["e"]
    assert made.unit("kvtier-engine-e") is None
    assert made.pool.providers == 2, "its devices still count: the pool must not change when the plugin comes"


@pytest.mark.parametrize(
    ("engines", "code"),
    [
        ([engine(devices=[0, 7])], "engine.no-device"),
        ([engine(), engine(name="f", port=8114)], "engine.device-shared"),
    ],
)
def test_devices_must_exist_and_not_be_shared(engines, code):
    assert code in codes(plan(configured(engine=engines), host("a2-2cards")).refusals)


def test_a_held_card_is_named_before_the_start_and_our_own_processes_do_not_hold_it():
    holder = NpuProcess(card=1, pid=4321, name="python3")
    inventory = host("a2-2cards", npu_processes=(holder,))
    settings = configured(engine=[engine(devices=[0]), engine(name="f", devices=[1], port=8114)])
    made = plan(settings, inventory)
    assert made.unit("kvtier-engine-e").blocked is None
    assert "python3 (pid 4321)" in made.unit("kvtier-engine-f").blocked
    assert plan(settings, inventory, owned_pids=frozenset({4321})).unit("kvtier-engine-f").blocked is None


def test_an_engine_in_a_container_is_wrapped_and_its_conf_directory_mounted():
    made = plan(
        configured(engine=[engine(runner="docker", image="img:1", mounts=["/w:/root/.cache:ro"])]),
        host("a2-2cards"),
    )
    argv = made.unit("kvtier-engine-e").argv
    assert argv[:3] == ("/opt/kvtierd/bin/python", "-m", "kvtierd.engines.docker_run")
    assert argv[-3:] == ("img:1", "engine", "8113")
    assert "/var/lib/kvtierd/conf:/var/lib/kvtierd/conf" in argv
    assert "/w:/root/.cache:ro" in argv
    assert "/dev/davinci1" in argv


BOXED = {"runner": "docker", "image": "img:1", "version": "1.3.0", "mounts": ["/ca:/ca:ro"]}


def test_a_meta_service_in_a_container_sees_its_files_logs_and_our_scripts_and_has_no_card():
    made = plan(configured(meta=BOXED, engine=[engine()]), host("a2-2cards"))
    assert made.refusals == ()
    meta = made.unit("kvtier-meta-main")
    conf, logs = "/var/lib/kvtierd/conf", "/var/log/kvtierd/memcache"
    assert meta.argv == (
        "/opt/kvtierd/bin/python", "-m", "kvtierd.engines.docker_run", "--name", "kvtier-meta-main",
        "--stop-seconds", "12", "--", "run", "--rm", "--name", "kvtier-meta-main", "--net=host",
        "-v", f"{conf}:{conf}", "-v", f"{logs}:{logs}", "-v", "/opt/kvtierd:/opt/kvtierd:ro", "-v", "/ca:/ca:ro",
        "-e", "LANG", "-e", "MMC_META_CONFIG_PATH", "-e", "PYTHONUNBUFFERED",
        "img:1", "python3", "/opt/kvtierd/run_meta.py",
    )  # fmt: skip
    assert meta.env["MMC_META_CONFIG_PATH"] == f"{conf}/mmc-meta.conf"
    assert "PATH" in meta.env, "docker's client needs one, which the image must not get"
    assert meta.stop.timeout_seconds > 12, "docker kills first"
    assert f"log_path = {logs}" in file(made, "mmc-meta.conf")
    assert made.memcache_version == "1.3.0"


def test_a_pool_holder_in_a_container_has_its_card_the_driver_and_the_host_s_shared_memory():
    pool = {"dram": 64 * GIB, "placement": "standalone", "holders": 2, "hugepages": 40000}
    meta = {**BOXED, "python": "/image/bin/python3"}
    made = plan(configured(pool=pool, meta=meta, engine=[engine()]), host("a2-2cards"))
    argv = " ".join(made.unit("kvtier-pool-1").argv)
    for part in (
        "--device /dev/davinci1 --device /dev/davinci_manager", "/usr/local/bin/npu-smi:/usr/local/bin/npu-smi",
        "-v /dev/shm:/dev/shm -v /dev/hugepages:/dev/hugepages", "-e ASCEND_HOME_PATH -e", "-e MMC_LOCAL_CONFIG_PATH",
        "img:1 /image/bin/python3 /opt/kvtierd/run_pool.py --device 1",
    ):  # fmt: skip
        assert part in argv
    env = made.unit("kvtier-pool-1").env
    assert env["ASCEND_HOME_PATH"] == "/usr/local/Ascend/ascend-toolkit/latest", "the image's CANN"
    assert "site-packages" not in env["LD_LIBRARY_PATH"], "the host's wheel is not in the image"
    assert made.unit("kvtier-pool-1").devices == (1,)
    assert "memcache.image-cann" in codes(made.notes)


def test_an_engine_of_the_host_does_not_get_the_interpreter_of_an_image():
    driver = FakeDriver()
    engines = [engine(), engine(name="f", devices=[], port=8114, runner="docker", image="img:1")]
    meta = {**BOXED, "python": "/image/bin/python3"}
    plan(configured(meta=meta, engine=engines), host("a2-2cards"), {"fake": driver})
    assert [c.python for c in driver.contexts] == [
        "/usr/local/python3.11.14/bin/python3",
        "/image/bin/python3",
    ]
    assert "site-packages" in driver.contexts[0].memcache_env["LD_LIBRARY_PATH"], "the host's own wheel"


def test_the_run_package_in_an_image():
    meta = {**BOXED, "runtime": "binary", "home": "/opt/mmc", "fabric_home": "/opt/mf"}
    made = plan(configured(meta=meta, engine=[engine()]), host("a2-2cards"))
    unit = made.unit("kvtier-meta-main")
    assert unit.argv[-2:] == ("img:1", "/opt/mmc/aarch64-linux/bin/mmc_meta_service")
    assert unit.env["LD_LIBRARY_PATH"] == "/opt/mmc/aarch64-linux/lib64:/opt/mf/aarch64-linux/lib64"


def test_the_version_in_an_image_must_be_written():
    made = plan(configured(meta={"runner": "docker", "image": "img:1"}, engine=[engine()]), host("a2-2cards"))
    refusal = next(r for r in made.refusals if r.code == "memcache.image-version")
    assert "img:1" in refusal.message
    assert '[meta] version = "1.3.0"' in refusal.hint
    assert made.memcache_version == "", "not the host's"


def test_engines_of_other_nodes_are_not_ours():
    made = plan(configured(engine=[engine(nodes=["elsewhere"])]), host("a2-2cards"))
    assert [u.kind for u in made.units] == ["endpoint", "meta"]


# -- hardware and MemCache


@pytest.mark.parametrize(
    ("name", "series", "protocol"),
    [("a2-2cards", "300I-A2", "device_rdma"), ("a2-8cards", "800I-A2", "device_rdma"),
     ("a3-16dies", "A3", "device_sdma"), ("a5-8", "A5", "device_urma")],
)  # fmt: skip
def test_series_and_protocol_are_found(name, series, protocol):
    made = plan(configured(pool={"dram": 64 * GIB}), host(name))
    assert (made.series, made.pool.protocol) == (series, protocol)


def test_without_an_npu_the_series_must_be_named():
    refusals = plan(configured(), host("emulated-small")).refusals
    assert "plan.series" in codes(refusals)
    assert any("emulated" in r.hint for r in refusals)


def test_a_protocol_that_the_series_does_not_have():
    made = plan(configured(pool={"dram": 64 * GIB, "protocol": "device_sdma"}), host("a2-2cards"))
    assert "pool.protocol" in codes(made.refusals)


def test_emulation_prefixes_units_and_says_so():
    made = plan(
        configured(node={"series": "emulated"}, pool={"dram": "256MiB", "host_reserve": "1GiB"}),
        host("emulated-small"),
    )
    assert made.emulated
    assert all(u.argv[:2] == ("launch", "--") for u in made.units if u.kind in {"meta", "pool"})
    assert made.unit("kvtier-pool-0").env["ASCEND_HOME_PATH"] == "/emu"
    assert "emulated" in codes(made.notes)


def test_only_the_emulated_series_uses_the_emulated_driver():
    made = plan(configured(engine=[engine()]), host("a2-2cards"))
    assert all("launch" not in u.argv for u in made.units)
    assert "/emu" not in json.dumps(made.model_dump(mode="json"))


def test_the_run_package_runs_its_binary():
    made = plan(configured(meta={"runtime": "binary"}, engine=[engine()]), host("a2-2cards-run"))
    meta = made.unit("kvtier-meta-main")
    assert meta.argv == ("/usr/local/memcache_hybrid/latest/aarch64-linux/bin/mmc_meta_service",)
    assert "memcache_hybrid" in meta.env["LD_LIBRARY_PATH"]
    assert "metrics_url = 127.0.0.1:8000" in file(made, "mmc-meta.conf"), "1.0.0 has the bare form"


def test_memcache_that_is_not_there_is_refused_with_the_command():
    made = plan(configured(meta={"python": "/nowhere/python"}), host("a2-2cards"))
    refusal = next(r for r in made.refusals if r.code == "memcache.missing")
    assert "/nowhere/python" in refusal.message
    assert "pip install memcache-hybrid" in refusal.hint


def test_a_further_key_that_the_version_does_not_know_is_refused():
    made = plan(configured(meta={"conf": {"ock.mmc.no_such_key": "1"}}), host("a2-2cards"))
    assert any(r.code.startswith("conf") for r in made.refusals)


PEERS = [{"name": n, "address": f"10.0.0.{i}"} for i, n in enumerate(("a", "b", "c"), start=1)]


def test_behind_relaying_endpoints_every_node_is_ready_to_become_the_master():
    settings = configured(cluster={"mode": "lease", "peers": PEERS}, engine=[engine()])
    plans = {
        (node, master): plan(settings, host("a2-2cards"), node=node, master=master)
        for node in ("a", "b")
        for master in (None, "a", "c")
    }
    assert all(made.refusals == () for made in plans.values())
    for node in ("a", "b"):
        units = [[(u.id, u.digest) for u in plans[node, master].units] for master in (None, "a", "c")]
        assert units[0] == units[1] == units[2], "a change of master changes no unit"
    endpoint = json.loads(file(plans["b", None], "endpoint.json"))
    assert (endpoint["node"], endpoint["peer_listen"], endpoint["target"]) == ("b", "10.0.0.2:5501", None)
    assert [p["address"] for p in endpoint["peers"]] == ["10.0.0.1:5501", "10.0.0.2:5501", "10.0.0.3:5501"]
    assert endpoint["tls"]["key"] == "/etc/kvtierd/tls/node.key"
    made = plans["a", None]
    meta = made.unit("kvtier-meta-main")
    assert meta is not None
    assert meta.guard_file == "/run/kvtierd/lease"
    assert made.master == ""
    assert made.unit("kvtier-engine-e").after == ("kvtier-endpoint-main",)
    assert "tcp://127.0.0.1:5000" in file(made, "mmc-local.conf")
    static = plan(
        configured(cluster={"mode": "static", "master": "b", "peers": PEERS}), host("a2-2cards"), node="a"
    )
    assert static.unit("kvtier-meta-main").guard_file is None, "nothing ends a lease that there is not"


def test_a_witness_runs_nothing_and_is_no_part_of_the_pool():
    peers = [*PEERS[:2], {**PEERS[2], "witness": True}]
    settings = configured(cluster={"mode": "lease", "peers": peers}, engine=[engine()])
    assert codes(plan(settings, host("a2-2cards"), node="c").refusals) == ["cluster.witness"]
    all_cards = [engine(devices=list(range(8)))]
    sizes = [
        plan(
            configured(cluster={"mode": "lease", "peers": chosen}, engine=all_cards),
            host("a2-8cards"),
            node="a",
        ).pool.world_size
        for chosen in (peers, PEERS)
    ]
    assert sizes[0] < sizes[1]


def test_a_container_cannot_be_guarded():
    meta = {"runner": "docker", "image": "example/x:1", "version": "1.3.0"}
    made = plan(configured(cluster={"mode": "lease", "peers": PEERS}, meta=meta), host("a2-2cards"), node="a")
    assert "cluster.guard-container" in codes(made.refusals)
    static = plan(
        configured(cluster={"mode": "static", "master": "a", "peers": PEERS}, meta=meta),
        host("a2-2cards"),
        node="a",
    )
    assert static.refusals == ()


def test_a_changed_setting_changes_the_digest_of_what_reads_it_and_of_nothing_else():
    def digests(**pool):
        made = plan(configured(pool={"dram": 256 * GIB, **pool}, engine=[engine()]), host("a2-2cards"))
        return {u.id: u.digest for u in made.units}

    assert digests() == digests()
    other = digests(world_size=99)
    changed = {u for u, d in digests().items() if other[u] != d}
    assert changed == {"kvtier-engine-e"}


def test_what_a_running_meta_service_takes_over_by_itself_is_no_reason_to_restart_it():
    def digest(**pool):
        made = plan(configured(pool={"dram": 256 * GIB, **pool}, engine=[engine()]), host("a2-2cards"))
        return made.unit("kvtier-meta-main").digest, file(made, "mmc-meta.conf")

    before, after = digest(evict_high=90), digest(evict_high=95)
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_the_master_is_named_on_every_node():
    settings = load_settings(Path("examples/two-hosts-a2.toml"), {})
    assert {plan(settings, host("a2-8cards"), node=n).master for n in ("host-a", "host-b")} == {"host-a"}
    assert plan(configured(engine=[engine()]), host("a2-2cards")).master == "a2-infer-01"


def test_the_documented_json_shape():
    made = json.loads(plan(configured(engine=[engine()]), host("a2-2cards")).model_dump_json())
    assert set(made) >= {"node", "series", "hugepages", "files", "units", "ports", "notes", "refusals"}
    assert set(made["hugepages"]) == {"page_size_bytes", "pages", "per_numa_node"}
    assert set(made["files"][0]) == {"path", "mode", "content", "user"}
    assert set(made["units"][0]) >= {"id", "kind", "argv", "env", "user", "devices", "files"}


@pytest.mark.parametrize(
    ("endpoints", "more", "refused"),
    [
        (["10.0.0.9:2379"], {}, True),
        (["127.0.0.1:2379", "10.0.0.9:2379"], {}, True),
        (["etcd.example.org:2379"], {}, True),
        (["127.0.0.1:2379", "localhost:2379", "[::1]:2379"], {}, False),
        (["10.0.0.9:2379"], {"insecure": True}, False),
        (["10.0.0.9:2379"], {"tls": {}}, False),
    ],
)
def test_an_etcd_elsewhere_is_talked_to_with_certificates_or_by_the_operators_word(endpoints, more, refused):
    etcd = {"endpoints": endpoints} | {k: v for k, v in more.items() if k == "tls"}
    cluster = {"mode": "etcd", "peers": PEERS, "etcd": etcd} | {k: v for k, v in more.items() if k != "tls"}
    told = codes(plan(configured(cluster=cluster), host("a2-2cards"), node="a").refusals)
    assert ("cluster.etcd-plain" in told) is refused


def test_in_mode_etcd_every_node_is_ready_to_become_the_master():
    cluster = {"mode": "etcd", "peers": PEERS, "etcd": {"endpoints": ["127.0.0.1:2379"]}}
    for node in ("a", "b", "c"):
        made = plan(configured(cluster=cluster, engine=[engine()]), host("a2-2cards"), node=node)
        assert not made.refusals
        assert made.unit("kvtier-meta-main").guard_file


def test_an_engine_without_the_pool_enters_the_emulation_too():
    settings = configured(
        node={"series": "emulated"},
        pool={"dram": "256MiB", "host_reserve": "1GiB"},
        engine=[engine(devices=[])],
    )
    driver = FakeDriver(clients=0, env={"OWN": "1"})
    made = plan(settings, host("emulated-small", shm_total_bytes=GIB), {"fake": driver})
    (unit,) = [u for u in made.units if u.kind == "engine"]
    assert not unit.uses_pool
    assert unit.argv[:2] == ("launch", "--")
    assert unit.env["ASCEND_HOME_PATH"] == "/emu"
    assert unit.env["OWN"] == "1"
