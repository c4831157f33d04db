"""Samples by name: what counts as one, its labels, and agreement with prometheus-client's parser."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtierd.plan.samples import Sample, read_samples

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
