from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.host import npu_smi
from kvtierd.host.npu_smi import NpuProcess
from kvtierd.plan.inventory import Npu
from kvtierd.quantities import MIB

from .tree import FIXTURES


def table(name: str) -> str:
    return (FIXTURES / "host" / "npu-smi" / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "version", "dies", "cards", "chip_name", "hbm_mib"),
    [
        ("a2-910b3", "24.1.0", 8, 8, "910B3", 65536),
        ("a3-phy-id", "25.2.1", 16, 8, "Ascend910", 65536),
        ("a3-wide-26", "26.0.rc2", 16, 8, "Ascend910", 65536),
        ("310p", "24.1.rc2", 4, 2, "310P3", None),
        ("300i-duo", "25.0.rc1.1", 2, 1, "310P3", None),
        ("950pr", "26.0.rc2", 8, 8, "Ascend950PR", 131072),
        ("910prob", "23.0.3", 1, 1, "910ProB", 32768),
    ],
)
def test_layouts(name: str, version: str, dies: int, cards: int, chip_name: str, hbm_mib: int | None) -> None:
    report = npu_smi.parse_info(table(name))
    assert report.problems == ()
    assert report.version == version
    assert [npu.device for npu in report.npus] == list(range(dies))
    assert len({npu.card for npu in report.npus}) == cards
    assert {npu.name for npu in report.npus} == {chip_name}
    assert {npu.hbm_total_bytes for npu in report.npus} == {None if hbm_mib is None else hbm_mib * MIB}


def test_an_a2_die_in_full() -> None:
    assert npu_smi.parse_info(table("a2-910b3")).npus[1] == Npu(
        device=1, card=1, chip=0, name="910B3", health="OK", bus_id="0000:C2:00.0",
        hbm_total_bytes=65536 * MIB, hbm_used_bytes=3402 * MIB,
    )  # fmt: skip


def test_a3_second_die_and_a_usage_without_a_blank() -> None:
    die = npu_smi.parse_info(table("a3-phy-id")).npus[3]
    assert (die.device, die.card, die.chip, die.bus_id) == (3, 1, 1, "0000:9B:00.0")
    assert die.hbm_used_bytes == 63503 * MIB


def test_a_bus_that_is_not_known_and_an_alarm() -> None:
    die = npu_smi.parse_info(table("300i-duo")).npus[1]
    assert (die.bus_id, die.health) == (None, "Alarm")


def test_processes() -> None:
    report = npu_smi.parse_info(table("a2-910b3"))
    assert [(p.card, p.pid, p.name) for p in report.processes] == [
        (0, 48213, "VLLMWorker_TP0"),
        (1, 48214, "VLLMWorker_TP1"),
    ]
    wide = npu_smi.parse_info(table("a3-wide-26")).processes
    assert wide[1] == NpuProcess(
        card=0, chip=1, pid=692318, name="python3", memory_bytes=12417 * MIB, pid_in_container=311
    )
    assert wide[0].pid_in_container is None
    assert npu_smi.parse_info(table("950pr")).processes[0].pid == 71123


def test_a_driver_that_fails_is_quoted() -> None:
    report = npu_smi.parse_info(table("driver-fault"))
    assert report.npus == ()
    assert "ret is -8020" in report.problems[0]
    assert "nothing at all" in npu_smi.parse_info("").problems[0]


def test_a_table_cut_in_the_middle_keeps_what_there_is() -> None:
    lines = table("a2-910b3").splitlines()
    report = npu_smi.parse_info("\n".join(lines[:7]))  # first row of the first NPU only
    assert report.npus == (Npu(device=0, card=0, name="910B3", health="OK"),)


def test_a_missing_value_does_not_shift_the_others() -> None:
    text = table("a2-910b3").replace(
        "0           0    / 0          3401 / 65536", "            0    / 0          3401 / 65536"
    )
    assert npu_smi.parse_info(text).npus[0].hbm_total_bytes == 65536 * MIB


def test_narrow_headers_and_names_with_blanks() -> None:
    text = (
        "| NPU Name | Health | Power(W) Temp(C) |\n| Chip Phy-ID | Bus-Id | AICore(%) HBM-Usage(MB) |\n+====+\n"
        "| 3 Ascend 910B4 | OK | 80.1 40 |\n| 0 7 | 0000:c1:00.0 | 0 10/ 32768 |\n"
    )
    (die,) = npu_smi.parse_info(text).npus
    assert (die.card, die.device, die.name, die.bus_id) == (3, 7, "Ascend 910B4", "0000:C1:00.0")
    assert die.hbm_total_bytes == 32768 * MIB


def test_device_numbers_that_start_anew_on_each_card_are_not_used() -> None:
    rows = "".join(f"| {card} 310P3 | OK |\n| {chip} {chip} | NA |\n" for card in (2, 4) for chip in (0, 1))
    report = npu_smi.parse_info("| NPU  Name | Health |\n| Chip  Device | Bus-Id |\n+===+\n" + rows)
    assert [(npu.card, npu.chip, npu.device) for npu in report.npus] == [
        (2, 0, 0),
        (2, 1, 1),
        (4, 0, 2),
        (4, 1, 3),
    ]


def test_mapping_gives_the_drivers_own_numbers() -> None:
    mapping = npu_smi.parse_mapping(table("mapping-910b"))
    assert [(row.card, row.logic_id) for row in mapping] == [(1, 0), (2, 1), (5, 2), (7, 3)]
    dies = tuple(Npu(device=index, card=card) for index, card in enumerate((7, 5, 2, 1)))
    assert [npu.device for npu in npu_smi.apply_mapping(dies, mapping)] == [3, 2, 1, 0]
    # One that is not in the mapping: all keep their numbers, so that none comes twice.
    strangers = (*dies, Npu(device=4, card=9))
    assert npu_smi.apply_mapping(strangers, mapping) == strangers
    assert npu_smi.from_mapping(mapping)[2] == Npu(device=2, card=5, name="Ascend910B4")


def test_mapping_of_950_has_other_columns() -> None:
    rows = npu_smi.parse_mapping(table("mapping-950"))
    assert [(row.card, row.chip, row.logic_id, row.phy_id) for row in rows] == [(0, 0, 0, 0), (1, 0, 1, 1)]


def test_list() -> None:
    assert npu_smi.parse_list(table("list")) == (3, 5)
    assert npu_smi.parse_list("nonsense") == ()


def test_a_flood_is_bounded() -> None:
    head = "| NPU Name | Health |\n+===+\n"
    report = npu_smi.parse_info(head + "| 1 910B3 | OK |\n" * 5000)
    assert len(report.npus) == npu_smi.MAX_NPUS
    assert "more than" in report.problems[0]
    assert "only the first" in npu_smi.parse_info("\n" * 20_000).problems[0]


@given(st.text(alphabet="|+=- /0123456789NPUChipNameHealthBus\n:.", max_size=400))
def test_garbage_never_raises(text: str) -> None:
    npu_smi.parse_info(text)
    npu_smi.parse_info("| NPU Name | Health |\n| Chip | Bus-Id |\n+==+\n" + text)
    npu_smi.parse_mapping("NPU ID  Chip ID  Chip Logic ID\n" + text)
    npu_smi.parse_list(text)


@given(st.data())
def test_damaged_tables_never_raise_or_repeat_a_device(data: st.DataObject) -> None:
    text = table(data.draw(st.sampled_from(["a2-910b3", "a3-wide-26", "950pr", "310p"])))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 300)))
    report = npu_smi.parse_info(text[:start] + data.draw(st.text(max_size=5)) + text[end:])
    devices = [npu.device for npu in report.npus]
    assert len(set(devices)) == len(devices)
