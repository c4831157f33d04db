import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.observe.counters import MOST_NAMES, Counters


def fed(*looks, windows=(60, 300)):
    counters = Counters(windows)
    for at, instance, value in looks:
        counters.take(at, instance, {"n": value})
    return counters


def test_it_counts_from_the_first_look():
    counters = fed((0, "a", 1000), (1, "a", 1010), (2, "a", 1015))
    assert counters.total("n") == 15
    assert counters.total("never seen") is None
    assert counters.flags == ()


def test_a_changed_instance_goes_on_from_what_was():
    counters = fed((0, "a", 1000), (1, "a", 1010), (2, "b", 7), (3, "b", 9))
    assert counters.total("n") == 19
    assert counters.flags == ()


def test_a_changed_instance_counts_anew_even_when_the_new_value_is_larger():
    assert fed((0, "a", 10), (1, "b", 500)).total("n") == 500


def test_what_a_new_run_says_later_counts_from_its_zero():
    counters = Counters((60,))
    counters.take(0, "a", {"n": 100, "m": 1})
    counters.take(1, "b", {"m": 1})
    counters.take(2, "b", {"n": 30, "m": 1})
    assert counters.total("n") == 30


def test_a_fall_to_near_zero_is_a_restart_where_the_instance_is_not_known():
    counters = fed((0, None, 1000), (1, None, 1010), (2, None, 3), (3, None, 5))
    assert counters.total("n") == 15
    assert "fell, as after a restart" in counters.flags[0]


def test_a_small_fall_is_no_restart_and_is_not_counted_twice():
    counters = fed((0, "a", 1000), (1, "a", 1010), (2, "a", 1005), (3, "a", 1011))
    assert counters.total("n") == 11
    assert counters.flags == ("n: fell a little without a restart",)


def test_one_wrong_value_in_between_is_undone():
    counters = fed((0, "a", 1000), (1, "a", 1010), (2, "a", 0), (3, "a", 1020))
    assert counters.total("n") == 20


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, -1, 1e300, 10**400, "12", True, [], b"5"], ids=repr
)
def test_what_is_no_count_is_flagged_and_not_counted(value):
    counters = fed((0, "a", 10), (1, "a", value), (2, "a", 12))
    assert counters.total("n") == 2
    assert len(counters.flags) == 1
    assert counters.flagged == 1


def test_unknown_is_not_flagged_and_not_zero():
    counters = fed((0, "a", 10), (1, "a", None))
    assert counters.flags == ()
    assert counters.total("n") == 0


def test_time_that_goes_back_is_left_out():
    counters = fed((100, "a", 10), (50, "a", 5000), (math.nan, "a", 5000), (101, "a", 11))
    assert counters.total("n") == 1
    assert any(flag.startswith("time:") for flag in counters.flags)


def test_a_window_that_is_not_full_yet_is_absent():
    counters = Counters((60, 300))
    for second in range(60):
        counters.take(second, "a", {"n": second})
        assert counters.over(60, second) is None
    counters.take(60, "a", {"n": 60})
    change = counters.over(60, 60)
    assert change.rate("n") == 1.0
    assert change.whole("n") == 60
    assert change.rate("other") is None
    assert counters.over(300, 60) is None


def test_a_window_looks_back_its_own_length_only():
    counters = Counters((60, 300))
    for second in range(0, 400, 2):
        counters.take(second, "a", {"n": 0 if second < 330 else (second - 330) * 10})
    minute, five = counters.over(60, 399), counters.over(300, 399)
    assert minute.seconds == pytest.approx(60, abs=3)
    assert five.seconds == pytest.approx(300, abs=6)
    assert five.whole("n") == 680
    assert minute.whole("n") == pytest.approx(600, abs=40) or minute.whole("n") == 680


def test_a_silent_source_has_no_windows_after_a_while():
    counters = Counters((60,))
    for second in range(100):
        counters.take(second, "a", {"n": second})
    assert counters.over(60, 99 + 20) is not None
    assert counters.over(60, 99 + 31) is None
    assert counters.over(60, 50) is None, "a clock that went back"


def test_after_a_gap_the_window_fills_anew():
    counters = Counters((60,))
    for second in range(100):
        counters.take(second, "a", {"n": second})
    counters.take(1000, "a", {"n": 5000})
    assert counters.over(60, 1000) is None
    for second in range(1001, 1062):
        counters.take(second, "a", {"n": 5000})
    assert counters.over(60, 1061).whole("n") == 0


def test_a_counter_that_appears_in_the_window_is_unknown_in_it():
    counters = Counters((60,))
    for second in range(70):
        values = {"n": second} | ({"late": second} if second > 30 else {})
        counters.take(second, "a", values)
    change = counters.over(60, 69)
    assert change.whole("n") == 60
    assert change.whole("late") is None


def test_a_counter_that_is_born_with_its_first_count_counts_from_zero():
    counters = Counters((60,))
    for second in range(100):
        values = {"n": second} | ({"fails": 3} if second > 40 else {})
        counters.take(second, "a", values, born_late={"fails"})
    assert counters.total("fails") == 3
    assert counters.over(60, 99).whole("fails") == 3


def test_one_that_is_there_nearly_from_the_beginning_was_there_before():
    counters = Counters((60,))
    counters.take(0, "a", {"n": 1}, born_late={"fails"})
    counters.take(5, "a", {"n": 1, "fails": 3}, born_late={"fails"})
    assert counters.total("fails") == 0


def test_memory_is_bounded_by_points_and_names():
    counters = Counters((60, 300, 3600))
    for step in range(100_000):
        counters.take(step / 10, "a", {"n": step})
    assert sum(len(ring._points) for ring in counters._rings.values()) <= 3 * 92
    counters.take(1e6, "a", {f"n{i}": i for i in range(2 * MOST_NAMES)})
    assert len(counters._counters) == MOST_NAMES
    for step in range(500):
        counters.take(1e6 + 1 + step, "a", {f"n{step}": math.nan})
    assert len(counters.flags) <= 64


def test_the_hour_is_known_when_looks_come_every_second():
    counters = Counters((3600,))
    for second in range(4000):
        counters.take(second, "a", {"n": 2 * second})
    change = counters.over(3600, 3999)
    assert change.seconds == pytest.approx(3600, abs=61)
    assert change.rate("n") == pytest.approx(2.0)


@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.booleans()),
        min_size=1,
        max_size=60,
    )
)
def test_whatever_restarts_come_the_sum_of_what_was_counted_is_kept(steps):
    """Each step grows the source's count; a restart begins it again with zero before that."""
    counters = Counters((60,))
    raw, run, expected = 0, 0, 0
    counters.take(0, "0", {"n": raw})
    for second, (growth, restart) in enumerate(steps, 1):
        if restart:
            run, raw = run + 1, 0
        raw += growth
        expected += growth
        counters.take(second, str(run), {"n": raw})
        assert counters.total("n") == expected


@given(st.lists(st.one_of(st.floats(), st.integers(), st.none(), st.text(max_size=3)), max_size=80))
def test_whatever_comes_totals_never_fall_below_zero_and_stay_finite(values):
    counters = Counters((60,))
    for second, value in enumerate(values):
        counters.take(second, None, {"n": value})
        total = counters.total("n")
        assert total is None or total >= 0
        change = counters.over(60, second)
        assert change is None or all(math.isfinite(g) and g >= 0 for g in change.grown.values())
