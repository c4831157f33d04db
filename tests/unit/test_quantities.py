import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.quantities import (
    align_down,
    format_cpu_list,
    format_duration,
    format_size,
    parse_cpu_list,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("256GiB", 256 * 1024**3),
        ("256GB", 256 * 10**9),
        ("1.5TiB", 1536 * 1024**3),
        ("2 MiB", 2 * 1024**2),
        ("100kB", 100_000),
        ("4096", 4096),
        ("7b", 7),
        (12, 12),
    ],
)
def test_sizes_as_people_write_them(written, size_bytes):
    assert parse_size(written) == size_bytes


@pytest.mark.parametrize("written", ["", "GiB", "-1GiB", -1, "1 GiBs", "1e9", True, None, 1.5, "12GiB34"])
def test_what_is_no_size_is_refused_with_a_remedy(written):
    with pytest.raises(ValueError, match=r"size|unit|negative"):
        parse_size(written)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("6s", 6), ("250ms", 0.25), ("2m", 120), ("1m30s", 90), ("1h", 3600), ("1.5s", 1.5)],
)
def test_durations_as_people_write_them(written, seconds):
    assert parse_duration(written) == pytest.approx(seconds)


@pytest.mark.parametrize("written", ["", "6", 6, "s", "6 apples", "1m30", None, "-1s"])
def test_a_duration_without_its_unit_is_refused(written):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(written)


@given(st.integers(0, 2**50), st.sampled_from(["B", "KiB", "MiB", "GiB"]))
def test_exact_binary_sizes_survive_formatting(number, unit):
    size = parse_size(f"{number}{unit}")
    text = format_size(size)
    if "." not in text:
        assert parse_size(text) == size


@given(st.integers(0, 2**60), st.integers(1, 2**40))
def test_align_down_never_takes_more(value, step):
    aligned = align_down(value, step)
    assert aligned <= value < aligned + step
    assert aligned % step == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4s"), (12, "12s"), (185, "3m05s"), (7620, "2h07m"), (356400, "4d03h")]
)
def test_durations_for_people(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("4,2-3,3", (2, 3, 4)), ("1, 5-6", (1, 5, 6))]
)
def test_cpu_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus
    assert parse_cpu_list(format_cpu_list(cpus)) == cpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-", "-1", "0,,2", "9000", "0-99999999", "0;1"])
def test_what_is_no_cpu_list(text: str) -> None:
    with pytest.raises(ValueError, match="CPUs"):
        parse_cpu_list(text)


def test_runs_of_cpus_are_joined() -> None:
    assert format_cpu_list([9, 0, 1, 2, 8, 5]) == "0-2,5,8-9"
