"""The exporter, alerts and dashboards against the real Prometheus and promtool (Debian's package ``prometheus``)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from urllib.parse import quote

import pytest
import trustme

from kvtierd.http_get import fetch_text, http_get
from kvtierd.observe.declared import DECLARED
from kvtierd.observe.exporter import Exporter, ListenAddress
from kvtierd.observe.families import Exported
from kvtierd.observe.picture import TierWindow
from kvtierd.observe.tls import ServerFiles
from kvtierd.workload.demo import free_ports

from ..unit.observe.full import crowded, engine, full, picture, pool, unit

DASHBOARDS = Path(__file__).parents[2] / "docs" / "dashboards"
DOCS = Path(__file__).parents[2] / "docs" / "observability.md"
ALERTS = (DASHBOARDS / "alerts.yaml").read_text()
NAMES = re.findall(r"^ +- alert: (\w+)$", ALERTS, re.MULTILINE)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here (apt-get install prometheus)"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not here (apt-get install prometheus)"
)


def promtool(*arguments, **more):
    return subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=60, cwd=DASHBOARDS, **more
    )


@needs_promtool
@pytest.mark.parametrize("state", [full(), crowded(), full(picture=None)], ids=["full", "crowded", "bare"])
def test_promtool_finds_nothing_wrong_with_the_metrics(state):
    async def scrape():
        exporter = Exporter(lambda: state)
        port = await exporter.start(ListenAddress("127.0.0.1", 0))
        try:
            return await fetch_text(f"http://127.0.0.1:{port}/metrics")
        finally:
            await exporter.close()

    done = promtool("check", "metrics", input=asyncio.run(scrape()))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_promtool
def test_promtool_finds_nothing_wrong_with_the_rules():
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(NAMES)} rules found" in done.stdout


@needs_promtool
def test_every_alert_fires_when_it_should():
    done = promtool("test", "rules", "alerts_test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("alert", sorted(set(NAMES)))
def test_the_test_of_an_alert_fails_when_its_rule_is_wrong(alert, tmp_path):
    """Mutants: the rule never fires, and it fires at once."""
    head, *tests = re.split(
        r"^(?=  - name: )", (DASHBOARDS / "alerts_test.yaml").read_text(), flags=re.MULTILINE
    )
    ours = [test for test in tests if f"alertname: {alert}" in test]
    (tmp_path / "alerts_test.yaml").write_text(head + "".join(ours))
    rule = re.search(rf"      - alert: {alert}\n(?: {{8,}}.*\n)+", ALERTS)[0]

    def passes(changed):
        (tmp_path / "alerts.yaml").write_text(f"groups:\n  - name: g\n    rules:\n{changed}")
        run = ["promtool", "test", "rules", "alerts_test.yaml"]
        return subprocess.run(run, cwd=tmp_path, capture_output=True, timeout=60).returncode == 0

    assert passes(rule)
    never = re.sub(r"expr: (?:>-\n(?: {10,}.*\n)+|.*\n)", "expr: vector(1) < 0\n", rule)
    assert never != rule
    assert not passes(never)
    if "for: " in rule:
        assert not passes(re.sub(r"for: \w+", "for: 0s", rule))


class Moving:
    """A full state whose counters grow with every look."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self) -> Exported:
        self.steps += 1
        n = self.steps
        totals = {
            "L1": TierWindow(100 * n, 25 * n),
            "L2": TierWindow(75 * n, 15 * n),
            "L3": TierWindow(60 * n, 48 * n),
        }
        engines = tuple(engine(i, totals=totals, failed_loads=n, flagged=n) for i in range(2))
        base = pool()
        moved = dataclasses.replace(
            base, totals={name: n * (i + 1) for i, name in enumerate(base.totals)}, flagged=n,
            log_errors=dict.fromkeys(base.log_errors, n),
        )  # fmt: skip
        units = tuple(dataclasses.replace(u, restarts=n) for u in full().units)
        return full(
            picture=picture(engines=engines, pool=moved, saved_tokens=1000 * n),
            units=(*units, unit("x", state="failed")),
        )


@contextlib.asynccontextmanager
async def prometheus(folder, port, scheme="http", tls=""):
    """A Prometheus that scrapes that port every second, with the alert rules; gives its URL."""
    (own,) = free_ports(1)
    config = folder / "prometheus.yml"
    config.write_text(
        f"global: {{ scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s }}\n"
        f"rule_files: ['{DASHBOARDS / 'alerts.yaml'}']\n"
        f"scrape_configs:\n  - job_name: kvtierd\n    scheme: {scheme}\n    {tls}\n"
        f"    static_configs: [{{ targets: ['127.0.0.1:{port}'] }}]\n"
    )
    log = (folder / "prometheus.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}", "--log.level=warn", stdout=log, stderr=log,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{own}"
        for _ in range(100):
            with contextlib.suppress(Exception):
                if (await http_get(f"{url}/-/ready")).status == 200:
                    break
            await asyncio.sleep(0.2)
        else:
            raise AssertionError((folder / "prometheus.log").read_text())
        yield url
    finally:
        process.terminate()
        await process.wait()
        log.close()


async def query(url, expression):
    answer = await http_get(f"{url}/api/v1/query?query={quote(expression, safe='')}")
    found = json.loads(answer.body)
    assert found["status"] == "success", (expression, found)
    return found["data"]["result"]


async def until(url, expression, seconds=30.0):
    end = time.monotonic() + seconds
    while not (result := await query(url, expression)):
        assert time.monotonic() < end, f"no data for {expression}"
        await asyncio.sleep(0.3)
    return result


def expressions():
    """(dashboard: panel, expression) of every query, with variables as Grafana's "All" would fill them."""
    for file in sorted(DASHBOARDS.glob("*.json")):
        for shown in json.loads(file.read_text())["panels"]:
            for target in shown["targets"]:
                yield (
                    f"{file.stem}: {shown['title']}",
                    target["expr"].replace("$instance", ".*").replace("$engine", ".*"),
                )


@needs_prometheus
async def test_every_dashboard_query_returns_data_and_every_rule_is_well(tmp_path):
    exporter = Exporter(Moving())
    port = await exporter.start(ListenAddress("127.0.0.1", 0))
    async with prometheus(tmp_path, port) as url:
        await until(url, 'up{job="kvtierd"} == 1')
        await until(url, "rate(kvtierd_saved_tokens_total[1m]) > 0")
        names = {r["metric"]["__name__"] for r in await query(url, '{__name__=~"kvtierd_.+"}')}
        assert names == set(DECLARED)
        empty = []
        for where, expression in expressions():
            result = await query(url, expression)
            if not result or any(r["value"][1] == "NaN" for r in result):
                empty.append((where, expression))
        assert empty == []
        rules = json.loads((await http_get(f"{url}/api/v1/rules")).body)["data"]["groups"]
        assert sorted(r["name"] for g in rules for r in g["rules"]) == sorted(NAMES)
        assert {r["health"] for g in rules for r in g["rules"]} <= {"ok", "unknown"}
        # What is wrong in the picture is seen: a die in alarm, a unit that has failed.
        firing = await until(url, 'ALERTS{alertname="KvtierdNpuUnhealthy"}')
        assert firing[0]["metric"]["device"] == "1"
        assert await until(url, 'ALERTS{alertname="KvtierdUnitFailed"}')
        scraped = await query(url, "scrape_duration_seconds")
        assert float(scraped[0]["value"][1]) < 0.5
    await exporter.close()


@needs_prometheus
async def test_a_scrape_over_mutual_tls(tmp_path):
    authority = trustme.CA()
    paths = {}
    for name in ("host-a", "prometheus"):
        issued = authority.issue_cert(name)
        paths[name] = (tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(paths[name][0])
        issued.private_key_pem.write_to_path(paths[name][1])
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    exporter = Exporter(full, tls=ServerFiles(str(tmp_path / "ca.pem"), *map(str, paths["host-a"])))
    port = await exporter.start(ListenAddress("127.0.0.1", 0))
    cert, key = paths["prometheus"]
    tls = (
        f"tls_config: {{ ca_file: '{tmp_path / 'ca.pem'}', cert_file: '{cert}', key_file: '{key}', "
        "server_name: host-a }"
    )
    async with prometheus(tmp_path, port, "https", tls) as url:
        await until(url, 'up{job="kvtierd"} == 1')
        assert await until(url, "kvtierd_build_info")
    await exporter.close()


def test_every_alert_has_a_test_and_a_runbook_that_is_there():
    assert len(set(NAMES)) == len(NAMES) >= 20
    tested = (DASHBOARDS / "alerts_test.yaml").read_text()
    headings = set(re.findall(r"^#+ (Kvtierd\w+)$", DOCS.read_text(), re.MULTILINE))
    assert headings == set(NAMES)
    for name in NAMES:
        assert re.search(rf"alertname: {name}\n        exp_alerts:\n          - exp_labels", tested), name
        assert re.search(rf"alertname: {name}, exp_alerts: \[\]", tested), f"{name}: when does it not fire?"
        assert f"observability.md#{name.lower()}\n" in ALERTS


def test_alerts_and_dashboards_use_metrics_that_there_are():
    texts = [ALERTS, *(e for _, e in expressions())]
    used = {name for text in texts for name in re.findall(r"\bkvtierd_[a-z0-9_]+", text)}
    assert used <= set(DECLARED)
    assert len(used) > 50


@pytest.mark.parametrize("name", ["cluster", "node", "engine"])
def test_a_dashboard_is_what_grafana_takes(name):
    board = json.loads((DASHBOARDS / f"{name}.json").read_text())
    assert board["uid"] == f"kvtierd-{name}"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {v["name"] for v in board["templating"]["list"]}
    assert "datasource" in variables
    cells = set()
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["title"]
        assert all(set(re.findall(r"\$(\w+)", t["expr"])) <= variables for t in panel["targets"])
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & mine, f"{panel['title']} lies over another"
        cells |= mine
