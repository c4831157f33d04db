"""The C source, called through ctypes as MemFabric calls it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from ctypes import byref, c_char_p, c_int32, c_size_t, c_void_p
from pathlib import Path

import pytest

from kvtierd.emulator.build import EmulatedDriver, ensure_driver

INVALID_PARAM = 107000
DRV_INVALID_VALUE = 3
PAGES = 2 * 1024**2


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDriver:
    return ensure_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def acl(built: EmulatedDriver) -> ctypes.CDLL:
    return ctypes.CDLL(str(built.library_dir / "libascendcl.so"))


def test_a_device_is_a_number(acl: ctypes.CDLL) -> None:
    device = c_int32(-1)
    assert acl.aclrtSetDevice(3) == 0
    assert acl.aclrtGetDevice(byref(device)) == 0
    assert device.value == 3
    acl.aclrtGetSocName.restype = c_char_p
    assert acl.aclrtGetSocName() == b"Ascend910B3"


def test_device_memory_is_aligned_host_memory(acl: ctypes.CDLL) -> None:
    memory = c_void_p()
    assert acl.aclrtMalloc(byref(memory), c_size_t(4096), 0) == 0
    assert memory.value is not None
    assert memory.value % PAGES == 0
    assert acl.aclrtMemset(memory, c_size_t(4096), 0x5A, c_size_t(4096)) == 0
    back = ctypes.create_string_buffer(16)
    assert acl.aclrtMemcpy(back, c_size_t(16), memory, c_size_t(16), 2) == 0
    assert back.raw == b"\x5a" * 16
    assert acl.aclrtFree(memory) == 0


def test_copies_never_exceed_the_target(acl: ctypes.CDLL) -> None:
    source, target = ctypes.create_string_buffer(b"x" * 32), ctypes.create_string_buffer(8)
    assert acl.aclrtMemcpy(target, c_size_t(8), source, c_size_t(9), 1) == INVALID_PARAM
    assert acl.aclrtMemset(target, c_size_t(8), 1, c_size_t(9)) == INVALID_PARAM
    width = c_size_t(9)
    assert (
        acl.aclrtMemcpy2d(target, c_size_t(8), source, c_size_t(16), width, c_size_t(1), 1) == INVALID_PARAM
    )
    assert target.raw == bytes(8)


def test_a_batch_names_the_copy_that_failed(acl: ctypes.CDLL) -> None:
    source, target = ctypes.create_string_buffer(b"abcdefgh", 8), ctypes.create_string_buffer(8)
    to = (c_void_p * 2)(ctypes.addressof(target), ctypes.addressof(target))
    origin = (c_void_p * 2)(ctypes.addressof(source), ctypes.addressof(source))
    room, sizes, failed = (c_size_t * 2)(8, 4), (c_size_t * 2)(8, 5), c_size_t(99)
    result = acl.aclrtMemcpyBatch(
        to, room, origin, sizes, c_size_t(2), None, None, c_size_t(0), byref(failed)
    )
    assert (result, failed.value) == (INVALID_PARAM, 1)
    assert target.raw == b"abcdefgh"


def test_reserve_map_unmap_free(acl: ctypes.CDLL) -> None:
    address, handle = c_void_p(), c_void_p()
    size = c_size_t(PAGES)
    assert acl.halMemAddressReserve(byref(address), size, c_size_t(0), None, 0) == 0
    assert acl.halMemCreate(byref(handle), size, None, 0) == 0
    assert acl.halMemMap(address, c_size_t(PAGES + 1), c_size_t(0), handle, 0) == DRV_INVALID_VALUE
    assert acl.halMemMap(address, size, c_size_t(0), handle, 0) == 0
    ctypes.memset(address, 7, PAGES)
    assert acl.halMemUnmap(address) == 0
    assert acl.halMemUnmap(address) == DRV_INVALID_VALUE
    assert acl.halMemMap(address, size, c_size_t(0), handle, 0) == 0
    assert ctypes.string_at(address, 4) == b"\7" * 4  # the memory belongs to the handle, not to the address
    assert acl.halMemUnmap(address) == 0
    assert acl.halMemRelease(handle) == 0
    assert acl.halMemAddressFree(address) == 0
    assert acl.halMemAddressFree(address) == DRV_INVALID_VALUE


def test_all_library_names_share_one_state(built: EmulatedDriver, acl: ctypes.CDLL) -> None:
    other = ctypes.CDLL(str(built.library_dir / "libascend_hal.so"))
    device = c_int32(-1)
    assert acl.aclrtSetDevice(5) == 0
    assert other.aclrtGetDevice(byref(device)) == 0
    assert device.value == 5


def test_trace_names_the_calls(built: EmulatedDriver) -> None:
    code = f"import ctypes; ctypes.CDLL({str(Path(built.library_dir, 'libra.so'))!r}).RaInit()"
    traced = subprocess.run(
        [sys.executable, "-c", code],
        env={"KVTIERD_EMULATOR_TRACE": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert traced.stderr == "ascend emulator: RaInit\n"
