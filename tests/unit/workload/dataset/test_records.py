import gzip
import json

import pytest
import zstandard

from kvtierd.errors import WorkloadError
from kvtierd.workload.dataset.records import Skips, read_lines, read_records


def records(path, skips=None, **more):
    return [record for _, record in read_records(path, skips or Skips(), **more)]


def write(tmp_path, content: bytes, name="d.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


LINES = [{"a": i, "text": "wörter\u2028\x85 " * 5} for i in range(20)]
TEXT = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES).encode()


@pytest.mark.parametrize(
    "content",
    [
        TEXT,
        TEXT.removesuffix(b"\n"),
        TEXT.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + TEXT,
        b"\n \n" + TEXT.replace(b"\n", b"\n\n"),
        gzip.compress(TEXT),
        gzip.compress(TEXT[:500]) + gzip.compress(TEXT[500:]),
        zstandard.compress(TEXT),
        zstandard.compress(TEXT[:500]) + zstandard.compress(TEXT[500:]),
        json.dumps(LINES).encode(),
        b"\xef\xbb\xbf \n" + json.dumps(LINES, indent=2, ensure_ascii=False).encode(),
        gzip.compress(json.dumps(LINES).encode()),
    ],
)
def test_the_same_records_come_out_of_every_packing(tmp_path, content):
    skips = Skips()
    assert records(write(tmp_path, content), skips) == LINES
    assert skips.total == 0


def test_records_larger_than_a_chunk_and_split_over_chunks(tmp_path):
    big = [{"n": n, "text": "\\x" * (700_000 + n)} for n in range(4)]
    assert records(write(tmp_path, json.dumps(big).encode())) == big


def test_what_is_left_out_is_counted_with_its_first_place(tmp_path):
    content = b'{"a": 1}\n[1]\nnonsense\n{"a": \xff}\n"text"\n{"b": NaN}\n' + b"[" * 5000 + b"\n"
    skips = Skips()
    kept = records(write(tmp_path, content), skips)
    assert kept[0] == {"a": 1}
    assert len(kept) == 2
    assert skips.as_dict() == {
        "not a JSON object": {"count": 2, "first": "d.jsonl:2"},
        "not JSON": {"count": 2, "first": "d.jsonl:3"},
        "not UTF-8": {"count": 1, "first": "d.jsonl:4"},
    }
    assert "2 x not a JSON object (first: d.jsonl:2)" in list(skips.lines())


def test_a_line_beyond_the_limit_is_skipped_and_the_next_one_is_read(tmp_path):
    skips = Skips()
    path = write(tmp_path, b'{"a": 1}\n{"b": "' + b"x" * 3_000_000 + b'"}\n{"c": 3}')
    assert records(path, skips, longest_bytes=1000) == [{"a": 1}, {"c": 3}]
    assert skips.count("a line longer than 1,000 bytes") == 1


def test_a_line_of_just_the_limit_is_read(tmp_path):
    path = write(tmp_path, b'{"a": 1}\n{"a": 2}')
    assert records(path, longest_bytes=8) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n", "dataset.lfs-pointer"),
        ('{"a": 1}\n'.encode("utf-16"), "dataset.encoding"),
        (b"\x7fELF\0\0\0", "dataset.encoding"),
        (gzip.compress(TEXT)[:-20], "dataset.damaged"),
        (zstandard.compress(TEXT)[:-5], "dataset.damaged"),
        (b"\x28\xb5\x2f\xfd" + b"x" * 50, "dataset.damaged"),
        (b'[{"a": 1}, {"b": ', "dataset.array"),
        (b'[{"a": 1}', "dataset.array"),
        (b'[{"a": 1}, nonsense]', "dataset.array"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, content, code):
    with pytest.raises(WorkloadError) as caught:
        records(write(tmp_path, content))
    assert caught.value.stable_code == code
    assert caught.value.hint


def test_a_missing_file_and_a_directory(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(WorkloadError) as caught:
            records(path)
        assert caught.value.stable_code == "dataset.unreadable"


def test_progress_reaches_the_size_of_the_file(tmp_path):
    path, told = write(tmp_path, gzip.compress(TEXT)), []
    list(read_lines(path, Skips(), progress=told.append))
    assert told == sorted(told)
    assert told[-1] == path.stat().st_size
