import pytest

from kvtierd.doctor.known_issues import WORDS, known_issues, parse_issues, read_version, words_that_hold
from kvtierd.errors import UsageError
from kvtierd.settings import Settings

GOOD = """
[[issue]]
id = "vllm-something-breaks"
component = "vllm"
versions = ">=0.6.5,<0.8.5"
when = ["pool"]
severity = "warn"
title = "Something breaks now and then"
advice = "Do not let it break at all."
source = "vllm-project/vllm#1"
"""


def test_the_table_is_valid_and_every_word_and_component_is_used():
    issues = known_issues()
    assert len(issues) >= 20
    assert {issue.component for issue in issues} == {
        "memcache",
        "vllm",
        "vllm-ascend",
        "sglang",
        "driver",
        "cann",
    }
    assert {word for issue in issues for word in issue.when} == set(WORDS)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('">=0.6.5,<0.8.5"', '"newer than 3"', "PEP 440"),
        ('["pool"]', '["full moon"]', "full moon"),
        ('"warn"', '"bad"', "severity"),
        ('component = "vllm"', 'component = "emacs"', "component"),
        ("vllm-project/vllm#1", "somebody told me", "source"),
        ("versions =", "version =", "versions"),
        ('severity = "warn"', 'severity = "warn"\ncolour = 1', "colour"),
        ('id = "vllm-', 'id = "sglang-', "does not begin"),
        ("[[issue]]", "[[issue", "not TOML"),
        ('"Something breaks now and then"', '"No"', "title"),
    ],
)
def test_a_table_with_a_fault_is_refused_and_the_place_is_named(old, new, said):
    assert parse_issues(GOOD)
    assert old in GOOD
    with pytest.raises(UsageError) as raised:
        parse_issues(GOOD.replace(old, new))
    assert said in raised.value.message


def test_an_id_is_there_once():
    with pytest.raises(UsageError, match="twice"):
        parse_issues(GOOD + GOOD)


@pytest.mark.parametrize(
    ("version", "concerns"),
    [
        ("0.6.4", False),
        ("0.6.5", True),
        ("0.8.4.post1", True),
        ("0.8.5rc1", False),
        ("0.8.5", False),
        ("v0.7", True),
        ("new", None),
    ],
)
def test_versions_by_pep_440(version, concerns):
    assert parse_issues(GOOD)[0].concerns(version) is concerns


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("25.0.rc1.1", "25.0rc1"),
        ("8.3.RC2", "8.3rc2"),
        ("0.22.1rc1", "0.22.1rc1"),
        ("25.2.3", "25.2.3"),
        ("", "None"),
        ("x", "None"),
    ],
)
def test_versions_as_driver_and_cann_write_them(text, read):
    assert str(read_version(text)) == read


def test_words_by_the_settings():
    engine = {
        "name": "q",
        "plugin": "vllm-ascend",
        "args": {"pipeline-parallel-size": 2, "kv": {"p": "recompute"}},
    }
    settings = Settings.model_validate(
        {"pool": {"dram": "1GiB"}, "meta": {"endpoint": "direct"}, "engine": [engine]}
    )
    holds = words_that_hold(settings)
    assert {word for word, true in holds.items() if true} == {"pool", "pipeline", "recompute", "direct"}
    assert set(holds) <= set(WORDS)
    assert "hybrid-model" not in holds
    assert words_that_hold(None) == {}
