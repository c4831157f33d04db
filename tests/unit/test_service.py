import os
import socket

import pytest

from kvtierd.daemon import Daemon
from kvtierd.errors import SettingsError
from kvtierd.service import ServiceManager


@pytest.fixture
def manager_socket(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        server.settimeout(2)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "30000000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        yield server


def test_what_systemd_hears(manager_socket):
    service = ServiceManager()
    assert service.watchdog_seconds == 30
    service.ready()
    service.status("tier joinable")
    service.alive()
    service.reloading(12.5)
    service.stopping()
    heard = [manager_socket.recv(200).decode() for _ in range(5)]
    assert heard == [
        "READY=1",
        "STATUS=tier joinable",
        "WATCHDOG=1",
        "RELOADING=1\nMONOTONIC_USEC=12500000",
        "STOPPING=1",
    ]


def test_children_cannot_speak_in_our_name(manager_socket):
    ServiceManager()
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(os.environ)


def test_a_watchdog_meant_for_another_process_is_not_ours(manager_socket, monkeypatch):
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert ServiceManager().watchdog_seconds is None


def test_without_systemd_nothing_happens(monkeypatch):
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    service = ServiceManager()
    service.ready()
    assert service.watchdog_seconds is None


async def test_a_reload_by_signal_is_told_from_begin_to_end_even_when_it_fails(manager_socket, monkeypatch):
    daemon = object.__new__(Daemon)  # only the reload; nothing of a node is needed

    async def reload(restart_changed):
        assert not restart_changed
        assert manager_socket.recv(200).startswith(b"RELOADING=1\nMONOTONIC_USEC=")  # before anything is done
        raise SettingsError("broken settings")

    monkeypatch.setattr(daemon, "_reload", reload, raising=False)
    await daemon._reload_by_signal(ServiceManager())
    assert manager_socket.recv(200) == b"READY=1"
