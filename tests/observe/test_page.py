"""The status page in a headless Chromium (Debian's packages chromium and chromium-driver), driven over WebDriver."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from kvtierd.events import Event
from kvtierd.http_get import http_get
from kvtierd.observe.exporter import Exporter, ListenAddress
from kvtierd.observe.picture import PoolWindow, TierWindow
from kvtierd.units.unit_state import UnitState
from kvtierd.workload.demo import free_ports

from ..unit.observe.full import NOW, UNIX, full, picture, pool, unit

needs_chromium = pytest.mark.skipif(
    shutil.which("chromedriver") is None or shutil.which("chromium") is None,
    reason="Chromium is not here (apt-get install chromium chromium-driver)",
)
pytestmark = needs_chromium
EVIL = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>&amp;"


class Browser:
    def __init__(self, url, session):
        self._base = f"{url}/session/{session}"

    async def _call(self, path, body=None, method="POST"):
        answer = await http_get(
            self._base + path, method=method, json_body=body, timeout_seconds=30, most_body_bytes=32 * 1024**2
        )
        value = json.loads(answer.body)["value"]
        assert answer.status == 200, value
        return value

    async def open(self, url):
        await self._call("/url", {"url": url})

    async def run(self, script):
        return await self._call("/execute/sync", {"script": script, "args": []})

    async def until(self, script, seconds=15.0):
        for _ in range(int(seconds / 0.1)):
            if value := await self.run(script):
                return value
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true: {script}\n{await self.run('return document.body.innerText')}")

    async def screenshot(self):
        return base64.b64decode(await self._call("/screenshot", method="GET"))

    async def complaints(self):
        return [e["message"] for e in await self._call("/se/log", {"type": "browser"})]

    async def quit(self):
        await self._call("", method="DELETE")


@contextlib.asynccontextmanager
async def browser(folder, width=1200, height=1500):
    (port,) = free_ports(1)
    with (folder / "chromedriver.log").open("wb") as log:
        driver = await asyncio.create_subprocess_exec(
            "chromedriver", f"--port={port}", "--allowed-ips=", stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(100):
            with contextlib.suppress(Exception):
                if json.loads((await http_get(f"{url}/status")).body)["value"]["ready"]:
                    break
            await asyncio.sleep(0.1)
        arguments = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}",
            # No internet: every name but ours fails.
            "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
        ]  # fmt: skip
        options = {"args": arguments, "binary": shutil.which("chromium")}
        wish = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = await http_get(
            f"{url}/session",
            method="POST",
            json_body={"capabilities": {"alwaysMatch": wish}},
            timeout_seconds=60,
        )
        made = json.loads(answer.body)["value"]
        assert "sessionId" in made, made
        session = Browser(url, made["sessionId"])
        yield session
        await session.quit()
    finally:
        driver.terminate()
        await driver.wait()


@contextlib.asynccontextmanager
async def serving(look):
    exporter = Exporter(look)
    port = await exporter.start(ListenAddress("127.0.0.1", 0))
    try:
        yield exporter, f"http://127.0.0.1:{port}/"
    finally:
        await exporter.close()


def an_hour(exporter):
    """Hit rates that rise, and an eviction that comes and goes; with a hole where nothing was known."""
    for step in range(240):
        at = NOW - 3600 + 15 * step
        rate = 0.2 + 0.6 * step / 240
        tiers = {
            60: {}
            if 100 <= step < 120
            else {"L1": TierWindow(100, 25), "L3": TierWindow(1000, round(1000 * rate))}
        }
        window = PoolWindow(evicted_keys_per_second=max(0.0, 50 - abs(step - 120)))
        exporter.history.add(picture(now_seconds=at, tiers=tiers, pool=pool(windows={60: window})))


async def test_it_shows_tiers_units_history_and_events(tmp_path):
    async with serving(full) as (exporter, url), browser(tmp_path) as page:
        an_hour(exporter)
        await page.open(url)
        await page.until("return document.getElementById('node').textContent === 'host-0'")
        text = await page.run("return document.body.innerText")
        for words in (
            "joinable", "80.0 %", "25.0 %", "kvtier-engine-e1", "degraded", "slow", "event 8", "master of the cluster",
            "123,456", "50.0 GiB of 64.0 GiB", "1.5", "90 ms", "1.2 s", "npu 1 is not well",
        ):  # fmt: skip
            assert words in text, words
        lines = await page.run(
            "return [...document.querySelectorAll('#tiers polyline')].map(p => p.getAttribute('points').split(' ').length)"
        )
        assert len(lines) == 4, "two tiers with figures, each in two runs around the hole"
        assert all(points > 50 for points in lines)
        heights = await page.run(
            "return document.querySelectorAll('#tiers polyline.L3')[1].getAttribute('points')"
            ".split(' ').map(p => +p.split(',')[1])"
        )
        assert heights[0] > heights[-1], "a rising rate goes up"
        assert await page.run("return document.querySelectorAll('#evictions polyline').length") == 1
        assert await page.complaints() == []
        picture_file = Path(os.environ.get("KVTIERD_SCREENSHOTS", tmp_path)) / "status.png"
        picture_file.write_bytes(await page.screenshot())
        assert picture_file.stat().st_size > 20_000
        assert await page.run("return document.documentElement.scrollWidth <= innerWidth")


async def test_words_of_engines_stay_words(tmp_path):
    state = full(
        problems=(EVIL,),
        units=(unit("e0", reason=EVIL, state=UnitState.DEGRADED), unit(EVIL)),
        events=(Event(1, UNIX, "error", "unit.failed", EVIL, EVIL),),
    )
    state = dataclasses.replace(state, tier=dataclasses.replace(state.tier, state="meta_up", reasons=(EVIL,)))
    async with serving(lambda: state) as (_, url), browser(tmp_path) as page:
        await page.open(url)
        await page.until("return document.querySelectorAll('#events tr').length === 1")
        await asyncio.sleep(0.5)
        assert await page.run("return document.title") == "kvtierd host-0"
        assert await page.run("return document.images.length") == 0
        assert await page.run("return document.getElementById('problems').textContent") == EVIL
        assert (await page.run("return document.body.innerText")).count("onerror=") >= 5
        assert await page.complaints() == []


async def test_the_policy_keeps_everything_else_out(tmp_path):
    async with serving(full) as (_, url), browser(tmp_path) as page:
        await page.open(url)
        await page.until("return document.getElementById('node').textContent === 'host-0'")
        await page.run(
            "const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s)"
        )
        await page.run(
            "const s = document.createElement('style'); s.textContent = 'body { display: none }'; document.body.append(s)"
        )
        assert await page.run("return document.title") == "kvtierd host-0"
        assert await page.run("return getComputedStyle(document.body).display") == "block"
        refused = [c for c in await page.complaints() if "Content Security Policy" in c]
        assert len(refused) >= 2


async def test_it_follows_and_says_when_kvtierd_is_gone(tmp_path):
    tier = [full().tier]
    exporter = Exporter(lambda: full(tier=tier[0]))
    port = await exporter.start(ListenAddress("127.0.0.1", 0))
    async with browser(tmp_path) as page:
        await page.open(f"http://127.0.0.1:{port}/")
        await page.until("return document.getElementById('tier').textContent === 'joinable'")
        tier[0] = dataclasses.replace(tier[0], state="down", reasons=("the MetaService is gone",))
        await page.until("return document.getElementById('tier').className === 'bad'")
        assert "the MetaService is gone" in await page.run("return document.body.innerText")
        await exporter.close()
        await page.until("return document.getElementById('fresh').textContent.includes('does not answer')")


async def test_before_the_first_picture_and_on_a_small_screen(tmp_path):
    state = full(picture=None, units=(), events=(), problems=())
    async with serving(lambda: state) as (_, url), browser(tmp_path, width=500, height=900) as page:
        await page.open(url)
        await page.until("return document.getElementById('node').textContent === 'no plan yet'")
        assert await page.run("return document.getElementById('problem-box').hidden")
        assert await page.complaints() == []
        assert await page.run("return document.documentElement.scrollWidth <= innerWidth + 1")
