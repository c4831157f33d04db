"""Known issues of what is installed."""

from __future__ import annotations

from kvtierd.checks import Group, Outcome, Patient, absent, fail, note, warn, worst
from kvtierd.doctor.known_issues import WORDS, KnownIssue, known_issues, words_that_hold
from kvtierd.plan.inventory import Inventory
from kvtierd.settings import Settings

GROUP = Group("known")
ENGINES = ("vllm", "vllm-ascend", "sglang")


@GROUP.check(
    "issues",
    title="No known issue of the installed versions concerns this host",
    why="These are faults of other people's software that somebody has met already; each costs days to find again.",
    fix="kvtierctl doctor --known-issues shows the whole table, with advice and where each was reported",
)
async def issues(patient: Patient) -> Outcome:
    """Issues that kvtierd does not work around, by version and by what the settings ask for."""
    versions = installed(await patient.inventory(), patient.settings)
    if not versions:
        return absent("no version of MemCache, an engine, driver or CANN is known")
    holds = words_that_hold(patient.settings)
    found, handled = [], 0
    for issue in known_issues():
        version = next((v for v in versions.get(issue.component, ()) if issue.concerns(v)), None)
        if version is None or any(holds.get(word) is False for word in issue.when):
            continue
        if issue.handled:
            handled += 1
            continue
        found.append(_outcome(issue, version, [word for word in issue.when if word not in holds]))
    good = f"{handled} that kvtierd works around; looked at: " + ", ".join(
        f"{name} {' and '.join(known)}" for name, known in versions.items()
    )
    return worst(found, good)


def _outcome(issue: KnownIssue, version: str, unsure: list[str]) -> Outcome:
    make = {"note": note, "warn": warn, "fail": fail}[issue.severity] if not unsure else note
    condition = f", if {' and '.join(WORDS[word] for word in unsure)}" if unsure else ""
    return make(f"{issue.component} {version}{condition}: {issue.title} ({issue.source})", issue.advice)


def installed(inventory: Inventory, settings: Settings | None) -> dict[str, list[str]]:
    """Component -> its versions here, as they were found or, for containers, written."""
    found: dict[str, dict[str, None]] = {}

    def add(component: str, version: str | None) -> None:
        if version:
            found.setdefault(component, {})[version] = None

    for install in inventory.memcache:
        add("memcache", install.memcache_version)
        for name in ENGINES:
            add(name, install.packages.get(name))
    add("driver", inventory.ascend.driver_version)
    add("cann", inventory.ascend.cann_version)
    if settings is not None:
        add("memcache", settings.meta.version)
        for engine in settings.engine:
            if engine.plugin in ENGINES:
                add(engine.plugin, engine.version)
    return {name: list(versions) for name, versions in found.items()}
