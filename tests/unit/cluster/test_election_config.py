import dataclasses

import pytest

from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.errors import ClusterError


def config(*voters: str, **values: float) -> ElectorConfig:
    return ElectorConfig("prod", voters[0] if voters else "a", voters, **values)


def refused(*voters: str, **values: float) -> ClusterError:
    with pytest.raises(ClusterError) as caught:
        config(*voters, **values)
    return caught.value


@pytest.mark.parametrize(("count", "quorum"), [(3, 2), (5, 3)])
def test_three_or_five_voters(count, quorum):
    made = config(*"abcde"[:count])
    assert made.quorum == quorum
    assert made.others == tuple("bcde"[: count - 1])


def test_the_promise_covers_a_slow_master_and_a_fast_voter():
    made = config("a", "b", "c", lease_seconds=6.0, drift=0.1)
    assert made.promise_seconds == pytest.approx(6.0 * 1.1 / 0.9)
    # The slowest clock counts the lease while the fastest counts the promise: the promise still ends later.
    assert made.promise_seconds / 1.1 >= made.lease_seconds / 0.9 - 1e-9


@pytest.mark.parametrize("voters", [("a",), ("a", "b")])
def test_two_are_told_what_to_do_instead(voters):
    error = refused(*voters)
    assert error.stable_code == "cluster.voters"
    assert "cannot elect a master safely" in error.message
    assert "static" in error.hint
    assert "witness" in error.hint


def test_none_are_too_few():
    assert "no voters" in refused().message


@pytest.mark.parametrize("count", [4, 6])
def test_an_even_number_is_refused_with_the_arithmetic(count):
    error = refused(*"abcdef"[:count])
    assert "even number" in error.message
    assert f"a majority of {count} is {count // 2 + 1}" in error.why
    assert f"{count - 1} vote" in error.hint


def test_seven_are_too_many():
    assert "too many" in refused(*"abcdefg").message


def test_a_name_given_twice_and_a_node_that_does_not_vote():
    assert "named twice" in refused("a", "b", "a").message
    with pytest.raises(ClusterError, match="d is not one of the voters"):
        ElectorConfig("prod", "d", ("a", "b", "c"))


@pytest.mark.parametrize(
    "values",
    [
        {"lease_seconds": 0.5},
        {"lease_seconds": 61.0},
        {"lease_seconds": float("nan")},
        {"drift": -0.1},
        {"drift": 0.5},
        {"drift": float("nan")},
        {"kill_margin_seconds": 0.0},
        {"kill_margin_seconds": 7.0},
        {"kill_margin_seconds": float("nan")},
    ],
)
def test_times_that_make_no_sense(values):
    error = refused("a", "b", "c", **values)
    assert error.stable_code == "cluster.lease"
    assert error.hint


def test_the_digest_is_of_what_must_be_the_same_everywhere():
    first = config("a", "b", "c")
    assert dataclasses.replace(first, node="b").digest == first.digest
    assert dataclasses.replace(first, voters=("c", "a", "b")).digest == first.digest
    assert dataclasses.replace(first, lease_seconds=9.0).digest == first.digest
    for change in (
        {"cluster": "other"},
        {"voters": ("a", "b", "d")},
        {"voters": ("a", "b", "c", "d", "e")},
        {"drift": 0.05},
        {"kill_margin_seconds": 2.0},
    ):
        assert dataclasses.replace(first, **change).digest != first.digest, change
