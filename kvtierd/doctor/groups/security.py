"""Who can read keys, change what kvtierd runs, or reach what has no password."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any, Final

from kvtierd.checks import (
    CannotTellError,
    Group,
    Outcome,
    Patient,
    absent,
    fail,
    note,
    ok,
    unknown,
    warn,
    worst,
)
from kvtierd.doctor.looking import file_facts, processes
from kvtierd.settings import Settings

GROUP = Group("security")
SETTINGS_FILE: Final = "/etc/kvtierd/kvtierd.toml"
SETTINGS_DIRECTORIES: Final = ("/etc/kvtierd", "/etc/kvtierd/conf.d")
SOCKET_MODE: Final = 0o660
SECRET_FLAG: Final = re.compile(
    r"--?(?:[a-z0-9]+[-_])*(?:api[-_]key|admin[-_]key|token|password|passwd|secret|access[-_]key)(?:=|$)",
    flags=re.IGNORECASE,
)
"""Options whose value is a secret; what ends in ``-file`` or ``-path`` names one and is none."""
SECRET_VARIABLE: Final = re.compile(r"(?:API_KEY|TOKEN|PASSWORD|SECRET)$")
KEY_OPTION: Final = re.compile(r"^(?:ssl[-_]keyfile|.*[-_]key[-_](?:file|path))$")


@GROUP.check(
    "keys",
    title="Only their owner can read private keys",
    why="Who can read a node's key can be that node: read and write all cached KV and take mastership.",
    fix="chown root:root KEY; chmod 600 KEY; and when others could read it for long: a new key (kvtierctl certs issue)",
)
async def keys(patient: Patient) -> Outcome:
    """Mode of each key that the settings name, and of engines' key files."""
    wanted = _key_files(patient.settings) if patient.settings is not None else {}
    found, well = [], []
    for path, what in wanted.items():
        facts = await file_facts(patient, path, follow=True)
        if facts is None:
            continue  # that it is missing is another check's
        if facts.mode & 0o007:
            found.append(
                fail(
                    f"{path} ({what}) has mode {facts.mode:04o}: every user of this host can read it",
                    f"chmod 600 {path}",
                )
            )
        elif facts.mode & 0o070:
            found.append(
                warn(
                    f"{path} ({what}) has mode {facts.mode:04o}: group {facts.group} can read it",
                    f"chmod 600 {path}",
                )
            )
        else:
            well.append(f"{path} {facts.mode:04o}")
    if not found and not well:
        return absent("no key is used, or none is there")
    return worst(found, ", ".join(well))


def _key_files(settings: Settings) -> dict[str, str]:
    cluster, files = settings.cluster, dict[str, str]()
    if settings.meta.tls or (cluster.mode != "standalone" and not cluster.insecure):
        files[cluster.tls.key] = "[cluster] tls"
    if cluster.mode == "etcd" and cluster.etcd.tls is not None:
        files[cluster.etcd.tls.key] = "[cluster.etcd] tls"
    if settings.observe.tls is not None:
        files[settings.observe.tls.key] = "[observe] tls"
    for engine in settings.engine:
        for name, value in engine.args.items():
            if KEY_OPTION.fullmatch(name) and isinstance(value, str) and value.startswith("/"):
                files[value] = f"engine {engine.name}, {name}"
    return files


@GROUP.check(
    "socket",
    title="Only root and the group kvtierd can use the control socket",
    why="Whoever can write to it can stop engines, empty the pool and move mastership.",
    fix="systemctl restart kvtierd makes it anew with mode 0660; the group is root's when there is no group kvtierd",
)
async def socket(patient: Patient) -> Outcome:
    """Mode and owner of kvtierd.sock."""
    runtime = patient.settings.paths.runtime if patient.settings is not None else "/run/kvtierd"
    path = f"{runtime}/kvtierd.sock"
    facts = await file_facts(patient, path)
    if facts is None:
        return absent("kvtierd does not run")
    told = f"{path} is {facts.user}:{facts.group} {facts.mode:04o}"
    if facts.mode & 0o002:
        return fail(f"{told}: every user of this host can command kvtierd")
    if facts.mode != SOCKET_MODE or facts.group not in {"kvtierd", "root"}:
        return warn(f"{told}, not :kvtierd 0660")
    return ok(told)


@GROUP.check(
    "directories",
    title="Only their owner can write kvtierd's directories",
    why="kvtierd, which is root, runs programs and reads files from there. Who can write there can be root.",
    fix="chown root:root DIR; chmod 755 DIR",
)
async def directories(patient: Patient) -> Outcome:
    """[paths], as far as they are there."""
    settings = patient.settings
    paths = (
        settings.paths.model_dump().values()
        if settings is not None
        else ("/var/lib/kvtierd", "/run/kvtierd", "/var/log/kvtierd")
    )
    found, well = [], []
    for path in paths:
        facts = await file_facts(patient, path)
        if facts is None:
            continue
        if facts.is_link:
            found.append(note(f"{path} is a symbolic link"))
        elif facts.mode & 0o002:
            found.append(fail(f"{path} has mode {facts.mode:04o}: every user of this host can write there"))
        elif facts.mode & 0o020 and facts.group != "root":
            found.append(warn(f"{path} has mode {facts.mode:04o}: group {facts.group} can write there"))
        else:
            well.append(f"{path} {facts.mode:04o}")
    if not found and not well:
        return absent("kvtierd has not run here yet")
    return worst(found, ", ".join(well))


@GROUP.check(
    "settings-file",
    title="Only root can change the settings",
    why="They name programs that kvtierd starts, as root where no user is written.",
    fix="chown root:root /etc/kvtierd/kvtierd.toml; chmod 644 /etc/kvtierd/kvtierd.toml; the same for its directories (755)",
)
async def settings_file(patient: Patient) -> Outcome:
    """The file that is used (on a recorded host: the usual one), its directory and drop-ins."""
    named = (
        str(patient.settings_file.absolute())
        if patient.settings_file and patient.view.live
        else SETTINGS_FILE
    )
    paths = [named, named.rpartition("/")[0] or "/", *SETTINGS_DIRECTORIES]
    paths += [f"{d}/{n}" for d in SETTINGS_DIRECTORIES[1:] for n in patient.view.names(d)]
    found, well = [], []
    for path in dict.fromkeys(paths):
        facts = await file_facts(patient, path, follow=True)
        if facts is None:
            continue
        if facts.mode & 0o002:
            found.append(fail(f"{path} has mode {facts.mode:04o}: every user of this host can change it"))
        elif facts.mode & 0o020 and facts.group != "root":
            found.append(warn(f"{path} has mode {facts.mode:04o}: group {facts.group} can change it"))
        elif facts.user != "root":
            found.append(note(f"{path} is {facts.user}'s"))
        else:
            well.append(f"{path} {facts.mode:04o}")
    if not found and not well:
        return absent("there is no settings file")
    return worst(found, ", ".join(well))


@GROUP.check(
    "listeners",
    title="What has no password listens on loopback only",
    why="The MetaService, its config store and its HTTP service know no authentication: in the network everybody can read and write"
    " cached KV, which are users' prompts, and join the pool.",
    fix="kvtierd's own plan binds them to 127.0.0.1; find who listens: ss -ltnp; for hand-written files: 127.0.0.1 in the URLs",
)
async def listeners(patient: Patient) -> Outcome:
    """Listening sockets on the planned ports that are beyond loopback."""
    inventory, ports = await patient.inventory(), await _ports(patient)
    found, seen = [], 0
    for owner in inventory.ports_in_use:
        use = ports.get(owner.port)
        if use is None:
            continue
        seen += 1
        who = f", {owner.process} (pid {owner.pid})" if owner.pid else ""
        if not _loopback(owner.address):
            found.append(warn(f"{owner.address}:{owner.port} ({use}{who}) can be reached from the network"))
    return worst(
        found, f"{seen} of these listen, on loopback: {', '.join(f'{u} {p}' for p, u in ports.items())}"
    )


async def _ports(patient: Patient) -> dict[int, str]:
    """Port -> what it is for, of those that must stay on loopback."""
    settings = patient.settings
    if settings is None:
        return {5000: "MetaService", 6000: "config store"}
    meta = settings.meta
    ports = {meta.port: "MetaService", meta.config_store_port: "config store"}
    if meta.tls or (meta.endpoint == "direct" and settings.cluster.mode != "standalone"):
        ports = {}  # they are for other nodes, with TLS
    else:
        ports |= {
            meta.backend_port or meta.port + 1: "MetaService behind the endpoint",
            meta.backend_config_store_port or meta.config_store_port + 1: "config store behind the endpoint",
        }
    try:
        plan = await patient.plan()
    except CannotTellError:
        plan = None
    if meta.metrics_port is not None:
        ports[meta.metrics_port] = "MetaService HTTP"
    elif plan is not None and plan.meta is not None:
        ports[int(plan.meta.metrics_url.rpartition(":")[2])] = "MetaService HTTP"
    if settings.observe.tls is None and settings.observe.exporter != "off":
        ports[int(settings.observe.exporter.rpartition(":")[2])] = "exporter"
    return ports


@GROUP.check(
    "engine-api",
    title="Engines that the network can reach ask for a key",
    why="An engine on 0.0.0.0 answers whoever reaches it. vLLM and SGLang have no password unless they are given one.",
    fix='host = "127.0.0.1" behind a proxy that asks; or the engine\'s API key, by its environment or a file',
)
def engine_api(patient: Patient) -> Outcome:
    """``host`` of each [[engine]], and whether it is given a key."""
    settings = patient.settings
    if settings is None or not settings.engine:
        return absent("the settings name no engine")
    found = []
    for engine in settings.engine:
        keyed = any(
            re.search(r"api[-_]?key", name, flags=re.IGNORECASE) for name in (*engine.args, *engine.env)
        )
        if not _loopback(engine.host) and not keyed:
            found.append(note(f"{engine.name} listens on {engine.host} and asks for no key"))
    return worst(found, ", ".join(f"{e.name} on {e.host}" for e in settings.engine))


@GROUP.check(
    "secrets",
    title="No secret is in a command line or in the settings",
    why="Every user of the host can read a command line (ps), and plans, logs and support bundles have it too.",
    fix="give it by a file with mode 0600 (SGLang: --config; vLLM: --config), or by a variable that only the engine's user sees",
)
def secrets(patient: Patient) -> Outcome:
    """Options with a secret in [[engine]] args and env, in the command given to doctor, and in /proc/PID/cmdline.

    Only the option is named, never its value.
    """
    found = []
    settings = patient.settings
    for engine in settings.engine if settings is not None else ():
        found += [warn(f"engine {engine.name}: args has {name}") for name in _secret_args(engine.args)]
        found += [
            warn(f"engine {engine.name}: env has {name}")
            for name in engine.env
            if SECRET_VARIABLE.search(name)
        ]
    found += [warn(f"the given command has {flag}") for flag in secret_flags(patient.engine_argv)]
    listed = processes(patient.view)
    for process in listed:
        found += [
            warn(f"{process.name} (pid {process.pid}) has {flag}") for flag in secret_flags(process.argv)
        ]
    if not listed and not found and not patient.view.names("/proc"):
        return unknown("/proc cannot be read")
    return worst(found, f"none in {len(listed)} processes")


def _secret_args(args: Mapping[str, Any]) -> list[str]:
    return [name for name, value in args.items() if value and SECRET_FLAG.fullmatch(f"--{name.lstrip('-')}")]


def secret_flags(argv: tuple[str, ...]) -> list[str]:
    """The names of options that carry a secret in this command line, with a value of their own or behind ``=``."""
    found = []
    for word, following in zip(argv, (*argv[1:], ""), strict=False):
        match = SECRET_FLAG.match(word)
        if not match:
            continue
        value = word[match.end() :] if match[0].endswith("=") else following
        if value and not value.startswith(("-", "/", "$")):
            found.append(match[0].rstrip("="))
    return list(dict.fromkeys(found))


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return address == "localhost"
