from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.mmc_conf.sizes import align_up, alignment_bytes, format_mmc_size, parse_mmc_size

KB, MB, GB, TB = 1024, 1024**2, 1024**3, 1024**4


# Each of these was given to the real 1.3.0 and read as here (before alignment).
@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("134217728", 134217728),
        ("100b", 100),
        ("1024k", MB),
        ("2048KB", 2 * MB),
        ("200mb", 200 * MB),
        ("200m", 200 * MB),
        ("1GB", GB),
        ("1 gb", GB),
        ("1\tG", GB),
        ("2.5G", 5 * GB // 2),
        (".5GB", GB // 2),
        ("5.GB", 5 * GB),
        ("1TB", TB),
        ("1t", TB),
        ("1.7GB", 1825361100),
    ],
)
def test_sizes_mean_powers_of_1024(text: str, size_bytes: int) -> None:
    assert parse_mmc_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1GiB", 'write "1GB"'),
        ("640gib", 'write "640GB"'),
        ("1PB", "unit 'PB'"),
        ("1.2.3GB", "two decimal points"),
        ("-1GB", "no sign"),
        ("+1GB", "no sign"),
        ("", "not a size"),
        ("GB", "not a size"),
        (".", "not a size"),
        ("1,000MB", "not a size"),
        ("1e3MB", "unknown unit|does not know|not a size"),
        ("0x10", "does not know|not a size"),
        ("\u0661GB", "not a size"),
        ("1GB # c", "not a size"),
        ("9" * 100_000, "not a size"),
    ],
)
def test_what_memcache_refuses_or_misreads_is_refused_with_the_right_form(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_mmc_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0"),
        (1, "1"),
        (128 * GB, "128GB"),
        (512 * MB, "512MB"),
        (1536 * MB, "1536MB"),
        (TB, "1TB"),
        (3 * KB, "3KB"),
        (GB + 1, "1073741825"),
    ],
)
def test_the_shortest_exact_text(size_bytes: int, text: str) -> None:
    assert format_mmc_size(size_bytes) == text


def test_a_negative_size_has_no_text() -> None:
    with pytest.raises(ValueError, match="negative"):
        format_mmc_size(-1)


@settings(deadline=None)
@given(st.integers(0, 4 * TB))
def test_every_size_comes_back(size_bytes: int) -> None:
    assert parse_mmc_size(format_mmc_size(size_bytes)) == size_bytes


@settings(deadline=None)
@given(
    st.integers(0, TB), st.sampled_from(["host_shm", "host_tcp", "device_sdma", "DEVICE_RDMA"]), st.booleans()
)
def test_aligning_goes_up_by_less_than_one_step(size_bytes: int, protocol: str, a3: bool) -> None:
    step = alignment_bytes(protocol, a3=a3)
    aligned = align_up(size_bytes, step)
    assert aligned % step == 0
    assert size_bytes <= aligned < size_bytes + step


@pytest.mark.parametrize(
    ("protocol", "a3", "step"),
    [
        ("host_shm", False, 2 * MB),
        ("host_rdma", False, 2 * MB),
        ("device_sdma", False, GB),
        ("device_uboe", False, GB),
        ("host_tcp", True, GB),
    ],
)
def test_alignment_follows_protocol_and_series(protocol: str, a3: bool, step: int) -> None:
    assert alignment_bytes(protocol, a3=a3) == step


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_mmc_size(text) >= 0
