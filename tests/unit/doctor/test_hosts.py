"""Every check over every fixture host, against what is recorded; and each check fails on one and passes on another."""

import pytest

from kvtierd.doctor.registry import built_in

from . import hosts

BAD = {"note", "warn", "fail", "unknown"}


@pytest.mark.parametrize("name", hosts.names())
def test_doctor_finds_on_each_host_what_is_recorded(name):
    assert hosts.told(hosts.examined(name)) == hosts.expected(name)


@pytest.mark.parametrize("check", [check.id for check in built_in()])
def test_every_check_has_a_host_where_it_finds_something_and_one_where_all_is_well(check):
    seen = [hosts.expected(name).get(check) for name in hosts.names()]
    severities = {entry[0] for entry in seen if entry is not None}
    assert severities & {"warn", "fail", "note"}, f"no fixture host on which {check} finds anything"
    assert any(e is not None and e[0] == "ok" and "does not apply" not in e[1] for e in seen), (
        f"{check} is well nowhere"
    )
