from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.settings import check_settings, load_settings
from kvtierd.settings.load import InvalidSettingsError

MINIMAL = '[pool]\ndram = "256GiB"\n'


def write(tmp_path: Path, text: str, name: str = "kvtierd.toml") -> Path:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(tmp_path, text, environment=None):
    _, problems = check_settings(write(tmp_path, text), environment or {})
    return problems


def test_the_smallest_file_has_the_design_s_defaults(tmp_path):
    loaded = load_settings(write(tmp_path, MINIMAL), {})
    assert loaded.pool.dram == 256 * 1024**3
    assert (loaded.meta.port, loaded.meta.config_store_port, loaded.meta.metrics_port) == (5000, 6000, None)
    assert (loaded.pool.evict_high, loaded.pool.evict_low) == (90, 80)
    assert loaded.pool.purge_on_unclean
    assert loaded.cluster.mode == "standalone"


@pytest.mark.parametrize("section", ["[meta]\n", '[[engine]]\nname = "a"\nplugin = "x"\n'])
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('runner = "docker"', "runner docker needs an image"),
        ('image = "img:1"', 'image is for a container; write runner = "docker"'),
        ('mounts = ["/a:/b"]', "mounts is for a container"),
        ('runner = "docker"\nimage = "--privileged"', "is not the name of an image"),
        ('runner = "docker"\nimage = "img:1"\nmounts = ["a:b"]', "is not of the form /source:/target[:ro]"),
    ],
)
def test_what_belongs_to_a_container_goes_together(tmp_path, section, lines, message):
    (problem,) = problems_of(tmp_path, f"{MINIMAL}{section}{lines}\n")
    assert message in problem.message


def test_an_image_may_have_a_registry_with_a_port_a_tag_and_a_digest(tmp_path):
    image = "host.example:5000/ascend/vllm-ascend:v0.13.0-openeuler@sha256:0123abcd"
    text = f'{MINIMAL}[meta]\nrunner = "docker"\nimage = "{image}"\nmounts = ["/a:/b:ro"]\n'
    assert load_settings(write(tmp_path, text), {}).meta.image == image


@pytest.mark.parametrize(
    ("text", "line", "key", "code", "in_message", "in_hint"),
    [
        ('[pool]\ndramm = "1GiB"\ndram = "1GiB"\n', 2, "pool.dramm", "unknown-key", "dramm", "did you mean 'dram'"),
        ('[pool]\n\ndram = "12 pounds"\n', 3, "pool.dram", "invalid-value", "unknown unit", "256GiB"),
        ("[pool]\n", 1, "pool.dram", "missing-key", "missing", "256GiB"),
        (MINIMAL + "[meta]\nport = 80\n", 4, "meta.port", "invalid-value", "1025", "port = 5000"),
        (MINIMAL + "evict_high = 100\n", 3, "pool.evict_high", "invalid-value", "99", "evict_high = 90"),
        (MINIMAL + "evict_low = 95\n", 1, "pool", "invalid-value", "below", ""),
        (MINIMAL + '[node]\nseries = "A4"\n', 4, "node.series", "invalid-value", "'A3'", "series ="),
        (MINIMAL + '[nood]\nname = "a"\n', 3, "nood", "unknown-key", "nood", "did you mean 'node'"),
        (MINIMAL + '[meta]\ndram = "1GiB"\n', 4, "meta.dram", "unknown-key", "dram", "belongs into [pool]"),
        (MINIMAL + '[[engine]]\nname = "a"\nplugin = "x"\nprot = 1\n', 6, "engine.0.prot", "unknown-key", "", "'port'"),
        (MINIMAL + '[paths]\nstate = "var/lib"\n', 4, "paths.state", "invalid-value", "absolute", ""),
        (MINIMAL + "[meta]\nlease_ttl = 10\n", 4, "meta.lease_ttl", "invalid-value", "unit", "10s"),
        ('[pool]\ndram = 256GiB\n', 2, None, "syntax", "", "quotes"),
        ('[pool]\ndram = "1GiB"\ndram = "2GiB"\n', 3, None, "syntax", "overwrite", ""),
    ],
)  # fmt: skip
def test_a_problem_names_line_key_and_what_would_be_right(
    tmp_path, text, line, key, code, in_message, in_hint
):
    found = problems_of(tmp_path, text)
    assert [(p.line, p.key, p.code) for p in found] == [(line, key, code)]
    assert in_message in found[0].message
    assert in_hint in found[0].hint
    assert found[0].file.endswith("kvtierd.toml")


def test_all_problems_are_told_at_once(tmp_path):
    found = problems_of(tmp_path, '[pool]\ndram = "x"\nevict_high = 0\n[meta]\nport = 1\n')
    assert [p.key for p in found] == ["pool.dram", "pool.evict_high", "meta.port"]


def test_two_engines_of_one_name(tmp_path):
    text = MINIMAL + '[[engine]]\nname = "a"\nplugin = "x"\n[[engine]]\nname = "a"\nplugin = "y"\n'
    found = problems_of(tmp_path, text)
    assert len(found) == 1
    assert "two engines are named 'a'" in found[0].message


def test_second_engine_s_problem_has_its_own_line(tmp_path):
    text = (
        MINIMAL + '[[engine]]\nname = "a"\nplugin = "x"\n\n[[engine]]\nname = "b"\nplugin = "y"\nport = "z"\n'
    )
    assert [(p.line, p.key) for p in problems_of(tmp_path, text)] == [(10, "engine.1.port")]


def test_drop_ins_change_and_add(tmp_path):
    file = write(tmp_path, MINIMAL + '[[engine]]\nname = "a"\nplugin = "x"\nport = 9000\n')
    write(tmp_path, '[pool]\nevict_high = 95\n[[engine]]\nname = "a"\nport = 9001\n', "conf.d/10-a.toml")
    write(tmp_path, '[[engine]]\nname = "b"\nplugin = "y"\n', "conf.d/20-b.toml")
    write(tmp_path, "this is not TOML", "conf.d/README")
    loaded = load_settings(file, {})
    assert loaded.pool.evict_high == 95
    assert [(e.name, e.plugin, e.port) for e in loaded.engine] == [("a", "x", 9001), ("b", "y", None)]


def test_a_problem_in_a_drop_in_names_the_drop_in(tmp_path):
    file = write(tmp_path, MINIMAL)
    write(tmp_path, "[pool]\n\nevict_high = 200\n", "conf.d/50-x.toml")
    _, found = check_settings(file, {})
    assert [(Path(p.file).name, p.line) for p in found] == [("50-x.toml", 3)]


def test_the_environment_wins_and_is_named_in_problems(tmp_path):
    file = write(tmp_path, MINIMAL)
    assert load_settings(file, {"KVTIERD_POOL__EVICT_HIGH": "91"}).pool.evict_high == 91
    _, found = check_settings(file, {"KVTIERD_META__PORT": "many"})
    assert found[0].file == "environment variable KVTIERD_META__PORT"
    _, found = check_settings(file, {"KVTIERD_POOOL__DRAM": "1GiB"})
    assert (found[0].code, found[0].hint) == ("unknown-key", "did you mean 'pool'?")


def test_other_variables_of_the_process_do_not_leak_in(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIERD_POOL__EVICT_HIGH", "92")
    assert load_settings(write(tmp_path, MINIMAL), {}).pool.evict_high == 90


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"\xff\xfe[pool]", "not-utf8"), (b"x" * (1024 * 1024 + 1), "too-large"), (None, "missing-file")],
)
def test_files_that_are_no_settings(tmp_path, content, code):
    path = tmp_path / "kvtierd.toml"
    if content is not None:
        path.write_bytes(content)
    _, found = check_settings(path, {})
    assert [p.code for p in found] == [code]


def test_a_byte_order_mark_and_crlf_are_read(tmp_path):
    path = tmp_path / "kvtierd.toml"
    path.write_bytes(b'\xef\xbb\xbf[pool]\r\ndram = "1GiB"\r\nevict_high = 200\r\n')
    _, found = check_settings(path, {})
    assert [(p.line, p.key) for p in found] == [(3, "pool.evict_high")]


def test_a_directory_is_said_not_raised(tmp_path):
    _, found = check_settings(tmp_path, {})
    assert found[0].code == "unreadable-file"


def test_the_error_lists_every_problem(tmp_path):
    with pytest.raises(InvalidSettingsError) as raised:
        load_settings(write(tmp_path, "[pool]\n"), {})
    assert "kvtierd.toml:1" in str(raised.value)
    assert raised.value.stable_code == "settings.invalid"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_no_bytes_whatever_make_it_raise(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_bytes(data)
    loaded, found = check_settings(path, {})
    assert (loaded is None) == bool(found)


def test_cluster_rules(tmp_path):
    peers = 'peers = [{ name = "a", address = "10.0.0.1" }, { name = "b", address = "10.0.0.2" }]\n'
    good = MINIMAL + '[cluster]\nmode = "static"\nmaster = "a"\n' + peers
    assert load_settings(write(tmp_path, good), {}).cluster.master == "a"
    for broken, word in [
        (good.replace('"a"\npeers', '"c"\npeers'), "master"),
        (MINIMAL + '[cluster]\nmode = "static"\n', "peers"),
        (MINIMAL + "[cluster]\n" + peers, "standalone"),
        (good.replace('name = "b"', 'name = "a"'), "same name"),
    ]:
        assert word in problems_of(tmp_path, broken)[0].message


@pytest.mark.parametrize("example", sorted(p.name for p in Path("examples").glob("*.toml")))
def test_every_example_is_valid(example):
    loaded, found = check_settings(Path("examples") / example, {})
    assert found == ()
    assert loaded is not None


THREE = (
    'peers = [{ name = "a", address = "10.0.0.1" }, { name = "b", address = "10.0.0.2" },'
    ' { name = "c", address = "10.0.0.3", witness = true }]\n'
)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('mode = "lease"\n' + THREE, ""),
        ('mode = "lease"\nlease = "2s"\n' + THREE, ""),
        ('mode = "lease"\nlease = "500ms"\n' + THREE, "greater than or equal to 1"),
        ('mode = "lease"\nmaster = "a"\n' + THREE, "elects its master"),
        (
            'mode = "lease"\npeers = [{ name = "a", address = "10.0.0.1" }, { name = "b", address = "10.0.0.2" }]\n',
            "two that lose sight of each other",
        ),
        ('mode = "static"\nmaster = "a"\n' + THREE, "only votes"),
        ('mode = "etcd"\n' + THREE.replace(", witness = true", ""), "needs etcd"),
        (
            'mode = "etcd"\netcd = { endpoints = ["10.0.0.9:2379"] }\n'
            + THREE.replace(", witness = true", ""),
            "",
        ),
        *(
            (f'mode = "etcd"\netcd = {{ {etcd} }}\n' + THREE.replace(", witness = true", ""), wrong)
            for etcd, wrong in (
                ('endpoints = ["http://10.0.0.9:2379"]', "is not HOST:PORT"),
                ('endpoints = ["10.0.0.9"]', "is not HOST:PORT"),
                ('endpoints = ["10.0.0.9:70000"]', "is not HOST:PORT"),
                ('endpoints = ["10.0.0.9:2379", "10.0.0.9:2379"]', "given twice"),
                ('endpoints = ["10.0.0.9:2379"], prefix = "kvtierd"', "does not begin with /"),
                ('endpoints = ["[fd00::9]:2379", "etcd-1.example.org:2379"], prefix = "/site/kvtierd"', ""),
            )
        ),
        (
            'mode = "lease"\n' + THREE.replace("witness = true", "witness = true, voter = false"),
            "does nothing",
        ),
    ],
)
def test_who_elects(tmp_path, text, wrong):
    file = write(tmp_path, MINIMAL + "[cluster]\n" + text)
    if not wrong:
        cluster = load_settings(file, {}).cluster
        assert len(cluster.voters) == 3
        return
    with pytest.raises(InvalidSettingsError) as told:
        load_settings(file, {})
    assert wrong in str(told.value)
