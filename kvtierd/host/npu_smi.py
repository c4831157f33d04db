"""Reads what ``npu-smi`` prints. Pure: text in, values out, never an exception on odd text.

The layout differs by chip and release (910B, two dies on A3 with ``Phy-ID``, 310P with ``Device``, 950PR
without a chip column, wider tables since 26.x), so values are found by the names in the header rows, not by
their columns. What is not there is ``None``. "MB" in these tables is 1024 * 1024 bytes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from kvtierd.plan.inventory import Npu, NpuProcess, Record
from kvtierd.quantities import MIB

MAX_LINES = 10_000
MAX_NPUS = 1024
MAX_PROCESSES = 10_000

_HEADER_WORDS = {
    "npu", "npuid", "name", "chip", "chipid", "phyid", "device", "health", "busid", "aicore", "power", "temp",
    "hugepagesusage", "memoryusage", "hbmusage",
    "processid", "processname", "processmemory", "processidincontainer",
}  # fmt: skip
_BUS_ID = re.compile(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")


class NpuReport(Record):
    """What one ``npu-smi info`` said. ``problems`` are sentences for an operator."""

    version: str | None = None
    npus: tuple[Npu, ...] = ()
    processes: tuple[NpuProcess, ...] = ()
    problems: tuple[str, ...] = ()


class ChipMapping(Record):
    """One row of ``npu-smi info -m``: the logic id is what ASCEND_RT_VISIBLE_DEVICES counts."""

    card: int
    chip: int
    logic_id: int | None = None
    phy_id: int | None = None
    name: str = ""


def parse_info(text: str) -> NpuReport:
    """The tables of ``npu-smi info``.

    ``Npu.device`` is the ``Phy-ID`` or ``Device`` column where there is one, else the position in the table
    (card numbers may have gaps); ``apply_mapping`` puts in the driver's own numbers.
    """
    lines = text.splitlines()
    problems = []
    if len(lines) > MAX_LINES:
        problems.append(f"npu-smi printed {len(lines)} lines; only the first {MAX_LINES} were read")
        lines = lines[:MAX_LINES]
    version = None
    headers: list[list[list[str]]] = []
    table = ""  # "npu", "process" or "" (none yet, or one we do not know)
    in_header = False
    npu_records: list[dict[str, str]] = []
    processes: list[NpuProcess] = []
    position = 0  # row within the current record
    for line in lines:
        stripped = line.strip()
        if stripped.startswith("+"):
            if stripped.startswith("+="):
                in_header = False
            position = 0
            continue
        if not stripped.startswith("|"):
            continue
        cells = [cell.strip() for cell in stripped.strip("|").split("|")]
        if match := re.search(r"npu-smi\s+(\S+)", cells[0]):
            version = match[1]
            continue
        names = [_header_names(cell) for cell in cells]
        known = {name for cell in names for name in cell if name in _HEADER_WORDS}
        if known >= {"npu", "health"} or known >= {"npuid", "health"}:
            table, headers, in_header, position = "npu", [names], True, 0
        elif "processid" in known:
            table, headers, in_header, position = "process", [names], True, 0
        elif in_header:
            headers.append(names)
        elif table == "npu":
            row = position % len(headers)
            if row == 0:
                if len(npu_records) >= MAX_NPUS:
                    problems.append(f"npu-smi lists more than {MAX_NPUS} dies; the rest was not read")
                    break
                npu_records.append({})
            position += 1
            if npu_records:
                npu_records[-1].update(_row_values(headers[row], cells))
        elif table == "process" and len(processes) < MAX_PROCESSES:
            process = _process(_row_values(headers[0], cells))
            if process is not None:
                processes.append(process)
    npus = _npus(npu_records, problems)
    if not npus and not problems:
        problems.append(f"npu-smi printed no table of NPUs: {_first_words(text)}")
    return NpuReport(version=version, npus=npus, processes=tuple(processes), problems=tuple(problems))


def parse_mapping(text: str) -> tuple[ChipMapping, ...]:
    """``npu-smi info -m``: which card and chip is which logic id. Rows of management chips (Mcu) are left out."""
    header: list[str] = []
    rows: list[ChipMapping] = []
    for line in text.splitlines()[:MAX_LINES]:
        fields = re.split(r"\s{2,}|\t+", line.strip())
        names = [_fold(field) for field in fields]
        if "npuid" in names:
            header = names
            continue
        values = dict(zip(header, fields, strict=False))
        name = values.get("chipname", "")
        card = _integer(values.get("npuid", values.get("slotid")))
        if card is None or name.lower() == "mcu" or len(rows) >= MAX_NPUS:
            continue
        logic_id = _integer(values.get("chiplogicid"))
        phy_id = _integer(values.get("chipphyid"))
        if logic_id is None and phy_id is None:
            continue
        chip = _integer(values.get("chipid")) or 0
        rows.append(ChipMapping(card=card, chip=chip, logic_id=logic_id, phy_id=phy_id, name=name))
    return tuple(rows)


def parse_list(text: str) -> tuple[int, ...]:
    """``npu-smi info -l``: the card numbers, in the order printed. The last resort: it has nothing else."""
    found = re.findall(r"^\s*NPU ID\s*:\s*(\d{1,6})\s*$", text, flags=re.MULTILINE)
    return tuple(dict.fromkeys(int(card) for card in found[:MAX_NPUS]))


def apply_mapping(npus: Iterable[Npu], mapping: Iterable[ChipMapping]) -> tuple[Npu, ...]:
    """The dies with the driver's logic ids where the mapping has them; all or none, so that no id comes twice."""
    dies = tuple(npus)
    logic_ids = {(row.card, row.chip): row.logic_id for row in mapping if row.logic_id is not None}
    wanted = [logic_ids.get((npu.card, npu.chip)) for npu in dies]
    if None in wanted or len(set(wanted)) != len(dies):
        return dies
    return tuple(npu.model_copy(update={"device": device}) for npu, device in zip(dies, wanted, strict=True))


def from_mapping(mapping: Iterable[ChipMapping]) -> tuple[Npu, ...]:
    """Dies from ``-m`` alone, when the main table could not be had: no health, no memory."""
    return tuple(
        Npu(
            device=next(number for number in (row.logic_id, row.phy_id, index) if number is not None),
            card=row.card,
            chip=row.chip,
            name=row.name.replace(" ", ""),
        )
        for index, row in enumerate(mapping)
    )


def _fold(text: str) -> str:
    """``HBM-Usage(MB)`` -> ``hbmusage``, ``Phy-ID`` -> ``phyid``: units, case and punctuation do not matter."""
    return re.sub(r"[^a-z]", "", re.sub(r"\(.*?\)", "", text.lower()))


def _header_names(cell: str) -> list[str]:
    """The header names in one cell. Names are set apart by two blanks or more; narrow tables use one."""
    names = []
    for part in re.split(r"\s{2,}", cell):
        if not part:
            continue
        whole = _fold(part)
        if whole in _HEADER_WORDS or " " not in part:
            names.append(whole)
        else:
            names.extend(_fold(word) for word in part.split(" "))
    return names


def _row_values(headers: list[list[str]], cells: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for names, cell in zip(headers, cells, strict=False):
        if not names:
            continue
        # "63503/ 65536" and "0    / 0" are one value each.
        words = re.sub(r"\s*/\s*", "/", cell).split()
        if len(words) > len(names):  # the last name takes the rest: chip and process names may hold blanks
            words = [*words[: len(names) - 1], " ".join(words[len(names) - 1 :])]
        if len(words) == len(names):
            values.update(zip(names, words, strict=True))
            continue
        # A value is missing: usages can be told by their slash, the others come in order.
        usages = [word for word in words if "/" in word]
        usage_names = [name for name in names if name.endswith("usage")]
        if usages:
            values.update(zip(usage_names[-len(usages) :], usages, strict=False))
        plain_names = [name for name in names if not name.endswith("usage")]
        values.update(zip(plain_names, (word for word in words if "/" not in word), strict=False))
    return values


def _npus(records: list[dict[str, str]], problems: list[str]) -> tuple[Npu, ...]:
    npus: list[Npu] = []
    chips_of_card: dict[int, int] = {}
    for record in records:
        card = _integer(record.get("npu", record.get("npuid")))
        if card is None:
            problems.append(f"npu-smi has a row without an NPU number: {' '.join(record.values())[:80]!r}")
            continue
        chip = _integer(record.get("chip", record.get("chipid")))
        if chip is None:
            chip = chips_of_card.get(card, 0)
        chips_of_card[card] = chip + 1
        used, total = _usage(record.get("hbmusage"))
        bus_id = record.get("busid", "")
        npus.append(
            Npu(
                device=_first(record, "phyid", "device", default=len(npus)),
                card=card,
                chip=chip,
                name=record.get("name", ""),
                health=_known(record.get("health")),
                bus_id=bus_id.upper() if _BUS_ID.fullmatch(bus_id) else None,
                hbm_total_bytes=total,
                hbm_used_bytes=used if total is not None else None,
            )
        )
    devices = [npu.device for npu in npus]
    if len(set(devices)) != len(devices):  # 310P numbers its devices per card on some releases
        npus = [npu.model_copy(update={"device": index}) for index, npu in enumerate(npus)]
    return tuple(npus)


def _process(values: dict[str, str]) -> NpuProcess | None:
    card = _integer(values.get("npu", values.get("npuid")))
    pid = _integer(values.get("processid"))
    if card is None or pid is None:  # "No running processes found in NPU 0"
        return None
    memory_mb = _integer(values.get("processmemory"))
    return NpuProcess(
        card=card,
        chip=_integer(values.get("chip", values.get("chipid"))) or 0,
        pid=pid,
        name=values.get("processname", ""),
        memory_bytes=None if memory_mb is None else memory_mb * MIB,
        pid_in_container=_integer(values.get("processidincontainer")),
    )


def _usage(text: str | None) -> tuple[int | None, int | None]:
    """``3401/65536`` in MB as bytes (used, total). A total of 0 means that the chip has none of this memory."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text or "")
    if not match or int(match[2]) == 0:
        return None, None
    return int(match[1]) * MIB, int(match[2]) * MIB


def _first(record: dict[str, str], *names: str, default: int) -> int:
    numbers = (_integer(record.get(name)) for name in names)
    return next((number for number in numbers if number is not None), default)


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None


def _known(text: str | None) -> str | None:
    return None if text is None or text.upper() in ("NA", "N/A", "-", "") else text


def _first_words(text: str) -> str:
    words = " ".join(itertools.chain.from_iterable(line.split() for line in text.splitlines()[:20]))
    return repr(words[:160]) if words else "nothing at all"
