"""What nodes compare, and how far their clocks are apart."""

import pytest

from kvtierd.cluster.hello import ClockOffset, NodeFacts, differences

MINE = NodeFacts("a", "0.2.0", "1.3.0", "0", 16, "device_rdma", "abc")


def changed(**fields):
    return NodeFacts("b", **({"version": "0.2.0", "memcache_version": "1.3.0", "hash_seed": "0", "world_size": 16,
                             "protocol": "device_rdma", "settings_digest": "abc"} | fields))  # fmt: skip


def test_nodes_that_fit_together_have_no_differences():
    assert differences(MINE, changed()) == ()


@pytest.mark.parametrize(
    ("field", "there"),
    [("hash_seed", "1"), ("world_size", 8), ("protocol", "host_tcp"), ("memcache_version", "1.2.0"),
     ("settings_digest", "abd"), ("version", "0.3.0")],
)  # fmt: skip
def test_each_fact_that_must_agree_is_compared_and_both_values_are_named(field, there):
    (found,) = differences(MINE, changed(**{field: there}))
    assert field in found
    assert f"is {there} there and {getattr(MINE, field)} here" in found


def test_a_hash_seed_comes_before_what_matters_less():
    found = differences(MINE, changed(version="9", hash_seed="7"))
    assert [text.split()[0] for text in found] == ["hash_seed", "version"]


def test_what_either_does_not_know_is_no_difference():
    assert differences(MINE, changed(hash_seed="", world_size=0)) == ()
    assert differences(NodeFacts("a"), changed()) == ()


def test_the_offset_is_exact_when_both_ways_take_as_long():
    clock = ClockOffset()
    clock.add(asked=100.0, received=107.1, sent=107.2, elapsed_seconds=0.3)
    assert clock.seconds == pytest.approx(7.0)
    assert clock.error_seconds == pytest.approx(0.1)


def test_the_exchange_with_the_shortest_way_counts_and_old_ones_are_forgotten():
    clock = ClockOffset()
    clock.add(100.0, 100.0, 100.0, 0.0)
    clock.add(200.0, 201.9, 201.9, 2.0)  # all of the delay on one way: half of it is error
    assert clock.seconds == pytest.approx(0.0)
    for _ in range(8):
        clock.add(300.0, 305.0, 305.0, 0.001)
    assert clock.seconds == pytest.approx(5.0, abs=0.01)


def test_a_clock_that_is_set_in_the_middle_of_an_exchange_gives_nothing():
    clock = ClockOffset()
    clock.add(100.0, 100.1, 50.0, 0.2)
    clock.add(100.0, 100.1, 3700.0, 0.2)
    assert clock.seconds is None
    assert clock.problem() == ""


@pytest.mark.parametrize(("there", "says"), [(3.5, "3.5 s ahead"), (-60.0, "60.0 s behind"), (1.5, "")])
def test_only_a_clock_that_is_far_off_is_a_problem(there, says):
    clock = ClockOffset()
    clock.add(100.0, 100.0 + there, 100.0 + there, 0.0)
    assert says in clock.problem()
    assert bool(says) == bool(clock.problem())


def test_an_offset_within_its_own_error_is_no_problem():
    clock = ClockOffset()
    clock.add(100.0, 104.0, 104.0, 8.0)
    clock.add(100.0, 108.0, 108.0, 8.0)
    assert clock.problem() == ""
