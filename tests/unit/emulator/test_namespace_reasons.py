from __future__ import annotations

import errno

import pytest

from kvtierd.emulator.namespace import explain


@pytest.mark.parametrize(
    ("number", "root", "sysctls", "expected"),
    [
        (
            errno.EPERM,
            False,
            {"kernel/unprivileged_userns_clone": "0"},
            "kernel.unprivileged_userns_clone = 0",
        ),
        (errno.EACCES, False, {"kernel/apparmor_restrict_unprivileged_userns": "1"}, "AppArmor"),
        (errno.ENOSPC, False, {}, "max_user_namespaces"),
        (errno.EPERM, False, {"user/max_user_namespaces": "0"}, "max_user_namespaces"),
        (errno.EPERM, True, {"kernel/unprivileged_userns_clone": "0"}, "container"),
        (errno.EPERM, False, {"user/max_user_namespaces": "1000"}, "container"),
    ],
)
def test_the_reason_is_named(number: int, root: bool, sysctls: dict[str, str], expected: str) -> None:
    why, hint = explain(number, sysctls.get, root=root)
    assert expected in why
    assert hint


def test_an_unrelated_error_gets_no_made_up_reason() -> None:
    assert explain(errno.ENOENT, {}.get, root=True) == ("", "")
