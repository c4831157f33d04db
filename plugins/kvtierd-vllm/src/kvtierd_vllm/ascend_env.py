"""The environment of a vllm-ascend engine: what the two ``set_env.sh`` of the guides would export, and vLLM's own.

``source ascend-toolkit/set_env.sh`` and ``source nnal/atb/set_env.sh`` need a shell; a unit has none. The variables
are those of CANN 8.3 and its ATB library. ATB's ``ATB_*`` switches are left out: the scripts only repeat defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Final

from kvtierd.plan.docker import IMAGE_CANN_HOME
from kvtierd.plan.engine import ENGINE_BASE_ENV, EngineContext, Remarks
from kvtierd.plan.environment import MAX_HASH_SEED, is_hash_seed, merge_env

DEFAULT_HASH_SEED: Final = "0"
_PATHS: Final = frozenset({"LD_LIBRARY_PATH", "PATH", "PYTHONPATH"})
_OWNED: Final[Mapping[str, str]] = {
    "MMC_LOCAL_CONFIG_PATH": "kvtierd writes that file; further keys of it go to [meta] local_conf",
    "ASCEND_RT_VISIBLE_DEVICES": "write devices = [...] in [[engine]]",
    "ASCEND_VISIBLE_DEVICES": "write devices = [...] in [[engine]]",
}


def cann_env(cann_home: str, machine: str) -> dict[str, str]:
    """What the two scripts export, for CANN in ``cann_home`` on a ``machine`` such as ``aarch64``.

    ATB is looked for beside the toolkit, in its build for the C++11 ABI, which torch wheels have since 2.6.
    """
    tbe = f"{cann_home}/opp/built-in/op_impl/ai_core/tbe"
    atb_home = f"{_ascend_root(cann_home)}/nnal/atb/latest/atb/cxx_abi_1"
    libraries = (
        f"{atb_home}/lib",
        f"{cann_home}/lib64",
        f"{cann_home}/lib64/plugin/opskernel",
        f"{cann_home}/lib64/plugin/nnengine",
        f"{tbe}/op_tiling/lib/linux/{machine}",
    )
    return {
        "ASCEND_TOOLKIT_HOME": cann_home,
        "ASCEND_HOME_PATH": cann_home,
        "ASCEND_AICPU_PATH": cann_home,
        "ASCEND_OPP_PATH": f"{cann_home}/opp",
        "TOOLCHAIN_HOME": f"{cann_home}/toolkit",
        "ATB_HOME_PATH": atb_home,
        "LD_LIBRARY_PATH": ":".join(libraries),
        "PATH": f"{cann_home}/bin:{cann_home}/compiler/ccec_compiler/bin",
        "PYTHONPATH": f"{cann_home}/python/site-packages:{tbe}",
    }


def complete_env(context: EngineContext, *layers: Mapping[str, str]) -> dict[str, str]:
    """All layers, later ones first in search paths, and the operator's values last.

    The operator's own search paths come behind: they must not hide MemCache's libraries. The interpreter's programs come
    first: vLLM starts some of them by name.
    """
    paths = {name: value for name, value in context.env.items() if name in _PATHS}
    others = {name: value for name, value in context.env.items() if name not in _PATHS}
    programs = {"PATH": str(PurePosixPath(context.python).parent)}
    return merge_env(ENGINE_BASE_ENV, paths, *layers, programs, others)


def check_env(context: EngineContext, findings: Remarks) -> None:
    """Refuses variables that kvtierd sets, and a hash seed with which no other engine would share a block."""
    for name, hint in _OWNED.items():
        if name in context.env:
            findings.refuse("engine.owned-environment", f"kvtierd sets {name} itself", hint)
    seed = context.env.get("PYTHONHASHSEED", DEFAULT_HASH_SEED)
    if not is_hash_seed(seed):
        findings.refuse(
            "engine.hash-seed",
            f"PYTHONHASHSEED is {seed!r}: block keys depend on it, and no two processes would find each other's blocks",
            f"leave it out (kvtierd sets {DEFAULT_HASH_SEED}), or one number up to {MAX_HASH_SEED} for all engines",
        )


def host_cann_env(context: EngineContext, findings: Remarks) -> dict[str, str]:
    """CANN of the host, or of the image the engine runs in."""
    machine = context.inventory.machine
    if context.runner == "docker":
        return cann_env(IMAGE_CANN_HOME, machine)
    home = context.inventory.ascend.cann_home
    if home is None:
        findings.note(
            "engine.cann-unknown",
            "CANN was not found on this host: ASCEND_* and its library paths are not set."
            " Install it, or set them under [engine.env]",
        )
        return {}
    return cann_env(home, machine)


def _ascend_root(cann_home: str) -> str:
    """``/usr/local/Ascend/ascend-toolkit/latest`` -> ``/usr/local/Ascend``."""
    path = PurePosixPath(cann_home)
    return str(next((p for p in path.parents if p.name == "Ascend"), path.parent))
