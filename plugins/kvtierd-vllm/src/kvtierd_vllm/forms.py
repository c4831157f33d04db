"""What differs between versions of vllm-ascend, as data.

Sources: vllm-ascend's KV pool guide as published with 0.13, 0.18, 0.20, 0.23 and 0.27, its release notes
(``ascend_scheduler_config`` and ``torchair_graph_config`` were dropped), and its issue 12522.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from kvtierd.plan.engine import Remarks

VERSIONS: Final = ">=0.13,<0.28,!=0.14.*,!=0.15.*,!=0.16.*"  # what FORMS covers, as a PEP 440 specifier


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How one range of versions, ``first`` to before ``before`` (major, minor), wants to be called."""

    name: str
    first: tuple[int, int]
    before: tuple[int, int]
    rpc_port_key: str  # of the lookup channel between scheduler and workers
    failure_policy: bool  # kv_load_failure_policy is understood and does something
    v1_switch: bool  # VLLM_USE_V1 exists
    dropped_additional_config: tuple[str, ...]  # keys of additional-config that are gone


FORMS: Final = (
    Form("0.13", (0, 13), (0, 14), "mooncake_rpc_port", failure_policy=False, v1_switch=True,
         dropped_additional_config=("torchair_graph_config",)),
    Form("0.17 to 0.27", (0, 17), (0, 28), "lookup_rpc_port", failure_policy=True, v1_switch=False,
         dropped_additional_config=("ascend_scheduler_config", "torchair_graph_config")),
)  # fmt: skip
ASSUMED: Final = FORMS[-1]


def parsed_version(version: str) -> tuple[int, int] | None:
    """``"0.13.0rc1"`` -> ``(0, 13)``: a release candidate has its release's form. ``None``: not a version."""
    from packaging.version import InvalidVersion, Version  # here: not every kvtierctl needs it

    try:
        release = Version(version).release
    except InvalidVersion:
        return None
    return release[0], release[1] if len(release) > 1 else 0


def form_of(version: str | None, findings: Remarks) -> Form:
    """The form for a version. For an unknown one a note says what is assumed."""
    parsed = parsed_version(version) if version else None
    if parsed is not None:
        for form in FORMS:
            if form.first <= parsed < form.before:
                return form
    what = f"version {version}" if version else "the version"
    known = ", ".join(form.name for form in FORMS)
    findings.note(
        "engine.version-unknown",
        f"{what} of vllm-ascend is not known to this driver (it knows {known});"
        f" its options are written as for {ASSUMED.name}. Check --kv-transfer-config, and say the engine's"
        ' version with version = "..." if it is one of these',
    )
    return ASSUMED


def note_recompute(version: str | None, findings: Remarks) -> None:
    """What is known to go wrong when failed loads are computed again."""
    parsed = parsed_version(version) if version else None
    if parsed is not None and parsed < (0, 22):
        why = "before 0.22 the connector does not report failed loads, and wrong KV may be used"
    else:
        why = (
            "garbled text after one failed load was reported for 0.22.1rc1 (vllm-ascend issue 12522, open);"
            " no version with a fix is known"
        )
    findings.note("engine.recompute-risk", f'kv_load_failure_policy = "recompute" over memcache: {why}')
