"""SGLang's hierarchical cache: what its flags mean for L2 and L3, and what cannot be seen without them.

Sources: SGLang's arguments (0.5.23), the README of its npu_memcache storage, and the issues that a check names.
"""

from __future__ import annotations

import re
from typing import Final

from kvtierd.checks import Outcome, Patient, absent, fail, note, warn, worst
from kvtierd.doctor.engine_lines import EngineLine, engine_lines
from kvtierd.doctor.groups.engine import version_of
from kvtierd.doctor.groups.engine_processes import GROUP
from kvtierd.errors import ConfError
from kvtierd.mmc_conf.sglang_check import check_sglang_storage
from kvtierd.mmc_conf.versions import KNOWN_VERSIONS
from kvtierd.plan.series import detect_series
from kvtierd.quantities import GIB, format_size

__all__ = ["GROUP"]

GB: Final = 1000**3
RESERVE_BYTES: Final = 10 * GIB  # what SGLang keeps back of the host's memory
_EXTRA: Final = "hicache-storage-backend-extra-config"


async def _lines(patient: Patient) -> list[EngineLine]:
    return [line for line in await engine_lines(patient) if line.kind == "sglang"]


@GROUP.check(
    "sglang-report",
    title="SGLang says what its cache does",
    why="Without --enable-metrics there is no hit rate, without --enable-cache-report no cached_tokens in an answer: a cache that"
    " works looks like one that does not.",
    fix="--enable-metrics --enable-cache-report; requests add return_cached_tokens_details: true to see the tiers",
)
async def sglang_report(patient: Patient) -> Outcome:
    """The two flags."""
    lines = await _lines(patient)
    if not lines:
        return absent("no SGLang")
    found = []
    for line in lines:
        missing = [
            f"--{flag}" for flag in ("enable-metrics", "enable-cache-report") if flag not in line.flags
        ]
        if missing:
            found.append(note(f"{line.who}: without {' and '.join(missing)}"))
    return worst(found, "metrics and cache report are on")


@GROUP.check(
    "sglang-storage",
    title="SGLang's L3 can be reached",
    why="L3 hangs on L2 (--enable-hierarchical-cache). Its options are strict JSON with typed values: a number in quotes, or a"
    " comment as in the upstream sample, ends the start.",
    fix='write the engine under [[engine]] plugin = "sglang": kvtierd renders the JSON from checked values',
)
async def sglang_storage(patient: Patient) -> Outcome:
    """--hicache-storage-backend with what it needs, and its JSON."""
    lines = [line for line in await _lines(patient) if "hicache-storage-backend" in line.flags]
    if not lines:
        return absent("no SGLang with an L3")
    a3 = detect_series((await patient.inventory()).npus).series == "A3"
    found: list[Outcome] = []
    for line in lines:
        backend = line.flags["hicache-storage-backend"]
        if "enable-hierarchical-cache" not in line.flags:
            found.append(fail(f"{line.who}: {backend} without --enable-hierarchical-cache"))
        if backend == "ascend_memcache":
            version = version_of(line.versions.get("sglang"))
            if version is None or version >= (0, 5, 23):
                found.append(warn(f"{line.who}: ascend_memcache is called npu_memcache from 0.5.23 on"))
        if not line.uses_memcache:
            continue
        text = line.flags.get(_EXTRA)
        if text is None:
            found.append(warn(f"{line.who}: no --{_EXTRA}: MemCache then looks at 127.0.0.1:5000 with 1 GB"))
            continue
        found += _json(line, text, a3=a3)
        if line.flags.get("hicache-io-backend") != "kernel_ascend" and not _cpu(line):
            found.append(warn(f"{line.who}: --hicache-io-backend is not kernel_ascend"))
    return worst(found, "; ".join(f"{line.who}: {line.flags['hicache-storage-backend']}" for line in lines))


def _json(line: EngineLine, text: str, *, a3: bool) -> list[Outcome]:
    newest = KNOWN_VERSIONS[-1]
    try:
        problems = check_sglang_storage(
            text.encode(), line.memcache or newest, a3=a3, assume_version=str(newest)
        )
    except ConfError as error:
        return [warn(f"{line.who}: {error.message}")]
    return [(fail if p.severity == "error" else warn)(f"{line.who}: {p.message}", p.hint) for p in problems]


def _cpu(line: EngineLine) -> bool:
    return line.flags.get("device") == "cpu"


@GROUP.check(
    "sglang-policy",
    title="SGLang writes to L3 at once, and waits for what it reads",
    why="write_back puts into L3 only what falls out of L2, and a flush loses the rest; write_through_selective wants a second hit"
    " first. Prefetch policy best_effort starts computing when L3 is not quick enough: hits come and go. DeepSeek V4 needs"
    " the layout page_first_direct.",
    fix="--hicache-write-policy write_through --hicache-storage-prefetch-policy wait_complete",
)
async def sglang_policy(patient: Patient) -> Outcome:
    """--hicache-write-policy, --hicache-storage-prefetch-policy, --hicache-mem-layout."""
    lines = [line for line in await _lines(patient) if "hicache-storage-backend" in line.flags]
    if not lines:
        return absent("no SGLang with an L3")
    found: list[Outcome] = []
    for line in lines:
        write = line.flags.get("hicache-write-policy", "write_through")
        prefetch = line.flags.get("hicache-storage-prefetch-policy", "best_effort")
        layout = line.flags.get("hicache-mem-layout", "")
        if write == "write_back":
            found.append(
                warn(f"{line.who}: write_back (issue 37172: a flush loses what was not written yet)")
            )
        elif write == "write_through_selective":
            found.append(note(f"{line.who}: write_through_selective: a prefix is written at its second hit"))
        if prefetch == "best_effort":
            found.append(note(f"{line.who}: prefetch policy best_effort: a slow lookup counts as a miss"))
        v4 = re.search(r"deepseek[-_. ]?v4", line.model, flags=re.IGNORECASE)
        if v4 and layout != "page_first_direct":
            found.append(fail(f"{line.who}: DeepSeek V4 needs --hicache-mem-layout page_first_direct"))
    return worst(found, "write_through, wait_complete")


@GROUP.check(
    "hicache-size",
    title="SGLang's L2 fits into the host",
    why="--hicache-size is for each rank, in GB of 10^9 bytes: 8 ranks with 150 pin 1.2 TB. Each rank compares only its own share"
    ' with the free memory, and SGLang keeps 10 GiB back: "Requesting 40.00 GB but only have 44.87 GB free" means that.',
    fix='l2 = "320GiB" in [[engine]] is for the whole engine: kvtierd divides it',
)
async def hicache_size(patient: Patient) -> Outcome:
    """size x ranks (x 2 for hybrid models before 0.5.23) + the plan's pool + 10 GiB against the host's memory."""
    lines = [line for line in await _lines(patient) if "enable-hierarchical-cache" in line.flags]
    if not lines:
        return absent("no SGLang with an L2")
    inventory = await patient.inventory()
    plan = await patient.plan() if patient.settings else None
    pool = plan.pool.capacity_bytes if plan else 0
    found: list[Outcome] = []
    told = []
    for line in lines:
        size = line.number("hicache-size", 0)
        if not size:
            ratio = line.flags.get("hicache-ratio", "2")
            found.append(
                note(f"{line.who}: no --hicache-size: L2 becomes {ratio} times L1, whatever is free")
            )
            continue
        ranks = line.number("tensor-parallel-size", 1) * line.number("pipeline-parallel-size", 1)
        if "enable-dp-attention" not in line.flags:
            ranks *= line.number("data-parallel-size", 1)
        ranks = -(-ranks // line.number("nnodes", 1))
        version = version_of(line.versions.get("sglang"))
        copies = 2 if line.hybrid and (version is None or version < (0, 5, 23)) else 1
        taken = size * GB * ranks * copies
        text = f"{line.who}: {size} GB x {ranks} ranks{' x 2 pools' if copies == 2 else ''} = {format_size(taken)}"
        if pool:
            text += f", the pool {format_size(pool)}"
        told.append(text)
        needed = taken + pool + RESERVE_BYTES
        if needed > inventory.memory_total_bytes:
            found.append(fail(f"{text}; the host has {format_size(inventory.memory_total_bytes)}"))
        elif line.source == "given" and needed > inventory.memory_available_bytes:
            found.append(warn(f"{text}; {format_size(inventory.memory_available_bytes)} are available"))
    return worst(found, "; ".join(told))
