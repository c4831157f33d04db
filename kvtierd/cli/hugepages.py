"""kvtierctl hugepages: works without the daemon, for a look, a reservation before boot's end, or giving back."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtierd.cli.common import JsonOption, SettingsOption, load, print_json
from kvtierd.quantities import format_size


class Action(enum.StrEnum):
    """What to do."""

    SHOW = "show"
    RESERVE = "reserve"
    RELEASE = "release"


def hugepages(
    action: Annotated[
        Action, typer.Argument(help="show, reserve (what the plan needs) or release.")
    ] = Action.SHOW,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what kvtierd reserved, reserve what the plan needs, or give back what kvtierd raised. Needs root to write.

    JSON: show: pools [{page_size_bytes, total_pages, free_pages}], raised [{page_size_bytes, node, raised_pages}];
    reserve: asked_pages, got_pages, short_pages, page_size_bytes, complete, text; release: given_back_bytes,
    still_in_use_bytes. Exit 1 when fewer pages were granted than asked.
    """
    loaded = load(settings)
    if action is Action.SHOW:
        answer, text = _show(loaded)
    elif action is Action.RESERVE:
        answer, text = _reserve(loaded)
    else:
        answer, text = _release(loaded)
    if as_json:
        print_json(answer)
    else:
        print(text)
    if not answer.get("complete", True):
        raise typer.Exit(1)


def _show(settings: Any) -> tuple[dict[str, Any], str]:
    from kvtierd.host.memory import read_pools
    from kvtierd.host.view import HostView
    from kvtierd.provision.carry_out import hugepage_keeper

    pools = read_pools(HostView())
    # Looking must not make the state directory.
    raised = hugepage_keeper(settings).raised() if Path(settings.paths.state).is_dir() else ()
    answer = {
        "pools": [
            {"page_size_bytes": p.page_size_bytes, "total_pages": p.total_pages, "free_pages": p.free_pages}
            for p in pools
        ],
        "raised": [
            {"page_size_bytes": e.page_size_bytes, "node": e.node, "raised_pages": e.raised_pages}
            for e in raised
        ],
    }
    lines = [f"{format_size(p.page_size_bytes)}: {p.total_pages} pages, {p.free_pages} free" for p in pools]
    lines += [
        f"kvtierd raised {e.raised_pages} pages of {format_size(e.page_size_bytes)}"
        + ("" if e.node is None else f" on NUMA node {e.node}")
        for e in raised
        if e.raised_pages
    ]
    return answer, "\n".join(lines) or "this kernel has no hugepages"


def _reserve(settings: Any) -> tuple[dict[str, Any], str]:
    import asyncio

    from kvtierd.errors import PlanError
    from kvtierd.plugins import load_plugins
    from kvtierd.provision.carry_out import hugepage_keeper
    from kvtierd.provision.host_plan import plan_this_host

    plan = asyncio.run(plan_this_host(settings, load_plugins()))
    stopping = [r for r in plan.refusals if r.code.startswith(("hugepages", "memory", "pool", "plan"))]
    if stopping:
        raise PlanError(stopping[0].message, hint=stopping[0].hint, code="plan.refused")
    if not plan.hugepages.pages:
        return {
            "asked_pages": 0,
            "got_pages": 0,
            "short_pages": 0,
            "complete": True,
        }, "the plan needs no hugepages"
    Path(settings.paths.state).mkdir(parents=True, exist_ok=True)
    report = hugepage_keeper(settings).reserve(plan.hugepages)
    text = report.text(plan.pool.dram_bytes_per_provider or None)
    return {
        "asked_pages": report.asked_pages,
        "got_pages": report.got_pages,
        "short_pages": report.short_pages,
        "page_size_bytes": report.page_size_bytes,
        "complete": report.complete,
        "text": text,
    }, text


def _release(settings: Any) -> tuple[dict[str, Any], str]:
    from kvtierd.provision.carry_out import hugepage_keeper

    if not Path(settings.paths.state).is_dir():
        return {"given_back_bytes": 0, "still_in_use_bytes": 0}, "kvtierd has reserved nothing here"
    report = hugepage_keeper(settings).release()
    return report.model_dump(), report.text()
