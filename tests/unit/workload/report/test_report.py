"""Reports: what may be compared, what is shown, and that a page needs nothing else."""

import json
import re
import struct
import xml.etree.ElementTree as ET

import pytest

from kvtierd.errors import WorkloadError
from kvtierd.workload.load.counters import Counts, tier_account
from kvtierd.workload.load.measure import RequestRecord, summarize
from kvtierd.workload.report.rows import rows_of, why_not
from kvtierd.workload.report.table import comparison_text, duration, percent, run_text
from kvtierd.workload.report.write import write_report


def records(ttft=0.4, count=20, failed=0):
    return [
        RequestRecord(
            number=n, conversation=str(n), turn=1, started_seconds=n * 0.5, lag_seconds=0.0, ttft_seconds=ttft + n * 0.001,
            e2e_seconds=ttft + 1, tpot_seconds=0.02, prompt_tokens=1000, output_tokens=50, tokens_from="usage",
            cached_tokens=None, prompt_chars=4000, error="timeout" if n < failed else "",
            error_text="late" if n < failed else "",
        )
        for n in range(count)
    ]  # fmt: skip


def result(label, *, ttft=0.4, l1=0, l3=0, complete=True, counters=True, failed=0, **settings):
    after = Counts(((20_000, l1), (None, None), (20_000 - l1, l3)))
    before = Counts(((0, 0), (None, None), (0, 0)))
    return {
        "kind": "kvtierd-bench-run", "label": label, "complete": complete,
        "ended": "finished" if complete else "interrupted",
        "settings": {"concurrency": 4, "arrival": "closed", "rate": 0, "max_tokens": 50, "model": "m"} | settings,
        "sessions": {"planned": 20, "done": 20, "cut_off": 0}, "requests_not_sent": 0,
        "summary": summarize(records(ttft, failed=failed), [0.02] * 100, seconds=10.0),
        "tiers": {"source": "http://e/metrics, read as vllm", **tier_account(before, after)} if counters else None,
        "timeline": [
            {"seconds": 1.0, "looked_up": 1000, "l1": 0, "l2": None, "l3": 0},
            {"seconds": 2.0, "looked_up": 1000, "l1": 400, "l2": None, "l3": 500},
        ],
        "notes": [],
    }  # fmt: skip


COLD = result("no cache")
WARM = result("prefix cache + pool", ttft=0.1, l1=4_000, l3=6_000)


def test_a_speed_up_with_hits():
    cold, warm = rows_of([COLD, WARM])
    assert (cold["speed_up"], cold["hit_rate"]) == (None, 0)
    assert warm["hit_rate"] == 0.5
    assert warm["l3_share"] == 0.3
    assert warm["speed_up"] == pytest.approx(0.4095 / 0.1095)
    assert warm["ttft_reduction"] == pytest.approx(1 - 0.1095 / 0.4095)
    assert warm["no_speed_up_because"] == ""


@pytest.mark.parametrize(
    ("base", "other", "why"),
    [
        (COLD, result("w", ttft=0.1), "no hits"),
        (COLD, result("w", ttft=0.1, counters=False), "unknown"),
        (COLD, result("w", ttft=0.1, l3=500, complete=False), "not complete"),
        (result("c", complete=False), WARM, "not complete"),
        (COLD, result("w", ttft=0.1, l3=500, concurrency=8), "same work"),
        (COLD, result("w", ttft=0.1, l3=500, max_tokens=9), "same work"),
        (result("c", l1=10_000), WARM, "no more hits"),
        (COLD, result("w", l3=500, failed=20), "succeeded"),
    ],
)
def test_no_speed_up_is_told_when_it_would_mislead(base, other, why):
    assert why in why_not(base, other)
    row = rows_of([base, other])[1]
    assert row["speed_up"] is None
    assert row["ttft_reduction"] is None
    text = comparison_text([rows_of([base, other])[0], row])
    assert " x" not in text.splitlines()[2]
    assert why in text


def test_the_table_of_several_runs():
    text = comparison_text(rows_of([COLD, WARM]))
    assert "3.74 x" in text
    assert "73.3%" in text
    assert "PARTIAL" not in text
    assert "PARTIAL" in comparison_text(rows_of([result("x", complete=False)]))


def test_one_run_as_text():
    text = run_text(result("r", l1=4_000, failed=2) | {"notes": ["be careful"]})
    assert "18 of 20 requests succeeded" in text
    assert "2 x timeout: late" in text
    assert "note: be careful" in text
    assert re.search(r"L1 +20,000 +4,000 +20.0% +20.0%", text)
    assert "L2" not in text  # there is none


def test_a_partial_run_says_so_first():
    assert run_text(result("r", complete=False)).startswith("PARTIAL (interrupted)")


def test_unknown_is_not_zero():
    assert (percent(None), duration(None)) == ("-", "-")
    assert "hit" not in run_text(result("r", counters=False)).lower()


def run_directory(path, value):
    path.mkdir()
    (path / "result.json").write_text(json.dumps(value))
    (path / "requests.jsonl").write_text("".join(json.dumps(r.as_dict()) + "\n" for r in records()))
    return path


def test_files(tmp_path):
    runs = [run_directory(tmp_path / "a", COLD), run_directory(tmp_path / "b", WARM)]
    made = write_report(runs, tmp_path / "out")
    names = {f.name for f in made.files}
    plots = {
        f"{n}.{e}" for n in ("ttft-distribution", "ttft-over-time", "comparison") for e in ("png", "svg")
    }
    assert names == plots | {"report.json", "report.txt", "report.html"}
    for file in made.files:
        data = file.read_bytes()
        if file.suffix == ".png":
            assert data.startswith(b"\x89PNG")
            width, height = struct.unpack(">II", data[16:24])
            assert width > 600
            assert height > 300
        if file.suffix == ".svg":
            assert ET.fromstring(data).tag.endswith("svg")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [r["label"] for r in report["runs"]] == ["no cache", "prefix cache + pool"]
    assert report["runs"][1]["speed_up"] == made.rows[1]["speed_up"]


def test_the_page_needs_nothing_else_and_escapes_what_came_from_outside(tmp_path):
    evil = "<script>alert(1)</script>"
    bad = result(evil, failed=1)
    bad["summary"]["errors"][0]["example"] = evil
    write_report([run_directory(tmp_path / "a", bad)], tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert all(address.startswith("data:") for address in re.findall(r"(?:src|href)=['\"]?([^'\" >]*)", page))
    assert page.count("data:image/png;base64,") == 2


def test_a_run_without_requests_and_counters_can_be_drawn(tmp_path):
    directory = run_directory(tmp_path / "a", result("r", counters=False) | {"timeline": []})
    (directory / "requests.jsonl").unlink()
    assert write_report([directory], tmp_path / "out").files


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"kind": "other"}', '{"kind": "kvtierd-be'])
def test_what_is_no_run(tmp_path, content):
    (tmp_path / "a").mkdir()
    if content is not None:
        (tmp_path / "a" / "result.json").write_text(content)
    with pytest.raises(WorkloadError) as caught:
        write_report([tmp_path / "a"], tmp_path / "out")
    assert caught.value.stable_code == "report.no-run"
    assert str(tmp_path / "a") in caught.value.message


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(WorkloadError) as caught:
        write_report([run_directory(tmp_path / "a", COLD)], tmp_path / "out")
    assert caught.value.stable_code == "workload.missing-package"
    assert "kvtierd[workload]" in caught.value.hint
