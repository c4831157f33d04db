from pathlib import Path

import pytest

from kvtierd.errors import UnitError
from kvtierd.plan.model import UnitSpec
from kvtierd.units.systemd_backend import SystemdBackend


async def test_a_unit_that_may_print_a_secret_is_not_started_into_the_journal(tmp_path: Path) -> None:
    """Before anything is asked of systemd: there is none here."""
    spec = UnitSpec(
        id="kvtier-engine-a",
        kind="engine",
        name="a",
        argv=("engine",),
        secret_files=("/var/lib/kvtierd/key",),
    )
    with pytest.raises(UnitError) as caught:
        await SystemdBackend(tmp_path).start(spec)
    assert caught.value.stable_code == "unit.secret"
    assert "l3_switch" in caught.value.hint
