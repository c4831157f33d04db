import asyncio

from kvtierd import events as module
from kvtierd.events import EventLog


def test_events_survive_a_restart_with_their_numbers(tmp_path):
    log = EventLog(tmp_path)
    log.add("info", "a", "one")
    log.add("error", "b", "two", unit="u")
    again = EventLog(tmp_path)
    assert [(e.id, e.message, e.unit) for e in again.last()] == [(1, "one", ""), (2, "two", "u")]
    assert again.add("info", "c", "three").id == 3


def test_a_torn_last_line_costs_only_itself(tmp_path):
    log = EventLog(tmp_path)
    log.add("info", "a", "one")
    with (tmp_path / "events.jsonl").open("a") as stream:
        stream.write('{"id": 2, "at_unix')
    assert [e.message for e in EventLog(tmp_path).last()] == ["one"]


def test_the_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 2000)
    log = EventLog(tmp_path)
    for i in range(200):
        log.add("info", "k", f"message {i}")
    sizes = {p.name: p.stat().st_size for p in tmp_path.iterdir()}
    assert set(sizes) == {"events.jsonl", "events.jsonl.1"}
    assert all(size <= 2000 for size in sizes.values())
    assert EventLog(tmp_path).last()[-1].message == "message 199"


def test_a_full_disk_is_counted_not_raised(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    log = EventLog(blocked)
    log.add("info", "a", "kept in memory")
    assert log.unwritten == 1
    assert log.last()[0].message == "kept in memory"


async def test_followers_get_old_then_new_and_a_slow_one_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "QUEUE_LIMIT", 5)
    log = EventLog(tmp_path)
    log.add("info", "a", "old")
    stream = log.follow(1)
    assert (await anext(stream)).message == "old"
    for i in range(50):
        log.add("info", "a", f"new {i}")
    assert (await asyncio.wait_for(anext(stream), 1)).message == "new 0"
    await stream.aclose()
    assert not log._followers
