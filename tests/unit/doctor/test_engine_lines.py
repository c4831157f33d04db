"""Command lines of engines as values."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.doctor.engine_lines import read_line


def line(*words):
    return read_line(words, "it", "given")


@pytest.mark.parametrize(
    ("words", "kind", "model", "python"),
    [
        (("vllm", "serve", "/m"), "vllm", "/m", None),
        (("/opt/v/bin/vllm", "serve", "/m"), "vllm", "/m", "/opt/v/bin/python3"),
        (("/opt/v/bin/python3.11", "/usr/bin/vllm", "serve", "/m"), "vllm", "/m", "/opt/v/bin/python3.11"),
        (("python3", "-m", "vllm.entrypoints.openai.api_server", "--model=/m"), "vllm", "/m", "python3"),
        (("python3", "-m", "vllm.entrypoints.cli.main", "--model", "/m"), "vllm", "/m", "python3"),
        (("python3", "-m", "sglang.launch_server", "--model-path", "/m"), "sglang", "/m", "python3"),
        (("docker", "run", "--rm", "-e", "A=1", "image", "vllm", "serve", "/m"), "vllm", "/m", None),
    ],
)
def test_ways_to_start_one(words, kind, model, python):
    found = line(*words)
    assert (found.kind, found.model, found.python) == (kind, model, python)


@pytest.mark.parametrize(
    "words", [(), ("ls", "-l"), ("vllm", "bench"), ("vllm",), ("python3", "-m"), ("python3", "-m", "x")]
)
def test_what_is_no_engine(words):
    assert line(*words) is None


def test_options_in_all_their_spellings():
    options = "--block_size=64 --PORT 81 -tp 4 -pp=2 --enforce-eager --seed 1 --seed 2"
    found = line("vllm", "serve", "/m", *options.split())
    assert found.flags["block-size"] == "64"
    assert found.port == 81
    assert (found.number("tensor-parallel-size", 1), found.number("pipeline-parallel-size", 1)) == (4, 2)
    assert found.flags["enforce-eager"] == ""
    assert found.flags["seed"] == "2"
    assert found.number("enforce-eager", 7) == 7


def test_sglangs_short_names_are_the_long_ones():
    found = line("python", "-m", "sglang.launch_server", "--tp", "8", "--dp-size", "2", "--enable-hicache")
    assert found.number("tensor-parallel-size", 1) == 8
    assert found.number("data-parallel-size", 1) == 2
    assert "enable-hierarchical-cache" in found.flags
    assert found.port == 30000


def test_variables_in_front_of_it():
    assert line("env", "PYTHONHASHSEED=0", "vllm", "serve", "/m").env == {"PYTHONHASHSEED": "0"}
    boxed = line("docker", "run", "-e", "A=1", "--env=B=2", "-eC=3", "i", "vllm", "serve", "/m", "D=4")
    assert boxed.env == {"A": "1", "B": "2", "C": "3"}


def test_connectors_the_outermost_first():
    extra = {"backend": "memcache", "lookup_rpc_port": "1"}
    inner = {"kv_connector": "AscendStoreConnector", "kv_connector_extra_config": extra}
    outer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [inner]}}
    text = json.dumps(outer)
    found = line("vllm", "serve", "/m", "--kv-transfer-config", text)
    assert [c["kv_connector"] for c in found.connectors] == ["MultiConnector", "AscendStoreConnector"]
    assert found.store["lookup_rpc_port"] == "1"
    assert found.uses_memcache


def test_dotted_options_are_one_transfer():
    found = line(
        "vllm",
        "serve",
        "/m",
        "--kv-transfer-config.kv_connector",
        "X",
        "--kv-transfer-config.kv_role=kv_both",
    )
    assert found.transfer == {"kv_connector": "X", "kv_role": "kv_both"}


@pytest.mark.parametrize("text", ["{", "[]", "1", '{"a": 1} # note', '{"kv_connector_extra_config": 3}'])
def test_a_transfer_that_cannot_be_used_has_no_store(text):
    found = line("vllm", "serve", "/m", "--kv-transfer-config", text)
    assert found.store is None
    assert not found.uses_memcache


@pytest.mark.parametrize(
    ("model", "hybrid"),
    [
        ("DeepSeek-V4-Flash", True),
        ("/w/Qwen3.5-122B", True),
        ("Qwen3-Next-80B", True),
        ("Qwen3-32B", False),
        ("DeepSeek-V3.1", False),
    ],
)
def test_hybrid_models_by_name(model, hybrid):
    assert line("vllm", "serve", model).hybrid is hybrid


@given(st.lists(st.text(max_size=12), max_size=12))
def test_no_words_make_it_raise(words):
    found = read_line(["vllm", "serve", *words], "it", "given")
    assert found.port >= 0
    assert isinstance(found.connectors, tuple)
    assert found.uses_memcache in {True, False}
