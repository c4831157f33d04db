"""Samples by name: what counts as one, its labels, and agreement with prometheus-client's parser."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtierd.plan.samples import Sample, read_buckets, read_samples

RECORDED = Path(__file__).parents[2] / "fixtures" / "engines"


@pytest.mark.parametrize(
    "scrape", ["sglang/metrics-backup.txt", "sglang/metrics-storage-hit.txt", "vllm/metrics.txt"]
)
def test_every_finite_sample_of_a_recorded_scrape_is_as_the_library_reads_it(scrape: str) -> None:
    text = (RECORDED / scrape).read_text()
    expected: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if math.isfinite(sample.value):
                expected.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    assert len(expected) > 10
    assert read_samples(text, expected.keys()) == expected


def test_labels_with_braces_quotes_and_line_ends() -> None:
    text = r'a{x="1\" } 2",y="p\\q\nr"} 3' + "\n"
    (family,) = text_string_to_metric_families(text)
    assert read_samples(text, ["a"]) == {"a": [Sample(family.samples[0].labels, 3.0)]}
    assert read_samples(text, ["a"])["a"][0].labels == {"x": '1" } 2', "y": "p\\q\nr"}


def test_longer_names_comments_and_what_is_not_finite_are_left_out() -> None:
    text = "# HELP a b\n# TYPE a gauge\na_total 1\na NaN\na +Inf\nb 2 1700000000\r\n"
    assert read_samples(text, ["a", "b", "c"]) == {"b": [Sample({}, 2.0)]}


@pytest.mark.parametrize("line", ["a", 'a{x="1} 2', "a one", "a 1 2 3", "a{"])
def test_a_line_that_is_no_sample_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"not a"):
        read_samples(line, ["a"])


def test_a_histogram_is_added_up_over_its_label_sets():
    text = (
        'h_bucket{e="0",le="0.5"} 1\nh_bucket{e="0",le="+Inf"} 3\n'
        'h_bucket{e="1",le="0.5"} 2\nh_bucket{e="1",le="+Inf"} 2\n'
        'h_bucket{e="1",le="nonsense"} 9\nh_bucket 7\nh_bucket{le="NaN"} 7\n'
    )
    samples = read_samples(text, ["h_bucket"])
    assert read_buckets(samples, "h_bucket") == {0.5: 3, math.inf: 5}
    assert read_buckets(samples, "other_bucket") is None


def test_bounds_that_not_all_have_are_left_out():
    text = 'h_bucket{e="0",le="1"} 1\nh_bucket{e="0",le="2"} 3\nh_bucket{e="1",le="2"} 2\n'
    assert read_buckets(read_samples(text, ["h_bucket"]), "h_bucket") == {2.0: 5}
