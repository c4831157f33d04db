import dataclasses
import json

from kvtierd.observe.picture import TierWindow
from kvtierd.observe.status import HISTORY_POINTS, MOST_EVENTS, History, status_json

from .full import NOW, engine, full, picture


def told(state, history=None):
    return json.loads(status_json(state, history or History()))


def test_it_says_what_there_is():
    found = told(full())
    assert found["node"] == "host-0"
    assert found["cluster"] == {"role": "master", "master": "host-0", "epoch": 7, "paused": False}
    assert [tier["name"] for tier in found["tiers"]] == ["L1", "L2", "L3"]
    assert found["tiers"][2]["hit_rate"] == {"1m": 0.8, "5m": 0.8, "1h": 0.8}
    assert found["pool"]["turnovers_per_hour"] == 1.5
    assert found["units"][3]["reason"] == "slow"
    assert found["engines"][0]["ttft_p95_seconds"] == 1.2
    assert found["events"][-1]["message"] == "event 8"
    assert found["problems"] == ["npu 1 is not well"]


def test_before_the_first_picture_and_without_figures_it_is_null():
    found = told(full(picture=None))
    assert found["pool"] is None
    assert found["tiers"] == []
    bare = told(full(picture=picture(tiers={}, pool=None, engines=(engine(0, ttft_p50_seconds=None),))))
    assert [tier["name"] for tier in bare["tiers"]] == ["L1", "L3"]
    assert bare["tiers"][0]["hit_rate"] == {"1m": None, "5m": None, "1h": None}
    assert bare["engines"][0]["ttft_p50_seconds"] is None


def test_it_is_bounded():
    event = full().events[0]
    state = full(
        events=tuple(dataclasses.replace(event, id=n, message="x" * 100_000) for n in range(500)),
        problems=tuple("y" * 10_000 for _ in range(500)),
    )
    body = status_json(state, History())
    assert len(told(state)["events"]) == MOST_EVENTS
    assert len(body) < 200_000


def test_text_that_is_no_unicode_does_not_break_it():
    assert told(full(problems=("\ud800",)))["problems"] == ["?"]


def at(seconds, rate=0.5):
    tiers = {60: {"L3": TierWindow(100, round(100 * rate))}}
    return picture(now_seconds=seconds, tiers=tiers)


def test_the_history_takes_a_point_every_quarter_of_a_minute_for_an_hour():
    history = History()
    for second in range(0, 7200, 2):
        history.add(at(float(second)))
    found = history.as_dict(7200.0)
    assert 200 <= len(found["age_seconds"]) <= HISTORY_POINTS
    assert found["age_seconds"][0] <= 3600
    assert found["age_seconds"] == sorted(found["age_seconds"], reverse=True)
    assert set(found["L3"]) == {0.5}
    assert set(found["L1"]) == {None}
    assert set(found["evicted"]) == {12.0}


def test_a_clock_that_goes_back_begins_it_anew():
    history = History()
    history.add(at(NOW))
    history.add(at(NOW + 20))
    history.add(at(5.0))
    assert history.as_dict(6.0)["age_seconds"] == [1.0]
