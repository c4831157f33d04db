"""Settings: are they valid, and can this host carry them?"""

from __future__ import annotations

from kvtierd.checks import Group, Outcome, Patient, absent, fail, note, ok

GROUP = Group("settings")


@GROUP.check(
    "valid",
    title="The settings can be read",
    why="kvtierd does not start with settings it does not understand; a running one keeps the old ones.",
    fix="kvtierctl conf check FILE names each line, key and what would be right",
)
def valid(patient: Patient) -> Outcome:
    """Problems are those of ``kvtierctl conf check``."""
    if patient.settings_file is None:
        return note(
            "there is no settings file: only what needs none was checked",
            "cp /usr/share/doc/kvtierd/examples/single-host-a2.toml /etc/kvtierd/kvtierd.toml, then edit it",
        )
    if patient.settings_problems:
        return fail("; ".join(patient.settings_problems))
    return ok(str(patient.settings_file))


@GROUP.check(
    "plan",
    title="The host can carry what the settings ask for",
    why="A plan that is refused is not applied: nothing starts, or what runs stays as it was.",
    fix="kvtierctl plan shows the whole plan; change the settings as each refusal says",
)
async def plan(patient: Patient) -> Outcome:
    """What ``kvtierctl plan`` would refuse."""
    made = await patient.plan()
    if made is None:
        return absent("no valid settings")
    if made.refusals:
        return fail(
            "; ".join(f"{r.message}" for r in made.refusals),
            "; ".join(dict.fromkeys(r.hint for r in made.refusals if r.hint)),
        )
    if made.notes:
        return note("; ".join(n.message for n in made.notes))
    return ok(f"{len(made.units)} units, {made.hugepages.pages} hugepages")
