"""Rules for a driver's attributes and for ``launch``."""

from __future__ import annotations

import functools
import math
import os
import posixpath
import re
import signal
from collections.abc import Iterable
from unittest import mock

from kvtierd.plan.engine import API_VERSION, EngineContext, EngineLaunch
from kvtierd.plan.model import Note, Refusal
from kvtierd.plugins import DRIVER_MEMBERS
from kvtierd.testing.contexts import engine_context
from kvtierd.testing.guard import watched
from kvtierd.testing.subject import Check, Subject, accepted, ask, expect, launches, situations

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_DATA_MEMBERS = ("name", "api_version", "default_port", "package", "versions")
_CODE = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SUPERVISORS_ENV = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash", "csh", "fish"})
_FOR_A_SHELL = re.compile(r"\$\(|\$\{?[A-Za-z_]|`|^~/|^[|&;<>]+$|^\d?>{1,2}")
_SECRET_NAME = r"(?:token|password|passwd|secret|api[-_]?key|access[-_]?key|credential)"  # noqa: S105 - the words, not a secret
_SECRET_FLAG = re.compile(rf"--?(?:[\w.-]*[-_.])?{_SECRET_NAME}", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    rf"(?:^|[^A-Za-z0-9]){_SECRET_NAME}[\"']?\s*[=:]\s*[\"']?[^\s\"'{{\[]", re.IGNORECASE
)
_UNKNOWN_ARG = "kvtierd-conformance-unknown"


def members(subject: Subject) -> None:
    """All members of EngineDriver, with the types it says."""
    driver = subject.driver
    missing = [name for name in DRIVER_MEMBERS if not hasattr(driver, name)]
    expect(not missing, f"the driver lacks {', '.join(missing)}")
    for name in ("name", "versions"):
        value = getattr(driver, name)
        expect(isinstance(value, str), f"{name} is {value!r}, not a text")
    for name in ("api_version", "default_port"):
        value = getattr(driver, name)
        expect(type(value) is int, f"{name} is {value!r}, not a whole number")
    package: object = driver.package
    expect(package is None or (isinstance(package, str) and package), f"package is {package!r}")
    for name in set(DRIVER_MEMBERS) - set(_DATA_MEMBERS):
        expect(callable(getattr(driver, name)), f"{name} cannot be called")


def api_version(subject: Subject) -> None:
    """Written for this kvtierd's plugin API."""
    expect(
        subject.driver.api_version == API_VERSION,
        f"api_version is {subject.driver.api_version!r}, this kvtierd has {API_VERSION}",
    )


def name(subject: Subject) -> None:
    """Lower-case words joined by hyphens: it is written in settings and shown in tables."""
    given = subject.driver.name
    expect(
        NAME.fullmatch(given) and len(given) <= 40,
        f"name is {given!r}; like vllm-ascend, 40 characters at most",
    )


def default_port(subject: Subject) -> None:
    """Not a port that needs root, not one that Linux gives to outgoing connections."""
    port = subject.driver.default_port
    expect(1024 <= port < 32768, f"default_port is {port}; 1024 to 32767 are fit for a server")


def versions(subject: Subject) -> None:
    """A PEP 440 specifier that admits some version, and the package that it is about."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    given = subject.driver.versions
    try:
        SpecifierSet(given)
    except InvalidSpecifier as error:
        expect(holds=False, message=f"versions is no PEP 440 specifier: {error}")
    expect(
        not given or subject.driver.package, f"versions is {given!r} but package is None: versions of what?"
    )


def answers(subject: Subject) -> None:
    """Answers in every situation, whatever the version, and accepts one of them."""
    for situation, _, launch in launches(subject):
        expect(launch.argv, f"launch() with {situation} has an empty argv")
        EngineLaunch.model_validate(launch.model_dump())
    accepted(subject)


def pure(subject: Subject) -> None:
    """Touches no file, no process and no network, even when it swallows the error that forbids it."""
    driver = subject.driver
    for situation, context in situations(driver):
        with watched() as touched:
            ask(f"launch() with {situation}", functools.partial(driver.launch, context))
            ask(f"metrics_url() with {situation}", functools.partial(driver.metrics_url, context))
        expect(not touched, f"launch() with {situation} is not pure: {'; '.join(touched[:3])}")


def repeatable(subject: Subject) -> None:
    """The same context gives the same launch, in any environment: kvtierctl plans and the daemon launches."""
    first = {situation: launch for situation, _, launch in launches(subject)}
    other = {"HOME": "/elsewhere", "PATH": "/elsewhere/bin", "LD_LIBRARY_PATH": "/elsewhere/lib", "LANG": "C"}
    with mock.patch.dict(os.environ, other, clear=True):
        for situation, _, launch in launches(subject):
            expect(
                launch == first[situation],
                f"launch() with {situation} gave two answers: {_difference(first[situation], launch)}",
            )


def _difference(one: EngineLaunch, other: EngineLaunch) -> str:
    left, right = one.model_dump(), other.model_dump()
    return "; ".join(f"{key}: {left[key]!r} and {right[key]!r}" for key in left if left[key] != right[key])


def argv(subject: Subject) -> None:
    """A command line for execve: texts that are not empty, and no shell that would read them again."""
    for situation, _, launch in launches(subject):
        if launch.refusals:
            continue  # it will not be run
        for place, item in enumerate(launch.argv):
            where = f"argv[{place}] with {situation}"
            expect(item, f"{where} is empty")
            expect("\0" not in item, f"{where} has a NUL character")
            expect(not _FOR_A_SHELL.search(item), f"{where} is {item!r}: no shell will expand it")
            if posixpath.basename(item) in _SHELLS:
                after = launch.argv[place + 1 : place + 4]
                runs = any(re.fullmatch(r"-[a-z]*c[a-z]*", flag) for flag in after)
                expect(not runs, f"{where} runs a shell: {' '.join(launch.argv[place : place + 3])!r}")


def environment(subject: Subject) -> None:
    """Names and texts that execve takes, nothing of the supervisor's, and what the settings say gets through."""
    for situation, _, launch in launches(subject):
        for key, value in launch.env.items():
            expect(_ENV_NAME.fullmatch(key), f"env with {situation}: {key!r} is no name of a variable")
            expect("\0" not in value, f"env with {situation}: {key} has a NUL character")
            expect(
                key not in _SUPERVISORS_ENV,
                f"env with {situation} has {key}: that is between kvtierd and systemd",
            )
    context = accepted(subject)
    wanted = {"KVTIERD_CONFORMANCE": "1"}
    launch = ask("launch()", lambda: subject.driver.launch(context.model_copy(update={"env": wanted})))
    expect(launch.env.items() >= wanted.items(), "what the settings say under env does not reach the engine")


def no_secrets(subject: Subject) -> None:
    """argv is public (ps, plan, status): keys and passwords go into a file or the environment."""
    for situation, _, launch in launches(subject):
        for place, item in enumerate(launch.argv):
            following = launch.argv[place + 1] if place + 1 < len(launch.argv) else "-"
            shown = item.split("=")[0][:40]
            flag = _SECRET_FLAG.fullmatch(item) and not following.startswith("-")
            expect(
                not flag and not _SECRET_VALUE.search(item),
                f"argv with {situation} carries a secret ({shown})",
            )


def ports(subject: Subject) -> None:
    """Uses its port, claims the others, and two engines on one host want different ones."""
    first = accepted(subject)
    second = first.model_copy(
        update={
            "name": "e1",
            "index": first.index + 1,
            "port": first.port + 1,
            "devices": (2, 3),
            "work_dir": "/var/lib/kvtierd/engines/e1",
        }
    )
    one, other = (ask("launch()", functools.partial(subject.driver.launch, c)) for c in (first, second))
    if one.serves_http:
        expect(
            _mentions(one, first.port) and _mentions(other, second.port),
            f"port {first.port} is nowhere in argv, env or files",
        )
    taken = {first.port, 5000, 6000}
    for launch in (one, other):
        for purpose, port in launch.extra_ports.items():
            expect(purpose, "an extra port has no purpose")
            expect(1024 <= port <= 65535, f"extra port {port} ({purpose}) is not in 1024 to 65535")
            expect(
                port not in taken,
                f"extra port {port} ({purpose}) is taken: by the engine itself, MemCache or another engine",
            )
            taken.add(port)
        taken.add(second.port)
    clash = {f.path for f in one.files} & {f.path for f in other.files}
    differing = [p for p in clash if _content(one, p) != _content(other, p)]
    expect(not differing, f"two engines write different things into {', '.join(differing)}")


def _mentions(launch: EngineLaunch, port: int) -> bool:
    texts: Iterable[str] = (*launch.argv, *launch.env.values(), *(f.content for f in launch.files))
    return any(re.search(rf"(?<!\d){port}(?!\d)", text) for text in texts)


def _content(launch: EngineLaunch, path: str) -> str:
    return next(f.content for f in launch.files if f.path == path)


def files(subject: Subject) -> None:
    """Absolute paths, octal modes that strangers cannot write, each path once."""
    for situation, _, launch in launches(subject):
        paths = [f.path for f in launch.files]
        expect(len(paths) == len(set(paths)), f"files with {situation}: a path comes twice")
        for file in launch.files:
            normal = posixpath.isabs(file.path) and posixpath.normpath(file.path) == file.path
            expect(normal, f"files with {situation}: {file.path!r} is not an absolute path without '..'")
            octal = re.fullmatch(r"0[0-7]{3}", file.mode)
            expect(octal, f"files with {situation}: mode {file.mode!r} is not octal text like '0640'")
            expect(
                not int(file.mode, 8) & 0o002,
                f"files with {situation}: {file.path} can be written by anybody",
            )


def readiness(subject: Subject) -> None:
    """A probe, and an end to the wait."""
    for situation, _, launch in launches(subject):
        ready = launch.readiness
        if launch.serves_http:
            expect(ready.probes, f"readiness with {situation} has no probe")
        for label in ("deadline_seconds", "interval_seconds", "timeout_seconds"):
            _positive(f"readiness.{label} with {situation}", getattr(ready, label))
        expect(
            0 <= ready.holdoff_seconds < ready.deadline_seconds,
            f"readiness.holdoff_seconds with {situation} is not within the deadline",
        )
        if ready.liveness_seconds is not None:
            _positive(f"readiness.liveness_seconds with {situation}", ready.liveness_seconds)


def ending(subject: Subject) -> None:
    """A stop that comes to an end, restarts with a limit, and no fatal pattern that fits every line."""
    for situation, _, launch in launches(subject):
        stop, restart = launch.stop, launch.restart
        expect(stop.signal in signal.Signals.__members__, f"stop.signal with {situation} is {stop.signal!r}")
        _positive(f"stop.timeout_seconds with {situation}", stop.timeout_seconds)
        for label in ("first_seconds", "longest_seconds", "reset_after_seconds"):
            _positive(f"restart.{label} with {situation}", getattr(restart, label))
        expect(1 <= restart.factor < math.inf, f"restart.factor with {situation} is {restart.factor}")
        expect(0 <= restart.jitter < 1, f"restart.jitter with {situation} is {restart.jitter}")
        expect(restart.limit >= 0, f"restart.limit with {situation} is {restart.limit}")
        for pattern in restart.fatal_patterns:
            expect(len(pattern.strip()) >= 4, f"restart.fatal_patterns has {pattern!r}, which fits any line")
        expect(0 not in restart.fatal_exit_codes, "restart.fatal_exit_codes has 0")
        expect(launch.clients >= 0, f"clients with {situation} is {launch.clients}")


def _positive(what: str, value: float) -> None:
    expect(0 < value < math.inf, f"{what} is {value}: it must be more than 0 and finite")


def _remarks(launch: EngineLaunch) -> list[Note | Refusal]:
    return [*launch.notes, *launch.refusals]


def remarks(subject: Subject) -> None:
    """Notes and refusals have stable codes and say something."""
    for situation, _, launch in launches(subject):
        for remark in _remarks(launch):
            expect(
                _CODE.fullmatch(remark.code),
                f"with {situation}: the code {remark.code!r} is not like 'engine.arg-unknown'",
            )
            expect(remark.message.strip(), f"with {situation}: {remark.code} has no message")


def unknown_args(subject: Subject) -> None:
    """An option of the settings is never dropped in silence: refused, noted, or handed to the engine to judge."""
    context = accepted(subject)
    for args in ({_UNKNOWN_ARG: 1}, {_UNKNOWN_ARG: "x"}, {_UNKNOWN_ARG: True}, {_UNKNOWN_ARG: {"a": [1]}}):
        asked = context.model_copy(update={"args": args})
        launch = ask(f"launch() with args {args}", functools.partial(subject.driver.launch, asked))
        said = [r.message for r in _remarks(launch)] + list(launch.argv)
        known = any(_UNKNOWN_ARG in text or _UNKNOWN_ARG.replace("-", "_") in text for text in said)
        expect(known, f"args {args} is dropped: it is in no refusal, no note and not in argv")


def unknown_version(subject: Subject) -> None:
    """A version outside ``versions`` is said."""
    driver = subject.driver
    if not driver.versions:
        return
    context: EngineContext = engine_context(version="0.0.0.dev0")
    launch = ask("launch() with version 0.0.0.dev0", lambda: driver.launch(context))
    said = [r.message for r in _remarks(launch)]
    expect(
        any("0.0.0.dev0" in text for text in said),
        f"version 0.0.0.dev0 is not in {driver.versions!r} and no note or refusal says so",
    )


CHECKS = (
    Check("members", members),
    Check("api-version", api_version),
    Check("name", name),
    Check("default-port", default_port),
    Check("versions", versions),
    Check("launch-answers", answers),
    Check("launch-pure", pure),
    Check("launch-repeatable", repeatable),
    Check("launch-argv", argv),
    Check("launch-environment", environment),
    Check("launch-no-secrets", no_secrets),
    Check("launch-ports", ports),
    Check("launch-files", files),
    Check("launch-readiness", readiness),
    Check("launch-ending", ending),
    Check("launch-remarks", remarks),
    Check("launch-unknown-args", unknown_args),
    Check("launch-unknown-version", unknown_version),
)
