"""When requests start."""

import itertools
import statistics

import pytest

from kvtierd.workload.load import arrivals


def take(times, count):
    return list(itertools.islice(times, count))


def test_constant():
    assert take(arrivals.constant(4), 5) == [0, 0.25, 0.5, 0.75, 1.0]


def test_poisson_has_the_rate_and_the_spread_of_independent_users():
    times = take(arrivals.poisson(10, seed=3), 20_000)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.1, rel=0.05)  # exponential: as wide as its mean
    assert times == sorted(times)


def test_poisson_is_the_same_for_the_same_seed():
    assert (
        take(arrivals.poisson(5, 1), 50)
        == take(arrivals.poisson(5, 1), 50)
        != take(arrivals.poisson(5, 2), 50)
    )


def test_burst_keeps_the_rate_on_average():
    assert take(arrivals.burst(rate=2, size=4), 9) == [0, 0, 0, 0, 2, 2, 2, 2, 4]


def test_replay_begins_at_once_and_never_goes_back():
    assert list(arrivals.replay([100.0, 101.0, None, 99.0, 104.0], speed=2)) == [0, 0.5, 0.5, 0.5, 2]
