"""How many ranks an engine has here, and what the host's L2 budget is for each.

SGLang's ``--hicache-size`` is in GB of 10^9 bytes, a whole number, and for each rank: eight ranks with 150 pin 1.2 TB.
It keeps 10 GiB of the host's memory back for itself. DeepSeek-V4 refuses the flag and takes ``--hicache-ratio`` only.
Releases before 0.5.23 sized every pool of a hybrid model with the whole figure (twice the memory); 0.5.23 splits it.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from kvtierd.plan.engine import EngineContext
from kvtierd.plan.model import Note, Refusal
from kvtierd.quantities import GIB, format_size
from kvtierd_sglang import READ_VERSION
from kvtierd_sglang.flags import RANK_FLAGS, Options

GB: Final = 1000**3
RESERVE_BYTES: Final = 10 * GIB  # HICACHE_HOST_MEMORY_RESERVE_BYTES

_DEEPSEEK_V4: Final = re.compile(r"deepseek[-_. ]?v4", re.IGNORECASE)
# Attention and another kind of state (sliding window, Mamba, linear attention) side by side.
_HYBRID: Final = re.compile(
    r"deepseek[-_. ]?v4|qwen3[-_.]?next|qwen3\.5|kimi[-_.]?(linear|k3)|gpt[-_.]?oss|minimax|nemotron[-_.]?h|jamba",
    re.IGNORECASE,
)


def is_deepseek_v4(model: str) -> bool:
    """By the model's name or path."""
    return _DEEPSEEK_V4.search(model) is not None


def is_hybrid(model: str) -> bool:
    """Whether the name is that of a model with more than one kind of KV pool."""
    return _HYBRID.search(model) is not None


def version_of(text: str | None) -> tuple[int, ...] | None:
    """``"0.5.23.post1"`` -> ``(0, 5, 23)``; ``None`` for an unknown version."""
    match = re.match(r"\d+(?:\.\d+)*", text) if text else None
    return tuple(int(part) for part in match[0].split(".")) if match else None


def ranks_of(options: Options) -> int:
    """Processes that hold KV, over all hosts of the engine.

    Data parallelism of the attention lies inside the tensor-parallel ranks; plain data parallelism multiplies them.
    """
    tensor, pipeline, data = RANK_FLAGS[:3], RANK_FLAGS[3:6], RANK_FLAGS[6:]
    ranks = options.number(*tensor) * options.number(*pipeline)
    return ranks if options.on("enable-dp-attention") else ranks * options.number(*data)


@dataclasses.dataclass(frozen=True, slots=True)
class L2Size:
    """``--hicache-size`` for each rank (``None``: SGLang's own choice), and what there is to say about it."""

    per_rank_gb: int | None
    notes: tuple[Note, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def size_l2(context: EngineContext, options: Options, ranks_here: int) -> L2Size:
    """Divides the engine's L2 budget among its ranks on this host."""
    budget = context.l2_bytes
    ratio = "hicache-ratio" in options.flags
    if budget is None:
        return L2Size(None, notes=() if ratio else (_unbounded(context),))
    if ratio:
        return L2Size(
            None,
            refusals=(
                Refusal(
                    code="engine.l2-twice",
                    message="l2 and hicache-ratio both size the engine's L2; SGLang would ignore the ratio",
                    hint="keep l2, or remove it and keep hicache-ratio",
                ),
            ),
        )
    if is_deepseek_v4(context.model):
        return L2Size(
            None,
            refusals=(
                Refusal(
                    code="engine.l2-unsupported",
                    message=f"SGLang {READ_VERSION} ends on --hicache-size with DeepSeek-V4, so l2 cannot be kept to",
                    hint="remove l2 and write args.hicache-ratio: L2 becomes that many times L1",
                ),
            ),
        )
    version = version_of(context.version)
    doubled = is_hybrid(context.model) and (version is None or version < (0, 5, 23))
    copies = 2 if doubled else 1
    per_rank_gb = budget // (ranks_here * copies * GB)
    ranks = f"{ranks_here} rank{'' if ranks_here == 1 else 's'}"
    twice = " x 2 pools of a hybrid model" if doubled else ""
    if per_rank_gb == 0:
        return L2Size(
            None,
            refusals=(
                Refusal(
                    code="engine.l2-too-small",
                    message=f"l2 = {format_size(budget)} over {ranks}{twice} is less than 1 GB each,"
                    " SGLang's smallest --hicache-size",
                    hint=f'write at least l2 = "{ranks_here * copies}GB", or leave l2 out',
                ),
            ),
        )
    taken = per_rank_gb * copies * ranks_here * GB
    notes = [
        Note(
            code="engine.l2-size",
            message=f"l2: {format_size(budget)} / {ranks}{' / 2' if doubled else ''} = --hicache-size {per_rank_gb}"
            f" (GB of 10^9 bytes, for each rank): {per_rank_gb} GB x {ranks}{twice} = {format_size(taken)}",
        )
    ]
    refusals: list[Refusal] = []
    needed = taken + context.pool.capacity_bytes + RESERVE_BYTES
    inventory = context.inventory
    sum_text = (
        f"L2 {format_size(taken)} + pool {format_size(context.pool.capacity_bytes)} + {format_size(RESERVE_BYTES)}"
        f" that SGLang keeps back = {format_size(needed)}"
    )
    if needed > inventory.memory_total_bytes:
        refusals.append(
            Refusal(
                code="engine.l2-too-big",
                message=f"{sum_text}, but the host has {format_size(inventory.memory_total_bytes)}",
                hint="lower l2, or [pool] dram",
            )
        )
    elif needed > inventory.memory_available_bytes:
        text = f"{sum_text}, but {format_size(inventory.memory_available_bytes)} are available now"
        notes.append(Note(code="engine.l2-memory-now", message=f"l2: {text} (less what runs of this plan)"))
    return L2Size(per_rank_gb, notes=tuple(notes), refusals=tuple(refusals))


def _unbounded(context: EngineContext) -> Note:
    return Note(
        code="engine.l2-unbounded",
        message="no l2 budget: SGLang sizes L2 by itself, as twice L1 but at most 80 % of the host's free memory;"
        + (
            " write args.hicache-ratio to bound it"
            if is_deepseek_v4(context.model)
            else ' write l2 = "64GiB" in [[engine]] to bound it'
        ),
    )
