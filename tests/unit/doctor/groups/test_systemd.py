from pathlib import Path

import pytest

from kvtierd.doctor.unit_files import parse, read_unit
from kvtierd.host.view import HostView

from .small_host import SmallHost

SHIPPED = Path(__file__).parents[4] / "systemd"
CHECKS = ("systemd.sandbox", "systemd.kill-mode", "systemd.life", "systemd.unit-file", "systemd.memlock")


@pytest.fixture
def host(tmp_path):
    made = SmallHost(tmp_path)
    for name in ("kvtierd.service", "kvtierd-hugepages.service"):
        made.put(f"/usr/lib/systemd/system/{name}", (SHIPPED / name).read_bytes())
    made.put("/run/systemd/system/.keep")
    return made


@pytest.mark.parametrize("check", CHECKS)
def test_the_shipped_units_are_well(host, check):
    assert host.find(check).severity == "ok"


def test_the_shipped_drop_in_for_the_emulation_breaks_nothing(host):
    host.put(
        "/etc/systemd/system/kvtierd.service.d/emulation.conf", (SHIPPED / "emulation.conf").read_bytes()
    )
    assert host.find("systemd.sandbox").severity == "ok"
    assert host.find("systemd.kill-mode").severity == "ok"


@pytest.mark.parametrize(
    ("check", "line", "severity"),
    [
        ("systemd.sandbox", "ProtectKernelTunables=true", "fail"),
        ("systemd.sandbox", "ProtectKernelTunables=no", "ok"),
        ("systemd.sandbox", "PrivateDevices = on", "fail"),
        ("systemd.sandbox", "ReadWritePaths=", "fail"),  # takes the shipped ones back, /sys stays read-only
        ("systemd.sandbox", "ReadOnlyPaths=", "ok"),
        ("systemd.sandbox", "ReadOnlyPaths=-/sys/kernel/mm/hugepages", "fail"),
        ("systemd.sandbox", "ProtectProc=invisible", "fail"),
        ("systemd.sandbox", "ProtectHome=read-only", "ok"),
        ("systemd.sandbox", "User=root", "ok"),
        ("systemd.sandbox", "IPAddressDeny=any", "warn"),
        ("systemd.sandbox", "# PrivateDevices=yes", "ok"),
        ("systemd.kill-mode", "KillMode=mixed", "warn"),
        ("systemd.kill-mode", "KillMode=", "warn"),
        ("systemd.life", "Type=simple", "warn"),
        ("systemd.life", "WatchdogSec=0", "warn"),
        ("systemd.life", "Restart=no", "warn"),
        ("systemd.memlock", "LimitMEMLOCK=8M", "warn"),
        ("systemd.memlock", "LimitMEMLOCK=infinity", "ok"),
    ],
)
def test_a_drop_in_is_judged_by_what_holds_in_the_end(host, check, line, severity):
    host.put("/etc/systemd/system/kvtierd.service.d/50-x.conf", f"[Service]\n{line}\n")
    found = host.find(check)
    assert found.severity == severity
    if severity == "fail" and line != "ReadWritePaths=":
        assert "50-x.conf" in found.found


@pytest.mark.parametrize(
    ("directory", "line", "check"),
    [
        ("kvtier-.service.d", "[Service]\nKillMode=process", "systemd.kill-mode"),
        ("kvtier-engine-.service.d", "[Service]\nSendSIGKILL=no", "systemd.kill-mode"),
        ("kvtier-engine-.service.d", "[Unit]\nBindsTo=kvtierd.service", "systemd.life"),
        ("service.d", "[Service]\nPrivateDevices=yes", "systemd.engine-sandbox"),
    ],
)
def test_drop_ins_for_engines_units_are_found_under_every_prefix(host, directory, line, check):
    assert host.find(check).severity == "ok"
    host.put(f"/etc/systemd/system/{directory}/a.conf", line + "\n")
    assert host.find(check).severity == "fail"


def test_a_file_in_etc_hides_its_namesake_in_run(host):
    host.put("/run/systemd/system/kvtierd.service.d/a.conf", "[Service]\nPrivateDevices=yes\n")
    assert host.find("systemd.sandbox").severity == "fail"
    host.put("/etc/systemd/system/kvtierd.service.d/a.conf", "[Service]\n")
    assert host.find("systemd.sandbox").severity == "ok"


def test_lines_go_on_behind_a_backslash_and_rubbish_is_passed_over(tmp_path):
    host = SmallHost(tmp_path)
    text = "[Service]\nReadOnlyPaths=/a \\\n  /b\n= x\nno sense\n\x00\xff\n[Unit\nPartOf=y\n"
    found = parse("f", text)
    assert ("Service", "ReadOnlyPaths", "/a  /b") in [(a.section, a.key, a.value) for a in found]
    host.put("/etc/systemd/system/kvtierd.service/inner", "a directory where a file is expected")
    assert read_unit(HostView(host.root), "kvtierd.service").assignments == ()
    assert host.find("systemd.sandbox").severity in {"ok", "unknown"}


@pytest.mark.parametrize(
    ("said", "severity"),
    [
        ("LoadState=loaded\nActiveState=active\nResult=success\nUnitFileState=static\n", "ok"),
        ("LoadState=loaded\nActiveState=failed\nResult=exit-code\n", "warn"),
        ("LoadState=masked\nActiveState=inactive\n", "warn"),
        ("LoadState=not-found\nActiveState=inactive\n", "ok"),
        ("garbage", "unknown"),
    ],
)
def test_the_hugepages_service_by_systemctl(host, said, severity):
    words = (
        "systemctl",
        "show",
        "kvtierd-hugepages.service",
        "--property=LoadState,UnitFileState,ActiveState,Result",
    )
    host.command(*words, out=said)
    assert host.find("systemd.hugepages-service").severity == severity


def test_a_hung_systemctl_is_unknown(host):
    host.command("systemctl", "--version", timed_out=True)
    found = host.find("systemd.running")
    assert (found.severity, "no answer" in found.found) == ("unknown", True)
