"""A rule that can be taken out without the simulation noticing is a rule that nothing tests."""

from __future__ import annotations

import pytest

from .mutants import MUTANTS, hunt


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_catches(name):
    elections, how = hunt(name, seed=1)
    assert how, f"{elections} elections and nothing was noticed"
    assert "stuck" not in how
