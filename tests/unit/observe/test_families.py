import dataclasses
import re
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.parser import text_string_to_metric_families

from kvtierd.observe.declared import DECLARED
from kvtierd.observe.encode import encode
from kvtierd.observe.families import MOST, ClusterFacts, Exported, metric_families
from kvtierd.observe.picture import Picture
from kvtierd.units.unit_state import UnitState

from .full import NOW, engine, full, host, picture, pool, unit

DOCS = Path(__file__).parents[3] / "docs" / "observability.md"


def samples(shown):
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value for f in metric_families(shown) for s in f.samples
    }


def value(shown, metric, **labels):
    return samples(shown).get((metric, tuple(sorted(labels.items()))))


def test_a_full_state_has_a_value_for_every_declared_metric():
    assert {f.name + ("_total" if f.type == "counter" else "") for f in metric_families(full())} == set(
        DECLARED
    )


class Collected:
    def __init__(self, families):
        self.families = families

    def collect(self):
        return self.families


def as_set(families):
    return {
        (f.name, f.type, s.name, tuple(sorted(s.labels.items())), s.value)
        for f in families
        for s in f.samples
    }


@pytest.mark.parametrize("state", [full(), full(picture=picture(engines=(engine(0, unit='a"b\\c\nd'),)))])
def test_both_formats_say_what_the_librarys_own_encoders_say(state):
    families = metric_families(state)
    for openmetrics, theirs, read in (
        (False, generate_latest, text_string_to_metric_families),
        (True, exposition.generate_latest, parser.text_string_to_metric_families),
    ):
        ours = encode(families, openmetrics=openmetrics).decode()
        found = as_set(read(ours))
        assert found == as_set(read(theirs(Collected(families)).decode()))
        assert len(found) == sum(len(f.samples) for f in families)
        assert ours.endswith("# EOF\n") == openmetrics


def test_names_follow_prometheus_rules():
    for name, declared in DECLARED.items():
        assert re.fullmatch(r"kvtierd_[a-z0-9_]+", name)
        assert name.endswith("_total") == (declared.kind == "counter"), name
        assert declared.meaning.endswith(".")
        assert "quantile" not in declared.labels
        assert not {"le", "instance", "job"} & set(declared.labels)


def test_values():
    state = full()
    assert value(state, "kvtierd_tier_hit_ratio", tier="L3", window="5m") == 0.8
    assert value(state, "kvtierd_engine_hit_tokens_total", engine="kvtier-engine-e0", tier="L1") == 250
    assert value(state, "kvtierd_pool_turnovers_per_hour", window="1m") == 1.5
    assert value(state, "kvtierd_pool_evict_threshold_ratio", bound="high") == 0.9
    assert value(state, "kvtierd_host_hugepages_free_bytes", numa="0") == 1024**3
    assert value(state, "kvtierd_npu_healthy", device="1", card="1") == 0
    assert value(state, "kvtierd_unit_state", unit="kvtier-engine-e1", kind="engine", state="degraded") == 1
    assert value(state, "kvtierd_unit_state", unit="kvtier-engine-e1", kind="engine", state="ready") == 0
    assert value(state, "kvtierd_picture_age_seconds") == 1.0
    assert value(state, "kvtierd_cluster_is_master") == 1
    assert value(state, "kvtierd_build_info", version="0.6.0", node="host-0") == 1


def test_unknown_is_not_exported_and_zero_is():
    bare = Picture(
        NOW, "host-0", engines=(engine(0, failed_loads=0, waiting=None, windows={}, ttft_p50_seconds=None),)
    )
    state = full(picture=bare, cluster=ClusterFacts())
    names = {name for name, _ in samples(state)}
    assert value(state, "kvtierd_engine_failed_loads_total", engine="kvtier-engine-e0") == 0
    assert "kvtierd_engine_waiting_requests" not in names
    assert "kvtierd_engine_ttft_p50_seconds" not in names
    assert not any(name.startswith(("kvtierd_pool_", "kvtierd_host_", "kvtierd_cluster_")) for name in names)


def test_before_the_first_picture_there_are_units_and_tier():
    names = {name for name, _ in samples(full(picture=None))}
    assert {"kvtierd_build_info", "kvtierd_unit_state", "kvtierd_tier_state"} <= names
    assert "kvtierd_picture_age_seconds" not in names
    assert samples(Exported(0.0, 0.0))


def test_an_engine_that_cannot_be_read_is_down():
    for broken in (engine(0, problem="no answer"), engine(0, at_seconds=None)):
        state = full(picture=picture(engines=(broken,)))
        assert value(state, "kvtierd_engine_up", engine="kvtier-engine-e0") == 0
    assert value(full(), "kvtierd_engine_up", engine="kvtier-engine-e0") == 1


def test_cardinality_is_bounded_and_what_is_left_out_is_counted():
    state = full(
        units=tuple(unit(f"u{n}") for n in range(1000)),
        picture=picture(
            engines=tuple(engine(n) for n in range(1000)),
            pool=pool(5000),
            peers=tuple(host(node=f"h{n}") for n in range(1000)),
        ),
    )
    found = samples(state)
    assert len([1 for name, _ in found if name == "kvtierd_pool_segment_used_bytes"]) == MOST["segments"]
    assert len([1 for name, _ in found if name == "kvtierd_unit_restarts_total"]) == MOST["units"]
    assert value(state, "kvtierd_exporter_left_out") == (1000 - 128) + (1000 - 64) + (5000 - 1024) + (
        1000 - 256
    )
    assert len(found) < 10_000


def test_two_of_the_same_name_do_not_break_the_scrape():
    state = full(picture=picture(engines=(engine(0), engine(0))))
    text = encode(metric_families(state), openmetrics=False).decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len({line.rpartition(" ")[0] for line in lines}) == len(lines)


@pytest.mark.parametrize("name", ['a"b\\c\nd', "\ud800", "x" * 5000, "é", ""])
def test_labels_are_escaped_and_bounded(name):
    state = full(picture=picture(engines=(engine(0, unit=name),)))
    for openmetrics in (False, True):
        text = encode(metric_families(state), openmetrics=openmetrics).decode()
        assert max(len(line) for line in text.splitlines()) < 400
        read = parser.text_string_to_metric_families if openmetrics else text_string_to_metric_families
        labels = {s.labels["engine"] for f in read(text) for s in f.samples if "engine" in s.labels}
        assert labels == {name[:128].encode("utf-8", "replace").decode()}


def test_every_state_of_a_unit_is_told():
    told = {dict(labels)["state"] for name, labels in samples(full()) if name == "kvtierd_unit_state"}
    assert told == {state.value for state in UnitState}


def test_every_metric_is_documented_with_its_type_and_labels_and_no_other():
    rows = dict(re.findall(r"^\| `(kvtierd_\w+)` \| (.+) \|$", DOCS.read_text(), re.MULTILINE))
    assert set(rows) == set(DECLARED)
    for name, row in rows.items():
        kind, labels, meaning = (cell.strip() for cell in row.split(" | "))
        assert kind == DECLARED[name].kind, name
        assert tuple(re.findall(r"`(\w+)`", labels)) == DECLARED[name].labels, name
        assert len(meaning) > 6


def test_the_bounds_are_documented():
    text = DOCS.read_text()
    words = {"numa": "NUMA nodes", "npus": "dies"}
    for what, most in MOST.items():
        assert f"{most} {words.get(what, what)}" in text, what


def test_a_state_is_not_changed_by_being_shown():
    state = full()
    copy = dataclasses.replace(state)
    metric_families(state)
    assert state == copy


def test_a_value_that_is_not_finite_is_unknown():
    state = full(
        picture=picture(engines=(engine(0, ttft_p50_seconds=float("nan"), l1_used_ratio=float("inf")),))
    )
    names = {name for name, _ in samples(state)}
    assert not {"kvtierd_engine_ttft_p50_seconds", "kvtierd_engine_l1_used_ratio"} & names
