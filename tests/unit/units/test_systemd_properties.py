from __future__ import annotations

import pytest

from kvtierd.errors import UnitError
from kvtierd.plan.model import Resources, StopPolicy, UnitSpec
from kvtierd.units import systemd_properties as sp

MARKER = sp.Marker("/run/kvtierd", "0123456789abcdef", "aa00")


def spec(**changes: object) -> UnitSpec:
    fields = {"id": "kvtier-engine-a", "kind": "engine", "name": "a", "argv": ("/bin/x", "1")}
    return UnitSpec.model_validate(fields | changes)


def properties(unit: UnitSpec, **options: object) -> dict[str, object]:
    given = sp.transient_properties(unit, MARKER, "/bin/x", stop_signal=15, **options)
    assert len(given) == len({name for name, _ in given})
    return {name: variant.value for name, variant in given}


def test_a_unit_is_a_service_of_its_own_that_systemd_never_restarts():
    found = properties(spec(stop=StopPolicy(timeout_seconds=1.5)))
    assert (found["Slice"], found["Type"], found["Restart"]) == ("kvtierd.slice", "exec", "no")
    assert (found["KillMode"], found["KillSignal"], found["TimeoutStopUSec"]) == ("mixed", 15, 1_500_000)
    assert (found["LimitMEMLOCK"], found["LimitMEMLOCKSoft"], found["UMask"]) == (2**64 - 1, 2**64 - 1, 0o022)
    assert (found["SyslogIdentifier"], found["StandardOutput"]) == ("kvtier-engine-a", "journal")
    assert not {"PartOf", "BindsTo", "Requires", "User"} & found.keys()
    assert properties(spec(user="vllm"))["User"] == "vllm"


def test_systemd_expands_nothing_in_arguments():
    found = properties(spec(argv=("x", "$HOME", "${A}$B", "%n")))
    assert found["ExecStart"] == [["/bin/x", ["x", "$$HOME", "$${A}$$B", "%n"], False]]


def test_the_environment_is_the_given_one_and_what_systemd_adds_is_taken_out():
    found = properties(spec(env={"PATH": "/bin", "A": "a=b"}), manager_variables=["LEAK", "A"])
    assert found["Environment"] == ["PATH=/bin", "A=a=b"]
    assert {"LEAK", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "INVOCATION_ID"} <= set(
        found["UnsetEnvironment"]
    )
    assert not {"PATH", "A"} & set(found["UnsetEnvironment"])


def test_at_shutdown_engines_stop_before_what_they_need():
    assert "After" not in properties(spec(after=("kvtier-meta-main",))), (
        "it would keep the other loaded for ever"
    )


@pytest.mark.parametrize("owner", ["/run/kvtierd", "/tmp/a b/(spec x, start 1)/run"])
def test_a_marker_is_read_back(owner):
    marker = sp.Marker(owner, "0123456789abcdef", "aa00")
    assert sp.read_marker(marker.text()) == marker
    loaded = {"LoadState": "loaded", "Slice": "kvtierd.slice", "Description": marker.text()}
    assert sp.marker_of(loaded, owner) == marker
    assert sp.marker_of(loaded, "/run/other") is None
    assert sp.marker_of(loaded | {"Slice": "system.slice"}, owner) is None
    assert sp.marker_of(loaded | {"LoadState": "bad-setting"}, owner) == marker
    assert sp.marker_of(loaded | {"LoadState": "not-found"}, owner) is None


@pytest.mark.parametrize(
    "description", ["", "nginx", "kvtierd unit of x", "kvtierd unit of /r (spec a, start g)"]
)
def test_what_is_not_ours_has_no_marker(description):
    assert sp.read_marker(description) is None


def test_names_and_paths():
    assert sp.service_name("kvtier-engine-a") == "kvtier-engine-a.service"
    for bad in ("../x", "", "a/b", "-a", "x" * 200, "a\n"):
        with pytest.raises(UnitError) as caught:
            sp.service_name(bad)
        assert caught.value.stable_code == "unit.unknown"
    path = "/org/freedesktop/systemd1/unit/"
    assert sp.object_path("kvtier-a_1.service") == path + "kvtier_2da_5f1_2eservice"
    assert sp.object_path("1a") == path + "_31a"


def test_ends():
    known = {"ExecMainCode": 1, "ExecMainStatus": 3, "ExecMainExitTimestamp": 2_000_000}
    exited = sp.exit_of(known, now=9.0, requested=False)
    assert (exited.code, exited.signal, exited.at_unix_seconds) == (3, None, 2.0)
    killed = sp.exit_of({"ExecMainCode": 2, "ExecMainStatus": 9}, now=9.0, requested=True)
    assert (killed.code, killed.signal, killed.at_unix_seconds, killed.requested) == (None, 9, 9.0, True)
    dumped = sp.exit_of({"ExecMainCode": 3, "ExecMainStatus": 11}, now=9.0, requested=False)
    assert dumped.signal == 11
    unknown = sp.exit_of({}, now=9.0, requested=False)
    assert (unknown.code, unknown.signal) == (None, None)


@pytest.mark.parametrize(
    ("state", "sub", "ended"),
    [
        ("active", "running", False), ("activating", "start", False), ("deactivating", "stop-sigterm", False),
        ("active", "exited", True), ("failed", "failed", True), ("inactive", "dead", True),
    ],
)  # fmt: skip
def test_a_unit_has_ended_when_systemd_waits_for_nothing(state, sub, ended):
    assert sp.has_ended({"ActiveState": state, "SubState": sub}) is ended


def test_only_what_systemd_could_not_set_up_is_a_problem_of_the_start():
    assert sp.setup_problem({"ExecMainCode": 1, "ExecMainStatus": 203}) == (
        "the program cannot be executed",
        True,
    )
    assert sp.setup_problem({"ExecMainCode": 1, "ExecMainStatus": 219})[1] is False
    assert sp.setup_problem({"ExecMainCode": 1, "ExecMainStatus": 3}) is None
    assert sp.setup_problem({"ExecMainCode": 2, "ExecMainStatus": 203}) is None


def test_resources_are_given_only_where_there_are_any():
    assert not {"CPUAffinity", "Nice", "MemoryMax"} & properties(spec()).keys()
    found = properties(spec(resources=Resources(cpus="0-2,9", nice=-5, memory_max_bytes=1 << 30)))
    assert (found["CPUAffinity"], found["Nice"], found["MemoryMax"]) == (b"\x07\x02", -5, 1 << 30)


@pytest.mark.parametrize(("used", "note"), [(5 << 20, ""), (sp.UNLIMITED, "memory_max is not enforced")])
def test_a_memory_limit_without_a_controller_is_said(used: int, note: str):
    seen = {"MemoryMax": 1 << 30, "MemoryCurrent": used, "MainPID": 7, "InvocationID": b"i"}
    assert sp.process_of("kvtier-engine-a", seen, MARKER).note.startswith(note)
    assert sp.process_of("kvtier-engine-a", seen | {"MemoryMax": sp.UNLIMITED}, MARKER).note == ""
