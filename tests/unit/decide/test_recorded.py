import json

import pytest

from kvtierd.decide.recorded import picture_from_json, picture_line, picture_to_json, read_line
from kvtierd.decide.simulate import pictures_of, replay
from kvtierd.errors import StateError
from kvtierd.observe.picture import Picture

from .scenes import GIB, NOW, PRESSED, QUIET, at, picture, policy, pool


def recording(seconds, window=PRESSED, step=5.0):
    scene = picture(pool=pool(window))
    return [picture_line(at(NOW + i * step, scene)) for i in range(int(seconds / step) + 1)]


def test_a_picture_comes_back_as_it_was():
    scene = picture()
    assert picture_from_json(json.loads(picture_line(scene))) == scene
    assert picture_from_json({"now_seconds": 1, "node": "a"}) == Picture(1.0, "a")


def test_unknown_keys_are_passed_over():
    kept = picture_to_json(picture())
    kept["later"] = {"x": 1}
    kept["pool"]["later"] = 5
    assert picture_from_json(kept) == picture()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda k: k.update(now_seconds="soon"), "now_seconds"),
        (lambda k: k.update(is_master=1), "is_master"),
        (lambda k: k["pool"].update(capacity_bytes=1.5), "pool.capacity_bytes"),
        (lambda k: k["pool"].update(capacity_bytes=True), "pool.capacity_bytes"),
        (lambda k: k["pool"].update(windows=[]), "pool.windows"),
        (lambda k: k["pool"]["windows"].update(five={}), "five"),
        (lambda k: k["engines"].append(7), "engines[2]"),
        (lambda k: k.update(peers={}), "peers"),
        (lambda k: k.pop("node"), "node"),
    ],
)
def test_a_value_of_another_kind_is_named(change, words):
    kept = picture_to_json(picture())
    change(kept)
    with pytest.raises(StateError) as told:
        picture_from_json(kept)
    assert words in told.value.message


@pytest.mark.parametrize("line", ["{", "[]", "5", "null", '{"now_seconds": 1}', "<html>", "[" * 100_000])
def test_a_line_that_is_no_picture_is_named_by_its_number(line):
    with pytest.raises(StateError) as told:
        list(pictures_of([picture_line(picture()), "", line]))
    assert told.value.stable_code == "state.picture-unreadable"
    assert "line 3" in told.value.message
    with pytest.raises(StateError):
        read_line(line, 1)


def test_a_recording_tells_what_would_have_been_decided_and_when():
    found = replay(pictures_of(recording(1500)), policy())
    assert (found.pictures, found.first_seconds, found.last_seconds) == (301, NOW, NOW + 1500)
    acts = [d for d in found.decided if not d.proposal.is_advice]
    assert [d.at_seconds - NOW for d in acts] == [300.0, 1200.0]
    told = acts[0].as_dict()
    assert json.loads(json.dumps(told)) == told
    assert told["action"] == {"kind": "AddHolder", "node": "b", "bytes": 16 * GIB}
    assert told["text"] == "add a pool holder of 16 GiB on b"
    assert found.kept_back["pool-small"]["holds"] > 50
    assert found.kept_back["pool-small"]["whether the last growth is of use is still being measured"] > 50


def test_another_policy_decides_otherwise():
    lines = recording(1500)
    assert (
        len(
            replay(
                pictures_of(lines),
                policy(grow_hold_seconds=60.0, cooldown_seconds=300.0, settle_seconds=60.0),
            ).decided
        )
        > 2
    )
    assert replay(pictures_of(lines), policy(off=("pool-small", "idle-memory"))).decided == ()
    assert replay(pictures_of(recording(1500, QUIET)), policy()).decided == ()


def test_an_empty_recording():
    found = replay(pictures_of([]), policy())
    assert (found.pictures, found.first_seconds, found.decided) == (0, None, ())
