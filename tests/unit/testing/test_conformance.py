"""Every installed driver conforms; every broken one is caught, by the check that should catch it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvtierd_refengine.plugin import RefengineDriver

from kvtierd.plan.engine import EngineContext, EngineLaunch, EngineObservation, HttpCall, TierTokens
from kvtierd.plan.model import FileSpec, Note, Readiness, RestartPolicy, StopPolicy
from kvtierd.plugins import load_plugins
from kvtierd.testing import Subject, conformance_problems, engine_context
from kvtierd.testing.checks import CHECKS, shape_problems

DRIVERS = load_plugins().drivers


@pytest.mark.parametrize("name", DRIVERS)
def test_installed_drivers_conform(name: str) -> None:
    problems = conformance_problems(Subject(DRIVERS[name]))
    assert {p.check: p.message for p in problems} == {}


def run_pytest(directory: Path, *arguments: str) -> tuple[int, str]:
    (directory / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments],
        cwd=directory,
        env=dict(os.environ) | {"PYTHONPATH": str(directory), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_suite_by_its_option(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    code, out = run_pytest(tmp_path, "--kvtierd-plugin", "refengine", "--deselect", "nothing")
    own_and_loads = 2
    assert f"{len(CHECKS) + own_and_loads} passed" in out
    assert code == 0


def test_without_the_option_nothing_is_collected_or_loaded(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import sys\ndef test_own(): assert not {'kvtierd.plan', 'kvtierd.plugins', 'pydantic'} & set(sys.modules)\n"
    )
    code, out = run_pytest(tmp_path)
    assert (code, "1 passed" in out) == (0, True), out


def test_a_driver_that_is_not_there(tmp_path: Path) -> None:
    code, out = run_pytest(tmp_path, "--kvtierd-plugin", "refengin")
    assert code == 1
    assert "no installed plugin brings an engine driver named 'refengin'" in out
    assert "1 failed" in out


def test_an_uninstalled_plugin_that_is_broken(tmp_path: Path) -> None:
    (tmp_path / "broken_plugin.py").write_text(
        "from kvtierd_refengine.plugin import RefengineDriver\n"
        "from kvtierd.hookspecs import hookimpl\n"
        "class Driver(RefengineDriver):\n"
        "    name = 'broken'\n"
        "    def read_line(self, line): return int(line)\n"
        "@hookimpl\n"
        "def kvtierd_engine_drivers(): return [Driver()]\n"
    )
    code, out = run_pytest(
        tmp_path, "--kvtierd-plugin=broken", "--kvtierd-plugin-module=broken_plugin", "-k", "read-line"
    )
    assert code == 1
    assert "read-line-hostile: read_line() of an empty line raised ValueError" in out


def test_the_module_option_alone_is_a_usage_error(tmp_path: Path) -> None:
    code, out = run_pytest(tmp_path, "--kvtierd-plugin-module=x")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "needs --kvtierd-plugin NAME" in out


class Good(RefengineDriver):
    """The base of all mutants: conforms."""

    def tokens(self, body: bytes) -> TierTokens:
        answer = json.loads(body)
        if not isinstance(answer, dict) or not isinstance(answer.get("usage", {}), dict):
            raise ValueError("not a completion")
        return super().tokens(body)


def test_the_base_of_the_mutants_conforms() -> None:
    assert conformance_problems(Subject(Good())) == []


def launching(change: Callable[[EngineLaunch, EngineContext], dict[str, Any]]) -> type[Good]:
    class Mutant(Good):
        def launch(self, context: EngineContext) -> EngineLaunch:
            launch = super().launch(context)
            return launch.model_copy(update=change(launch, context))

    return Mutant


def with_member(**members: Any) -> type[Good]:
    return type("Mutant", (Good,), members)


def read_a_file(launch: EngineLaunch, context: EngineContext) -> dict[str, Any]:
    try:
        Path("/etc/hostname").read_text()
    except OSError:
        pass  # the driver swallows it
    return {}


def counting_by_absence(self: Good, text: str) -> EngineObservation:
    found = dict(re.findall(r"^(vllm:\w+)\{.*\} (\S+)$", text, re.MULTILINE))
    if not found:
        raise ValueError("nothing")
    return EngineObservation(l1_hit_tokens=int(float(found.get("vllm:prefix_cache_hits_total", 0))))


def half_numbers(self: Good, line: str) -> EngineObservation | None:
    found = re.search(r"KV cache size: ([\d,]+)", line)
    digits = found[1].replace(",", "")[:18] if found else ""
    return EngineObservation(kv_tokens=int(digits)) if digits else None


def unable(why: str = "it cannot") -> Any:
    raise ValueError(why)


def switching(call: Callable[[bool], HttpCall]) -> Callable[..., tuple[HttpCall, ...]]:
    def l3_switch(self: Good, context: EngineContext, *, on: bool) -> tuple[HttpCall, ...]:
        return (call(on),) if context.l3_switch else unable()

    return l3_switch


def backtracking(self: Good, line: str) -> EngineObservation | None:
    re.match(r"^(\s*a*)*: x$", line[:2000])
    return None


def ready(launch: EngineLaunch, **changes: Any) -> Readiness:
    return launch.readiness.model_copy(update=changes)


def dropping_args(self: Good, context: EngineContext) -> EngineLaunch:
    return Good.launch(self, context.model_copy(update={"args": {}}))


def slow(self: Good, text: str) -> EngineObservation:
    end = time.thread_time() + (1.1 if len(text) > 10**6 else 0)
    while time.thread_time() < end:
        pass
    raise ValueError("nothing")


def nervous(self: Good, line: str) -> EngineObservation | None:
    return EngineObservation(fatal=line) if "error" in line else None


MUTANTS: list[tuple[str, type[Good]]] = [
    ("members", with_member(flush=None)),
    ("members", with_member(default_port="8100")),
    ("api-version", with_member(api_version=99)),
    ("name", with_member(name="Ref Engine")),
    ("default-port", with_member(default_port=80)),
    ("versions", with_member(versions="0.13 or newer")),
    ("versions", with_member(versions=">=0.13", package=None)),
    ("launch-answers", with_member(launch=lambda self, context: {"argv": ["x"]})),
    ("launch-answers", with_member(launch=lambda self, context: context.version.split("."))),
    ("launch-answers", launching(lambda launch, context: {"argv": ()})),
    ("launch-pure", launching(read_a_file)),
    ("launch-repeatable", launching(lambda launch, context: {"env": launch.env | {"T": str(time.monotonic_ns())}})),
    ("launch-repeatable", launching(lambda launch, context: {"env": launch.env | {"HOME": os.environ.get("HOME", "")}})),
    ("launch-argv", launching(lambda launch, context: {"argv": ("bash", "-lc", " ".join(launch.argv))})),
    ("launch-argv", launching(lambda launch, context: {"argv": (*launch.argv, "$HOME/model")})),
    ("launch-argv", launching(lambda launch, context: {"argv": (*launch.argv, "")})),
    ("launch-environment", launching(lambda launch, context: {"env": launch.env | {"NOTIFY_SOCKET": "/x"}})),
    ("launch-environment", launching(lambda launch, context: {"env": {}})),
    ("launch-no-secrets", launching(lambda launch, context: {"argv": (*launch.argv, "--api-key", "abc")})),
    ("launch-no-secrets", launching(lambda launch, context: {"argv": (*launch.argv, '{"password": "abc"}')})),
    ("launch-ports", launching(lambda launch, context: {"argv": (context.python, "-m", "x")})),
    ("launch-ports", launching(lambda launch, context: {"extra_ports": {"lookup": 9000}})),
    ("launch-ports", launching(lambda launch, context: {"extra_ports": {"lookup": context.port}})),
    ("launch-ports", launching(lambda launch, context: {"files": (FileSpec(path="/tmp/c", content=str(context.port)),)})),
    ("launch-files", launching(lambda launch, context: {"files": (FileSpec(path="conf.json", content=""),)})),
    ("launch-files", launching(lambda launch, context: {"files": (FileSpec(path="/c", mode="0666", content=""),)})),
    ("launch-readiness", launching(lambda launch, context: {"readiness": Readiness()})),
    (
        "launch-readiness",
        launching(lambda launch, context: {"readiness": ready(launch, deadline_seconds=float("inf"))}),
    ),
    ("launch-ending", launching(lambda launch, context: {"stop": StopPolicy(timeout_seconds=float("inf"))})),
    ("launch-ending", launching(lambda launch, context: {"stop": StopPolicy(signal="TERM")})),
    ("launch-ending", launching(lambda launch, context: {"restart": RestartPolicy(fatal_patterns=("",))})),
    ("launch-remarks", launching(lambda launch, context: {"notes": (Note(code="Bad Code!", message="x"),)})),
    ("launch-unknown-args", with_member(launch=dropping_args)),
    ("launch-unknown-version", with_member(versions=">=0.1")),
    ("observe-hostile", with_member(observe=lambda self, text: {}["x"])),
    ("observe-hostile", with_member(observe=lambda self, text: {"running": 1})),
    ("observe-quick", with_member(observe=slow)),
    ("observe-nothing", with_member(observe=lambda self, text: EngineObservation(running=0))),
    ("observe-reads", with_member(observe=lambda self, text: EngineObservation())),
    ("observe-missing-is-none", with_member(observe=counting_by_absence)),
    ("read-line-hostile", with_member(read_line=lambda self, line: line.split()[0] and None)),
    ("read-line-quick", with_member(read_line=backtracking)),
    ("read-line-half", with_member(read_line=half_numbers)),
    ("read-line-harmless", with_member(read_line=nervous)),
    ("metrics-url", with_member(metrics_url=lambda self, context: f"http://{context.host}:{context.port}/metrics")),
    ("metrics-url", with_member(metrics_url=lambda self, context: "http://127.0.0.1:9090/metrics")),
    ("generation", with_member(generation=lambda self, context: HttpCall(path="v1/completions"))),
    ("generation", with_member(generation=lambda self, context: HttpCall(path="/v1", body={"x": {1, 2}}))),
    ("generated", with_member(generated=lambda self, body: json.loads(body)["choices"][0]["text"])),
    ("generated", with_member(generated=lambda self, body: body.decode(errors="replace"))),
    ("tokens", with_member(tokens=lambda self, body: TierTokens(prompt=json.loads(body).get("prompt")))),
    ("tokens", with_member(tokens=lambda self, body: TierTokens(l1=0))),
    ("flush", with_member(flush=lambda self, context, tiers: ())),
    ("flush", with_member(flush=lambda self, context, tiers: (HttpCall(path="/reset"),))),
    ("flush", with_member(flush=lambda self, context, tiers: {"L1": (HttpCall(path="/x"),)}[min(tiers)])),
    ("launch-files", launching(lambda launch, context: {"files": (FileSpec(path="/c", content="k: <secret>"),)})),
    ("launch-files", launching(lambda launch, context: {"files": (FileSpec(path="/c", mode="600x", content=""),)})),
    ("l3-switch", with_member(l3_switch=lambda self, context, *, on: ())),
    ("l3-switch", with_member(l3_switch=lambda self, context, *, on: (HttpCall(path=f"/l3/{on}"),))),
    ("l3-switch", with_member(l3_switch=lambda self, context, *, on: [HttpCall(path="/l3")] if on else unable())),
    ("l3-switch", with_member(l3_switch=lambda self, context, *, on: unable("") if on else unable())),
    ("l3-switch", with_member(l3_switch=switching(lambda on: HttpCall(path="/l3") if on else unable()))),
    ("l3-switch", with_member(l3_switch=switching(lambda on: HttpCall(path="/l3")))),
    ("l3-switch", with_member(l3_switch=switching(lambda on: HttpCall(path=f"/{on}", bearer_file="/etc/key")))),
    ("l3-switch", with_member(l3_switch=switching(lambda on: HttpCall(path=f"/{on}", bearer_file="key")))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "mutant"), MUTANTS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(MUTANTS)]
)
def test_a_broken_driver_is_caught_by_the_right_check(check: str, mutant: type[Good]) -> None:
    (rule,) = [c for c in CHECKS if c.name == check]
    with pytest.raises(AssertionError) as caught:
        rule.run(Subject(mutant()))
    assert str(caught.value)


def test_every_check_has_a_mutant_and_a_rule_in_words() -> None:
    assert {c.name for c in CHECKS} == {name for name, _ in MUTANTS}
    assert all(c.run.__doc__ for c in CHECKS)
    assert len({c.name for c in CHECKS}) == len(CHECKS)


def test_a_driver_of_an_older_api_conforms_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = (c for c in CHECKS if c.name == "api-version")
    monkeypatch.setattr("kvtierd.testing.launch_checks.API_VERSION", Good.api_version + 1)
    monkeypatch.setattr("kvtierd.plugins.API_VERSION", Good.api_version + 1)
    with pytest.warns(DeprecationWarning, match="a later one will refuse it"):
        check.run(Subject(Good()))


def test_shape_problems_calls_no_method() -> None:
    def explode(*_: object) -> None:
        raise SystemExit("called")

    assert shape_problems(Subject(with_member(launch=explode, observe=explode, flush=explode)())) == []
    assert [p.check for p in shape_problems(Subject(with_member(name="A b")()))] == ["name"]


def test_an_object_that_is_no_driver_is_only_a_list_of_problems() -> None:
    problems = conformance_problems(Subject(object()))  # type: ignore[arg-type]
    assert problems[0].check == "members"


def test_recorded_texts_are_used() -> None:
    own = with_member(
        observe=lambda self, text: EngineObservation(running=int(re.findall(r"own (\d+)", text)[0]))
    )
    (rule,) = [c for c in CHECKS if c.name == "observe-reads"]
    with pytest.raises(AssertionError, match="IndexError"):
        rule.run(Subject(own()))

    def observe(self: Good, text: str) -> EngineObservation:
        found = re.findall(r"^own (\d+)$", text, re.MULTILINE)
        if not found:
            raise ValueError("none")
        return EngineObservation(running=int(found[0]))

    mine = with_member(observe=observe)
    with pytest.raises(AssertionError, match="--kvtierd-plugin-metrics"):
        rule.run(Subject(mine()))
    rule.run(Subject(mine(), metrics=("own 5\n",)))


def test_the_context_is_valid_and_changes() -> None:
    assert engine_context(role="decode").role == "decode"
    with pytest.raises(ValueError, match="no_such_field"):
        engine_context(no_such_field=1)
