"""The .deb in a small Debian: the install section of the documentation, word for word, and what scripts do."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

import pytest
from debian import CONTAINER_CAPABILITIES, ROOT, Debian, commands
from test_build import deb

from kvtierd.emulator.build import ensure_driver

PLUGIN_PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "kvtierd-acme"
version = "9.9"
dependencies = ["kvtierd", "pluggy"]

[project.entry-points."kvtierd.plugins"]
acme = "kvtierd_acme"
"""
PLUGIN = """
from kvtierd_refengine.plugin import RefengineDriver
from kvtierd.hookspecs import hookimpl

class Acme(RefengineDriver):
    name = "acme"

@hookimpl
def kvtierd_engine_drivers():
    return [Acme()]
"""


@pytest.fixture(scope="module")
def installed(debian: Debian, dist: Path) -> Debian:
    """With kvtierd and its plugins, installed as the documentation says."""
    (debian.path("/srv/dist")).mkdir(parents=True)
    for package in (
        deb(dist),
        deb(dist, "kvtierd-plugin-vllm", "all"),
        deb(dist, "kvtierd-plugin-refengine"),
    ):
        shutil.copy(package, debian.path("/srv/dist"))
    # Up to the settings; the whole is done under a real systemd, in tests/systemd.
    lines = itertools.takewhile(lambda line: "EDITOR" not in line, commands("install"))
    debian.shell("cd /srv\n" + "\n".join(lines))
    return debian


def test_it_runs_after_the_installation(installed: Debian) -> None:
    assert "kvtierd 0." in installed.run("kvtierd", "--version").stdout
    assert re.search(r"memcache_hybrid +1\.3", installed.run("kvtierctl", "version").stdout)
    plugins = installed.run("kvtierctl", "plugins").stdout
    assert re.search(r"vllm-ascend .* ok", plugins)
    assert re.search(r"refengine .* ok", plugins)


def test_the_installed_settings_are_valid_and_a_plan_says_what_is_missing(installed: Debian) -> None:
    assert "ok" in installed.run("kvtierctl", "conf", "check", "/etc/kvtierd/kvtierd.toml").stdout
    plan = installed.run("kvtierctl", "plan", check=False)
    assert plan.returncode == 1
    assert "/usr/lib/kvtierd/bin/python" in plan.stdout
    assert "REFUSED" in plan.stdout


def test_a_plan_for_a_recorded_host(installed: Debian) -> None:
    shutil.copy(ROOT / "tests/fixtures/inventory/a2-2cards.json", installed.path("/srv/host.json"))
    settings = "/usr/share/doc/kvtierd/examples/single-host-a2.toml"
    plan = installed.run("kvtierctl", "plan", "--settings", settings, "--inventory", "/srv/host.json").stdout
    assert "kvtier-engine-qwen3" in plan


def test_user_group_and_directories(installed: Debian) -> None:
    assert installed.shell("getent passwd kvtierd; getent group kvtierd").count("kvtierd") >= 2
    assert installed.shell("stat -c '%a %U' /var/lib/kvtierd /var/log/kvtierd").split() == ["755", "root"] * 2


def test_it_is_not_enabled_by_itself(installed: Debian) -> None:
    assert (
        installed.run("systemctl", "is-enabled", "kvtierd.service", check=False).stdout.strip() == "disabled"
    )


def test_manuals_are_installed_where_man_looks(installed: Debian) -> None:
    for page in ("man8/kvtierd.8.gz", "man1/kvtierctl.1.gz", "man5/kvtierd.toml.5.gz"):
        assert "NAME" in installed.shell(f"zcat /usr/share/man/{page} | head -5").upper()


def test_the_operators_python_environment_does_not_reach_kvtierctl(installed: Debian) -> None:
    installed.path("/srv/evil").mkdir()
    installed.path("/srv/evil/typer.py").write_text("raise SystemExit('not ours')\n")
    assert installed.run("kvtierctl", "version", env={"PYTHONPATH": "/srv/evil"}).returncode == 0


def test_a_third_partys_plugin(installed: Debian) -> None:
    project = installed.path("/srv/acme")
    (project / "kvtierd_acme").mkdir(parents=True)
    (project / "pyproject.toml").write_text(PLUGIN_PROJECT)
    (project / "kvtierd_acme/__init__.py").write_text(PLUGIN)
    wheel = installed.path("/srv/plugins")
    wheel.mkdir()
    installed.shell(
        "cd /srv/acme; python3 -m pip wheel --no-deps --no-build-isolation --wheel-dir /srv/plugins . 2>&1"
    )
    for command in commands("plugin"):
        installed.shell(f"cd /srv/plugins; {command}")
    assert re.search(r"acme .* ok", installed.run("kvtierctl", "plugins").stdout)
    shutil.rmtree(installed.path("/usr/local/lib/kvtierd"))
    assert "acme" not in installed.run("kvtierctl", "plugins").stdout


def test_units_run_with_the_capabilities_of_a_container(installed: Debian) -> None:
    """MetaService, pool and engine under shims, with no more than docker gives by itself; see test_container.py."""
    driver = installed.path("/srv/driver/kvtierd/emulator")
    if not driver.exists():
        ensure_driver(driver)
        installed.path("/etc/kvtierd/kvtierd.toml").rename(installed.path("/etc/kvtierd/kvtierd.toml.aside"))
        installed.path("/etc/kvtierd/kvtierd.toml").write_text(
            '[node]\nseries = "emulated"\n[pool]\ndram = "256MiB"\nhost_reserve = "1GiB"\n'
            '[[engine]]\nname = "ref"\nplugin = "refengine"\nport = 8113\n'
        )
    script = """
        ready() {
            for _ in $(seq 60); do
                kvtierctl status >/tmp/status 2>&1 || true
                grep -qE '^engine-ref +ready' /tmp/status && return
                sleep 0.5
            done
            cat /tmp/status /tmp/daemon.log
            exit 1
        }
        kvtierd >/tmp/daemon.log 2>&1 &
        daemon=$!
        ready; cat /tmp/status
        kill -9 $daemon
        kvtierd >/tmp/daemon.log 2>&1 &
        ready; cat /tmp/status
    """
    output = installed.shell(
        script,
        capabilities=CONTAINER_CAPABILITIES,
        env={"XDG_CACHE_HOME": "/srv/driver"},
        timeout_seconds=200,
    )
    assert output.count("(shim)") == 2
    before, after = re.findall(r"(?m)^engine-ref +ready +(\d+) ", output)
    assert before == after


def test_an_upgrade_keeps_what_the_operator_wrote_and_removal_keeps_it_too(
    installed: Debian, dist: Path
) -> None:
    aside = installed.path("/etc/kvtierd/kvtierd.toml.aside")
    file = installed.path("/etc/kvtierd/kvtierd.toml")
    if aside.exists():
        aside.rename(file)
    file.write_text('[pool]\ndram = "48GiB"  # mine\n')
    installed.install(deb(dist))  # the same version again runs the same scripts as another
    assert "mine" in file.read_text()
    installed.run("dpkg", "--remove", "kvtierd-plugin-vllm", "kvtierd-plugin-refengine", "kvtierd")
    assert "mine" in file.read_text()
    assert not installed.path("/usr/bin/kvtierctl").is_symlink()
    assert not installed.path("/usr/lib/kvtierd").exists()


def test_a_purge_leaves_only_the_user(installed: Debian) -> None:
    installed.run("dpkg", "--purge", "kvtierd")
    for path in (
        "/etc/kvtierd",
        "/var/lib/kvtierd",
        "/var/log/kvtierd",
        "/var/cache/kvtierd",
        "/usr/lib/kvtierd",
    ):
        assert not installed.path(path).exists(), path
    assert "kvtierd" in installed.shell("getent passwd kvtierd")
