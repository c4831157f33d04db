from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.endpoint.epochs import Epochs
from kvtierd.endpoint.hop import MAX_EPOCH
from kvtierd.endpoint.targets import AnyTarget, PeerTarget
from kvtierd.errors import EndpointError

A, B = PeerTarget("node-a"), PeerTarget("node-b")


def code(epochs: Epochs, epoch: int | None, target: AnyTarget | None) -> str:
    with pytest.raises(EndpointError) as caught:
        epochs.told_target(epoch, target)
    return caught.value.stable_code


def test_before_the_first_epoch_everything_goes() -> None:
    epochs = Epochs("prod")
    assert epochs.told_target(None, A) == epochs
    assert epochs.told_target(None, B) == epochs


def test_higher_wins_and_lower_is_refused() -> None:
    epochs = Epochs("prod").told_target(5, A)
    assert (epochs.told, epochs.seen, epochs.master) == (5, 5, A)
    assert code(epochs, 4, A) == "endpoint.stale-epoch"
    assert code(epochs, None, A) == "endpoint.stale-epoch"
    assert epochs.told_target(6, B).master == B


def test_one_epoch_has_one_master_who_may_be_away() -> None:
    epochs = Epochs("prod").told_target(5, A)
    assert epochs.told_target(5, A) == epochs
    assert code(epochs, 5, B) == "endpoint.epoch-conflict"
    away = epochs.told_target(5, None)
    assert code(away, 5, B) == "endpoint.epoch-conflict"
    assert away.told_target(5, A) == epochs
    nobody_yet = Epochs("prod").told_target(5, None)
    assert nobody_yet.told_target(5, B).master == B


def test_what_was_seen_counts() -> None:
    epochs = Epochs("prod").told_target(5, A).saw(9)
    assert epochs.outdated
    assert code(epochs, 5, A) == "endpoint.stale-epoch"
    assert code(epochs, 8, A) == "endpoint.stale-epoch"
    assert not epochs.told_target(9, B).outdated
    assert epochs.saw(3) == epochs
    assert epochs.saw(2**64 - 1).seen == MAX_EPOCH


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 6), st.sampled_from([A, B, None])),
        max_size=30,
    )
)
def test_no_epoch_ever_has_two_masters_and_none_comes_back(
    steps: list[tuple[bool, int, AnyTarget | None]],
) -> None:
    epochs, masters, highest = Epochs("prod"), {}, 0
    for told, epoch, target in steps:
        if not told:
            epochs = epochs.saw(epoch)
        else:
            try:
                epochs = epochs.told_target(epoch, target)
            except EndpointError:
                assert epoch < highest or target not in (None, masters.get(epoch))
                continue
            assert epoch >= highest
            if target is not None:
                assert masters.setdefault(epoch, target) == target
        highest = max(highest, epoch)
        assert epochs.seen == highest
        epochs = Epochs.restore(epochs.to_save(), "prod", same_configuration=True)


def test_what_is_restored() -> None:
    epochs = Epochs("prod").told_target(5, A).saw(7)
    saved = epochs.to_save()
    assert Epochs.restore(saved, "prod", same_configuration=True) == epochs
    changed = Epochs.restore(saved, "prod", same_configuration=False)
    assert (changed.told, changed.seen, changed.master) == (5, 7, None)
    assert Epochs.restore(saved, "test", same_configuration=True) == Epochs("test")


@pytest.mark.parametrize(
    "damage",
    [None, [], {"told": "5"}, {"told": 8}, {"seen": -1}, {"seen": 2**64}, {"cluster": 5}],
)
def test_damaged_epochs_are_a_fresh_start(damage: object) -> None:
    saved = Epochs("prod").told_target(5, A).to_save()
    damaged = saved | damage if isinstance(damage, dict) else damage
    assert Epochs.restore(damaged, "prod", same_configuration=True) == Epochs("prod")


def test_a_damaged_master_costs_only_the_master() -> None:
    saved = Epochs("prod").told_target(5, A).to_save() | {"master": {"x": 1}}
    assert Epochs.restore(saved, "prod", same_configuration=True) == Epochs("prod", 5, 5, None)
