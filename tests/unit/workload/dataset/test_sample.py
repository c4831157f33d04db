import json

from kvtierd.workload.dataset.sample import write_sample


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lengths_are_the_words_and_within_the_range(tmp_path):
    write_sample(tmp_path / "s", records=20, shortest=30, longest=60, seed=1)
    records = read(tmp_path / "s")
    assert len(records) == 20
    assert all(r["length"] == len(r["context"].split()) and 30 <= r["length"] <= 60 for r in records)
    assert len({r["length"] for r in records}) > 5


def test_no_two_records_share_a_beginning_and_a_seed_repeats_the_file(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_sample(tmp_path / name, records=5, shortest=16, longest=40, seed=seed)
    beginnings = {r["context"][:24] for r in read(tmp_path / "a") + read(tmp_path / "c")}
    assert len(beginnings) == 10
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
