"""Mode etcd over real etcds: a part of ``make test-cluster``. What needs none is with the cluster's unit tests, and so is
the suite that all ways of naming a master have to pass."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "cluster"))
sys.path.insert(0, str(Path(__file__).parent))

from etcd_drivers import EtcdDriver
from etcd_lab import found

VERSIONS = found() or {"none": None}


@pytest.fixture(params=VERSIONS, ids=lambda version: f"etcd-{version}")
def program(request):
    """Each version that is here, one after another."""
    if VERSIONS[request.param] is None:
        pytest.skip("no etcd on this machine: python tests/etcd/etcd_lab.py gets Debian's")
    return VERSIONS[request.param]


@pytest.fixture
async def one(program):
    """Nodes with an etcd of one member."""
    made = EtcdDriver(program)
    yield made
    await made.close()


@pytest.fixture
async def three(program):
    """Nodes with an etcd of three members."""
    made = EtcdDriver(program, members=3)
    yield made
    await made.close()
