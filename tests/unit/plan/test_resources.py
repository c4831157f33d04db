"""Which CPUs an engine gets: near its cards, as written, or all."""

import pytest
from plan_lab import configured, engine, host, plan

from kvtierd.plan.inventory import Npu, NumaNode
from kvtierd.plan.model import Resources
from kvtierd.settings import Settings

NODES = (NumaNode(node=0, cpus="0-23,48-71"), NumaNode(node=1, cpus="24-47,72-95"))
IMAGE = {"runner": "docker", "image": "example/engine:1"}


def two_nodes(*cards: int | None):
    npus = tuple(
        Npu(device=i, card=i, name="910B3", health="OK", numa_node=node) for i, node in enumerate(cards)
    )
    return host("a2-2cards", numa_nodes=NODES, npus=npus)


def unit(made):
    return next(u for u in made.units if u.kind == "engine")


@pytest.mark.parametrize(
    ("cards", "cpus"),
    [
        ((0, 0), "0-23,48-71"),
        ((1, 1), "24-47,72-95"),
        ((0, 1), ""),  # all there are
        ((0, None), ""),  # one is not known
        ((7, 7), ""),  # a node without CPUs
    ],
)
def test_auto_is_near_the_cards(cards, cpus):
    made = plan(configured(engine=[engine()]), two_nodes(*cards))
    assert unit(made).resources == Resources(cpus=cpus)


def test_all_and_a_list():
    inventory = two_nodes(0, 0)
    assert unit(plan(configured(engine=[engine(cpus="all")]), inventory)).resources.cpus == ""
    assert unit(plan(configured(engine=[engine(cpus="4,2-3")]), inventory)).resources.cpus == "2-4"
    refused = plan(configured(engine=[engine(cpus="90-99")]), inventory).refusals
    assert [r.code for r in refused] == ["engine.no-cpu"]
    assert "CPU 96 does not exist on this host (it has 0-95)" in refused[0].message
    assert plan(configured(engine=[engine(cpus="90-99")]), host("a2-2cards", numa_nodes=())).refusals == ()


def test_what_is_no_list_is_refused_with_the_settings():
    with pytest.raises(ValueError, match="not a list of CPUs"):
        configured(engine=[engine(cpus="near")])


def test_a_container_gets_them_by_docker_s_options():
    made = plan(configured(engine=[engine(cpus="0-3", memory_max="64GiB", nice=5, **IMAGE)]), two_nodes(0, 0))
    assert unit(made).resources == Resources()
    assert "--cpuset-cpus=0-3" in unit(made).argv
    assert f"--memory={64 << 30}b" in unit(made).argv


def test_resources_are_part_of_what_a_running_unit_is_compared_by():
    def digest(**fields):
        settings: Settings = configured(engine=[engine(**fields)])
        return unit(plan(settings, two_nodes(0, 1))).digest

    assert len({digest(), digest(nice=1), digest(memory_max="1GiB"), digest(cpus="0-3")}) == 4
    assert digest(cpus="all") == digest(), "no resources are no change"
