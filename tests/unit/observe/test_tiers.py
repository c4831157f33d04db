import asyncio
import dataclasses
import threading

from hypothesis import given
from hypothesis import strategies as st

from kvtierd.memcache.answers import Capacity, ClusterStatus, MediumUsage
from kvtierd.memcache.health import PoolState
from kvtierd.observe.engines import EngineObserver, Target
from kvtierd.observe.tiers import Sample, tier_lines
from kvtierd.plan.engine import EngineObservation, only_samples
from kvtierd.tier.machine import TierView

WELL = TierView("joinable", ())


def pool(total=100, used=40):
    usage = MediumUsage(total_bytes=total, used_bytes=used, free_bytes=total - used)
    none = MediumUsage(total_bytes=0, used_bytes=0, free_bytes=0)
    return PoolState(capacity=Capacity(cpu=usage, npu=none), segments=(), cluster=ClusterStatus())


def lines(*observations, tier=WELL, seen=pool(), now=105.0):
    samples = [Sample(100.0 + i, o) for i, o in enumerate(observations)]
    return {line.name: line for line in tier_lines(samples, seen, 103.0 if seen else None, tier, now)}


def test_rates_are_sums_over_engines_from_token_counters():
    one = EngineObservation(l1_query_tokens=100, l1_hit_tokens=10, l3_query_tokens=90, l3_hit_tokens=45)
    two = EngineObservation(l1_query_tokens=300, l1_hit_tokens=90, l3_query_tokens=10, l3_hit_tokens=5)
    found = lines(one, two)
    assert found["L1"].hit_rate == 0.25
    assert found["L3"].hit_rate == 0.5
    assert (found["L3"].capacity_bytes, found["L3"].used_bytes) == (100, 40)
    assert found["L1"].age_seconds == 5.0, "the age of the oldest figure in it"


def test_unknown_stays_unknown():
    found = lines(EngineObservation(), seen=None)
    for line in found.values():
        assert line.hit_rate is None
        assert line.query_tokens is None
    assert found["L3"].capacity_bytes is None
    assert lines()["L1"].state == "unknown"


def test_no_queries_is_not_zero_percent():
    assert lines(EngineObservation(l1_query_tokens=0, l1_hit_tokens=0))["L1"].hit_rate is None


def test_l2_is_shown_only_where_an_engine_has_one():
    assert "L2" not in lines(EngineObservation(l1_query_tokens=1))
    assert lines(EngineObservation(l2_query_tokens=4, l2_hit_tokens=1))["L2"].hit_rate == 0.25


def test_the_pool_s_state_is_the_tier_s():
    for state, shown in [
        ("joinable", "ready"),
        ("pool_ready", "degraded"),
        ("meta_up", "degraded"),
        ("down", "down"),
    ]:
        line = lines(tier=TierView(state, ("why",)))["L3"]
        assert (line.state, line.reason) == (shown, "why")


@given(st.lists(st.tuples(st.none() | st.integers(0, 10**9), st.none() | st.integers(0, 10**9)), max_size=5))
def test_no_rate_is_ever_invented(counts):
    observations = [EngineObservation(l1_query_tokens=q, l1_hit_tokens=h) for q, h in counts]
    rate = lines(*observations)["L1"].hit_rate
    if rate is not None:
        assert any(q for q, _ in counts)
        assert any(h is not None for _, h in counts)


class Driver:
    def __init__(self, answer):
        self.answer = answer

    def observe(self, text):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def target(name, answer):
    return Target(name, f"http://{name}/metrics", Driver(answer))


async def test_a_broken_driver_or_engine_costs_only_itself():
    async def fetch(url):
        if "gone" in url:
            raise ConnectionRefusedError("nobody there")
        return "text"

    observer = EngineObserver(fetch)
    good = EngineObservation(l1_query_tokens=5)
    await observer.look(
        {
            "good": target("good", good),
            "raises": target("raises", ZeroDivisionError("x")),
            "lies": target("lies", {"l1": 5}),
            "gone": target("gone", good),
        }
    )
    assert set(observer.samples) == {"good"}
    assert observer.samples["good"].observation == good
    assert "ZeroDivisionError" in observer.problems["raises"]
    assert "dict" in observer.problems["lies"]
    assert "nobody there" in observer.problems["gone"]


def _reading(unit):
    return sum(thread.name == f"observe() for {unit}" for thread in threading.enumerate())


async def test_a_driver_that_hangs_costs_one_thread_and_only_its_engine(monkeypatch):
    monkeypatch.setattr("kvtierd.observe.engines.DRIVER_SECONDS", 0.05)
    release = threading.Event()

    class Hangs:
        def observe(self, text):
            release.wait(20)

    async def fetch(url):
        return "text"

    observer = EngineObserver(fetch)
    targets = {
        "hangs": Target("hangs", "http://x", Hangs()),
        "good": target("good", EngineObservation(running=1)),
    }
    for _ in range(5):
        await observer.look(targets)
    assert _reading("hangs") == 1
    assert "hangs" in observer.problems["hangs"]
    assert "good" in observer.samples
    release.set()
    for _ in range(100):
        await asyncio.sleep(0.01)
        if _reading("hangs") == 0:
            break
    targets["hangs"] = target("hangs", EngineObservation(running=2))
    await observer.look(targets)
    assert observer.samples["hangs"].observation.running == 2


def test_old_figures_are_not_shown_as_if_all_were_well():
    assert lines(EngineObservation(), now=105.0)["L1"].state == "ready"
    late = lines(EngineObservation(), now=300.0)["L1"]
    assert (late.state, late.reason) == ("degraded", "the newest figures of an engine are 200 s old")


async def test_an_old_sample_is_kept_while_an_engine_does_not_answer_and_forgotten_when_it_is_gone():
    answers = {"up": True}

    async def fetch(url):
        if not answers["up"]:
            raise TimeoutError
        return "text"

    observer = EngineObserver(fetch)
    targets = {"e": target("e", EngineObservation(running=1))}
    await observer.look(targets)
    answers["up"] = False
    await observer.look(targets)
    assert "e" in observer.samples
    assert "e" in observer.problems
    await observer.look({})
    assert observer.samples == observer.problems == {}


def test_only_samples_keeps_exactly_the_named_ones():
    text = (
        '# HELP a_total x\n# TYPE a_total counter\na_total{x="1 2"} 3\na_total 4\n'
        'a_total_created 5\nb 6\n\nc{le="+Inf"} 7\n'
    )
    assert only_samples(text, {"a_total", "c"}) == 'a_total{x="1 2"} 3\na_total 4\nc{le="+Inf"} 7\n'
    assert only_samples("<html>no</html>", {"a"}) == ""


def test_a_tier_line_is_a_value():
    line = lines()["L3"]
    assert dataclasses.replace(line, used_bytes=1) != line
