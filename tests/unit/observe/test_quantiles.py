import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.observe.quantiles import quantile

SPREAD = {0.1: 10, 0.5: 50, 1.0: 90, math.inf: 100}


@pytest.mark.parametrize(
    ("share", "expected"), [(0.05, 0.05), (0.1, 0.1), (0.3, 0.3), (0.5, 0.5), (0.7, 0.75), (0.95, 1.0)]
)
def test_within_a_bucket_it_is_interpolated(share, expected):
    assert quantile(SPREAD, share) == pytest.approx(expected)


def test_without_observations_it_is_unknown():
    assert quantile({}, 0.5) is None
    assert quantile({0.1: 0, math.inf: 0}, 0.5) is None
    assert quantile({math.inf: 5}, 0.5) is None
    assert quantile({math.nan: 5}, 0.5) is None


def test_counts_that_fall_count_as_the_highest_before():
    assert quantile({0.1: 10, 0.5: 4, math.inf: 10}, 0.5) == pytest.approx(0.05)


@given(st.dictionaries(st.floats(0, 1e6), st.integers(0, 1000), max_size=8), st.floats(0, 1), st.floats(0, 1))
def test_it_is_within_the_bounds_and_grows_with_the_share(steps, one, two):
    bounds, total, buckets = sorted(steps), 0, {}
    for bound in bounds:
        total += steps[bound]
        buckets[bound] = total
    low, high = quantile(buckets, min(one, two)), quantile(buckets, max(one, two))
    if total == 0:
        assert low is None
        return
    assert 0 <= low <= high + 1e-9
    assert high <= bounds[-1]
