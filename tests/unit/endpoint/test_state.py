from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kvtierd.endpoint.actions import Mode
from kvtierd.endpoint.clients import Identity
from kvtierd.endpoint.state import Admission, EndpointState
from kvtierd.endpoint.statefile import is_of_this_boot, read_state, save_state
from kvtierd.endpoint.targets import Address, AnyTarget, PeerTarget, Target
from kvtierd.errors import EndpointError

TARGET = Target(Address("127.0.0.1", 15000), Address("127.0.0.1", 16000))
ELSEWHERE = Target(Address("10.0.0.7", 15000), Address("10.0.0.7", 16000))


def make(*, purge: bool = True) -> EndpointState:
    state = EndpointState(TARGET, purge_on_unclean=purge)
    state.backend_found(100.0)
    return state


def test_a_death_means_recover_and_survivors_first() -> None:
    state = make()
    state.backend_gone("refused")
    assert (state.mode, state.admission, state.backend.deaths) == (Mode.RECOVER, Admission.SURVIVORS, 1)
    state.backend_gone("refused")
    assert state.backend.deaths == 1
    state.backend_found(101.0)
    assert state.mode is Mode.RECOVER  # only the daemon ends it
    state.serve()
    assert (state.mode, state.admission) == (Mode.SERVE, Admission.SURVIVORS)


def test_without_purge_on_unclean_a_death_only_closes_the_door() -> None:
    state = make(purge=False)
    state.backend_gone("refused")
    assert (state.mode, state.admission) == (Mode.SERVE, Admission.SURVIVORS)


def test_a_quiesced_stop_is_no_death_to_recover_from() -> None:
    state = make()
    state.quiesce(1.0)
    state.mark_quiesced()
    state.backend_gone("refused")
    assert (state.mode, state.quiesced, state.admission) == (Mode.QUIESCE, True, Admission.SURVIVORS)


def test_a_death_before_it_was_quiet_is_a_death() -> None:
    state = make()
    state.quiesce(1.0)
    state.backend_gone("refused")
    assert state.mode is Mode.RECOVER


def test_a_silent_server_is_not_a_dead_one() -> None:
    state = make()
    state.backend_silent("no answer")
    assert (state.mode, state.admission, state.backend.reachable) == (Mode.SERVE, Admission.ALL, False)


def test_a_server_that_was_never_there_has_not_died() -> None:
    state = EndpointState(TARGET, purge_on_unclean=True)
    state.backend_gone("refused")
    assert (state.mode, state.admission, state.backend.deaths) == (Mode.SERVE, Admission.ALL, 0)


def test_a_forgotten_quiesce_ends_itself() -> None:
    state = make()
    state.quiesce(1.0)
    state.mark_quiesced()
    assert not state.expire(60.0)
    assert state.expire(61.5)
    assert (state.mode, state.quiesced) == (Mode.SERVE, False)


def test_only_joined_clients_pass_a_closed_door() -> None:
    state = make()
    old = state.clients.obtain(Identity(1, 5), "old", 0.0)
    new = state.clients.obtain(Identity(1, 6), "the same pid, later", 0.0)
    state.joined(old)
    state.backend_gone("refused")
    assert state.admits(old)
    assert not state.admits(new)
    state.admit(Admission.ALL)
    assert state.admits(new)


def test_a_new_target_is_a_stranger() -> None:
    state = make()
    state.set_target(ELSEWHERE)
    assert not state.backend.reachable
    state.backend_gone("refused")
    assert state.backend.deaths == 0


def test_a_restarted_endpoint_knows_its_survivors() -> None:
    state = make()
    client = state.clients.obtain(Identity(7, 70), "engine", 0.0)
    client.has_rank = True
    state.joined(client)
    state.set_target(ELSEWHERE)
    saved = json.loads(json.dumps(state.to_save()))
    again = EndpointState(TARGET, purge_on_unclean=True)
    again.restore(saved, 1.0, 200.0)
    assert again.target == ELSEWHERE
    assert again.admission is Admission.SURVIVORS  # the restart broke every link
    restored = again.clients.get(Identity(7, 70))
    assert restored is not None
    assert (restored.joined, restored.kind, restored.name) == (True, "P", "engine")
    again.backend_gone("refused")  # it died while nobody looked
    assert again.mode is Mode.RECOVER


def test_a_changed_configuration_beats_a_saved_target() -> None:
    state = make()
    state.set_target(ELSEWHERE)
    other = dataclasses.replace(TARGET, meta=Address("127.0.0.1", 15555))
    again = EndpointState(other, purge_on_unclean=True)
    again.restore(state.to_save(), 1.0, 200.0)
    assert again.target == other


PEER, OTHER = PeerTarget("node-a"), PeerTarget("node-c")


def told(state: EndpointState, epoch: int, target: AnyTarget | None) -> bool:
    return state.set_target(target, state.epochs.told_target(epoch, target))


def behind_a_hop(*, life: int = 11) -> EndpointState:
    state = EndpointState(None, purge_on_unclean=True, cluster="prod")
    assert told(state, 1, PEER)
    state.backend_found(100.0, life=life, era=1)
    state.serve()
    state.admit(Admission.ALL)
    return state


def test_a_change_of_master_counts_like_a_death() -> None:
    state = behind_a_hop()
    generation = state.generation
    assert told(state, 2, OTHER)
    assert (state.mode, state.admission, state.generation > generation) == (
        Mode.RECOVER,
        Admission.SURVIVORS,
        True,
    )
    assert (state.route, state.backend.reachable, state.backend.deaths) == (OTHER, False, 0)


def test_a_planned_change_of_master_needs_no_purge() -> None:
    state = make()
    state.quiesce(1.0)
    state.mark_quiesced()
    assert told(state, 1, PEER)
    assert (state.mode, state.quiesced) == (Mode.QUIESCE, True)


def test_the_same_master_under_a_higher_epoch_changes_nothing() -> None:
    state = behind_a_hop()
    assert not told(state, 2, PEER)
    assert (state.mode, state.backend.reachable, state.epochs.told) == (Mode.SERVE, True, 2)


def test_a_master_that_is_away_suspends() -> None:
    state = behind_a_hop()
    assert not told(state, 1, None)
    assert (state.route, state.link_mode, state.mode) == (None, Mode.RECOVER, Mode.SERVE)
    assert not told(state, 1, PEER)
    assert (state.route, state.link_mode) == (PEER, Mode.SERVE)
    state.backend_found(101.0, life=11, era=1)
    assert state.backend.deaths == 0
    assert not told(state, 2, None)  # an election without a result
    assert (state.route, state.suspended) == (None, True)
    assert not told(state, 2, PEER)
    assert not told(state, 3, None)
    assert told(state, 3, OTHER)  # only now are the links of before of no use
    assert (state.route, state.mode) == (OTHER, Mode.RECOVER)


def test_a_higher_epoch_that_was_only_seen_ends_the_old_one() -> None:
    state = behind_a_hop()
    state.see_epoch(state.epochs.saw(5))
    assert (state.route, state.link_mode, state.backend.reachable) == (None, Mode.RECOVER, False)
    assert not told(state, 5, PEER)  # the same master, elected again: its links are good
    assert (state.route, state.link_mode) == (PEER, Mode.SERVE)
    state.see_epoch(state.epochs.saw(6))
    assert told(state, 6, OTHER)
    assert (state.route, state.mode) == (OTHER, Mode.RECOVER)


def test_another_life_behind_the_hop_is_a_death() -> None:
    state = behind_a_hop(life=11)
    state.backend_silent("unreachable")
    state.backend_found(101.0, life=11, era=2)
    assert (state.backend.deaths, state.mode, state.backend.era) == (0, Mode.SERVE, 2)
    state.backend_found(102.0, life=12, era=3)
    assert (state.backend.deaths, state.mode, state.backend.life) == (1, Mode.RECOVER, 12)


def test_a_metaservice_that_was_replaced_while_nobody_looked_has_died() -> None:
    state = EndpointState(TARGET, purge_on_unclean=True)
    state.backend_found(100.0, process=Identity(5, 50), life=1, era=1)
    state.backend_found(101.0, process=Identity(5, 50), life=2, era=2)
    state.backend_found(102.0, process=None, life=3, era=3)  # it could not be found out
    assert (state.backend.deaths, state.backend.life, state.backend.era) == (0, 1, 1)
    state.backend_found(103.0, process=Identity(6, 60), life=4, era=4)
    assert (state.backend.deaths, state.backend.life, state.backend.era) == (1, 4, 4)
    assert state.mode is Mode.RECOVER


def test_a_restarted_endpoint_knows_the_life_it_saw_and_begins_an_era() -> None:
    state = EndpointState(TARGET, purge_on_unclean=True)
    state.backend_found(100.0, process=Identity(5, 50), life=1, era=1)
    saved = json.loads(json.dumps(state.to_save()))
    same = EndpointState(TARGET, purge_on_unclean=True)
    same.restore(saved, 1.0, 200.0)
    same.backend_found(201.0, process=Identity(5, 50), life=7, era=7)
    assert (same.backend.life, same.backend.era, same.backend.deaths) == (1, 7, 0)
    other = EndpointState(TARGET, purge_on_unclean=True)
    other.restore(saved, 1.0, 200.0)
    other.backend_found(201.0, process=Identity(6, 60), life=7, era=7)
    assert other.backend.life == 7


def test_a_restarted_endpoint_behind_a_hop() -> None:
    state = behind_a_hop()
    client = state.clients.obtain(Identity(7, 70), "pool", 0.0)
    client.provider, client.eras = True, {1: 4, 2: 4}
    state.joined(client)
    state.strand(client)
    saved = json.loads(json.dumps(state.to_save()))
    again = EndpointState(None, purge_on_unclean=True, cluster="prod")
    again.restore(saved, 1.0, 200.0)
    assert (again.target, again.epochs.told, again.mode) == (PEER, 1, Mode.SERVE)
    restored = again.clients.get(Identity(7, 70))
    assert restored is not None
    assert (restored.provider, restored.stranded, restored.eras) == (True, True, {1: 4, 2: 4})
    assert not again.admits(restored)
    again.backend_found(201.0, life=12, era=9)
    assert (again.backend.deaths, again.mode) == (1, Mode.RECOVER)


def test_epochs_outlive_a_reboot_and_another_configuration() -> None:
    saved = behind_a_hop().to_save()
    rebooted = EndpointState(None, purge_on_unclean=True, cluster="prod")
    rebooted.restore_epochs(saved)
    assert (rebooted.epochs.told, rebooted.epochs.master, rebooted.target) == (1, PEER, None)
    configured = EndpointState(TARGET, purge_on_unclean=True, cluster="prod")
    configured.restore(saved, 1.0, 200.0)
    assert (configured.epochs.told, configured.epochs.master, configured.target) == (1, None, None)
    elsewhere = EndpointState(TARGET, purge_on_unclean=True, cluster="test")
    elsewhere.restore_epochs(saved)
    assert (elsewhere.epochs.told, elsewhere.target) == (0, TARGET)


@pytest.mark.parametrize(
    "damage",
    [
        {"mode": "party"},
        {"survivors": [{"pid": 1}]},
        {"survivors": 5},
        {"target": {}},
        {"backend": {"life": "x"}},
        {"backend": {"life": 1, "process": [1]}},
    ],
)
def test_a_damaged_state_is_refused_whole(damage: dict[str, object]) -> None:
    again = EndpointState(TARGET, purge_on_unclean=True)
    with pytest.raises((KeyError, ValueError, TypeError, IndexError, EndpointError)):
        again.restore(make().to_save() | damage, 1.0, 200.0)
    assert again.mode is Mode.SERVE
    assert len(again.clients) == 0


def test_state_file_round_trip_and_what_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "endpoint.state"
    assert read_state(path) is None
    save_state(path, {"version": 1, "mode": "serve"})
    loaded = read_state(path)
    assert loaded is not None
    assert loaded["mode"] == "serve"
    assert is_of_this_boot(loaded)
    assert [p.name for p in tmp_path.iterdir()] == ["endpoint.state"]
    path.write_text(path.read_text().replace(loaded["boot_id"], "another boot"))
    of_another_boot = read_state(path)
    assert of_another_boot is not None
    assert not is_of_this_boot(of_another_boot)
    for text in ("", "{", "[]", '{"version": 2}', "[" * 100_000):
        path.write_text(text)
        assert read_state(path) is None


def test_a_state_file_that_cannot_be_written_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="cannot write") as caught:
        save_state(tmp_path / "missing" / "state", {"version": 1})
    assert caught.value.stable_code == "endpoint.state-file"
    assert caught.value.hint
