"""The unit files: what must be in them, and how much the sandbox leaves open."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kvpack.contents import EXAMPLE_DROP_INS, SYSTEM

ROOT = Path(__file__).parents[3]
SYSTEMD = ROOT / "systemd"
UNITS = ("kvtierd.service", "kvtierd-hugepages.service", "kvtierd.slice")


def directives(name):
    """Section -> key -> values, in order."""
    found: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in (SYSTEMD / name).read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(section, {}).setdefault(key, []).append(value)
    return found


SERVICE = directives("kvtierd.service")["Service"]
HUGEPAGES = directives("kvtierd-hugepages.service")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Type", "notify"),  # notify-reload is Type=simple to systemd before 253
        ("NotifyAccess", "main"),
        ("Restart", "on-failure"),
        ("KillMode", "process"),  # a stop of the daemon must never reach an engine
        ("Slice", "kvtierd.slice"),
        ("RuntimeDirectory", "kvtierd"),
        ("RuntimeDirectoryPreserve", "yes"),  # records of running units are in it
        ("StateDirectory", "kvtierd"),
        ("LogsDirectory", "kvtierd memfabric_hybrid"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("LimitMEMLOCK", "infinity"),
        ("SystemCallArchitectures", "native"),
    ],
)
def test_kvtierd_service_has(key, value):
    assert SERVICE[key] == [value]


def test_the_daemon_is_watched_reloaded_and_not_restarted_for_ever():
    assert 0 < int(SERVICE["WatchdogSec"][0]) <= 60
    assert SERVICE["ExecReload"] == ["/usr/bin/kvtierctl reload"]
    unit = directives("kvtierd.service")["Unit"]
    assert int(unit["StartLimitBurst"][0]) > 1
    assert int(unit["StartLimitIntervalSec"][0]) > int(unit["StartLimitBurst"][0]) * int(
        SERVICE["RestartSec"][0]
    )


def test_nothing_ties_engines_to_the_daemon():
    for unit in UNITS:
        assert not {"PartOf", "BindsTo", "Requires"} & directives(unit)["Unit"].keys()


def test_hugepages_come_first_and_their_failure_does_not_keep_the_daemon_down():
    unit = directives("kvtierd.service")["Unit"]
    assert "kvtierd-hugepages.service" in unit["After"][0].split()
    assert "kvtierd-hugepages.service" in unit["Wants"][0].split()
    service = HUGEPAGES["Service"]
    assert service["Type"] == ["oneshot"]
    assert service["RemainAfterExit"] == ["yes"]
    assert service["ExecStart"] == ["/usr/bin/kvtierctl hugepages reserve"]


@pytest.mark.parametrize("service", [SERVICE, HUGEPAGES["Service"]], ids=["kvtierd", "hugepages"])
def test_what_the_sandbox_must_leave_open(service):
    writable = " ".join(service["ReadWritePaths"]).replace("-/", "/").split()
    assert {"/sys/kernel/mm/hugepages", "/proc/sys/vm", "/sys/devices/system/node"} <= set(writable)
    for closed in (
        "PrivateDevices",
        "ProtectKernelTunables",
        "MemoryDenyWriteExecute",
        "PrivateNetwork",
        "User",
    ):
        assert closed not in service
    assert {"AF_UNIX", "AF_INET", "AF_INET6"} <= set(service["RestrictAddressFamilies"][0].split())
    assert "CAP_SYS_PTRACE" in service["CapabilityBoundingSet"][0].split()


def test_every_directive_left_out_has_its_reason():
    """What systemd-analyze finds missing altogether is named in a comment."""
    analysis = analyze("kvtierd.service")
    text = (SYSTEMD / "kvtierd.service").read_text()
    for item in analysis:
        name = re.match(r"\w+", item["name"])[0]
        if item["set"] is False and item["exposure"] and f"\n{name}=" not in text:
            assert re.search(rf"#.*\b{name}=", text), item["name"]


@pytest.mark.parametrize(("name", "most"), [("kvtierd.service", 30), ("kvtierd-hugepages.service", 30)])
def test_exposure_is_at_most_what_the_install_page_says(name, most):
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", f"--threshold={most}", "--no-pager", str(SYSTEMD / name)],
        capture_output=True,
        text=True,
    ) if can_analyze() else pytest.skip("systemd-analyze (252 or newer) is not installed")  # fmt: skip
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def can_analyze():
    if not shutil.which("systemd-analyze"):
        return False
    version = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True).stdout.split()[
        1
    ]
    return int(version) >= 252


def analyze(name):
    if not can_analyze():
        pytest.skip("systemd-analyze (252 or newer) is not installed")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--json=short", "--no-pager", str(SYSTEMD / name)],
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


def test_nothing_is_enabled_by_the_package():
    lines = (SYSTEMD / "kvtierd.preset").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["disable kvtierd.service"]


def test_systemd_takes_the_user_and_the_directories(tmp_path):
    for tool, name in (("systemd-sysusers", "kvtierd.sysusers"), ("systemd-tmpfiles", "kvtierd.tmpfiles")):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed")
        options = ["--create"] if tool == "systemd-tmpfiles" else []
        (tmp_path / "etc").mkdir(exist_ok=True)
        done = subprocess.run(
            [tool, f"--root={tmp_path}", *options, "-"],
            input=(SYSTEMD / name).read_text(),
            capture_output=True,
            text=True,
        )
        assert (done.returncode, "not a valid" in done.stderr) == (0, False), done.stderr
    assert "kvtierd:" in (tmp_path / "etc/group").read_text()
    assert (tmp_path / "var/lib/kvtierd").is_dir()


def test_every_file_there_is_packaged():
    assert {p.name for p in SYSTEMD.iterdir()} == {*SYSTEM, *EXAMPLE_DROP_INS}
