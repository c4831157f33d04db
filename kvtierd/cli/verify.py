"""kvtierctl verify: prove that an engine's tiers give back what was put into them."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtierd.cli.common import JsonOption, SettingsOption, SocketOption, connect, print_json
from kvtierd.errors import UsageError, WorkloadError

if TYPE_CHECKING:
    from kvtierd.workload.verify.proof import Proof
    from kvtierd.workload.verify.subject import Subject

_STEPS = {
    "cold": "first: computed",
    "warm": "again: from L1",
    "restored": "emptied: from L3",
    "again": "again: from L1",
}


def verify(
    engine_name: Annotated[
        str, typer.Argument(metavar="[ENGINE]", help="An engine that kvtierd runs here.")
    ] = "",
    url: Annotated[
        str, typer.Option(metavar="URL", help="Or the address of another server, http://HOST:PORT.")
    ] = "",
    engine: Annotated[
        str, typer.Option("--engine", metavar="KIND", help="With --url: vllm, sglang, or a driver's name.")
    ] = "",
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="With --url: what the server was started with."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File whose last word is the server's API key.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The prompt's; the same seed gives the same prompt.")
    ] = None,
    length: Annotated[int, typer.Option(min=200, max=2_000_000, help="Characters of the prompt.")] = 3000,
    max_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens to generate.")] = 16,
    model: Annotated[str, typer.Option(help="The model's name; default: the first that is served.")] = "",
    deadline: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="For everything.")] = 180.0,
    settle: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="Wait so long for L3 when the engine does not say what it wrote."
        ),
    ] = 5.0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Empty L1 and L2 by restarting the engine.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Others may lose what L1 and L2 have cached for them.")
    ] = False,
    settings: SettingsOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove the tiers: ask, ask again (L1), empty L1 and L2, ask (L3), ask again (L1); the same text each time.

    L3 is never emptied. Exit 1 when a step fails; the reason is exact. JSON: engine, seed, ok, reason {code, message,
    hint}, steps [{name, prompt, l1, l2, l3, computed, seconds, text}], remarks.
    """
    from kvtierd.workload.verify.proof import ProofOptions, prove

    if bool(engine_name) == bool(url):
        raise UsageError("name an engine of this node, or give --url with --engine")
    if bool(url) != bool(engine):
        raise UsageError("--url and --engine go together", hint="--engine vllm or --engine sglang")
    options = ProofOptions(
        seed=random.SystemRandom().randrange(2**32) if seed is None else seed,
        length=length, max_tokens=max_tokens, model=model, deadline_seconds=deadline, settle_seconds=settle,
        yes=yes, restart=restart,
    )  # fmt: skip
    subject = (
        _foreign(url, engine, env or [], api_key_file)
        if url
        else _managed(engine_name, settings, socket, deadline)
    )
    terminal = sys.stderr.isatty() and not as_json

    def say(text: str) -> None:
        if terminal:
            print(f"  {text} ...", file=sys.stderr)

    proof = asyncio.run(prove(subject, options, say))
    if as_json:
        print_json(_as_dict(proof))
    else:
        _show(proof)
    if proof.fault is not None:
        raise typer.Exit(1)


def _managed(name: str, settings: Path | None, socket: Path | None, wait_seconds: float) -> Subject:
    from kvtierd.plan.model import NodePlan
    from kvtierd.plugins import load_plugins
    from kvtierd.workload.verify.subject import managed

    with connect(settings, socket) as client:
        plan = NodePlan.model_validate_json(client.plan_json())
        status = client.status()

    def restart(unit: str) -> None:
        with connect(settings, socket) as client:
            after = client.control_unit(unit, "restart", min(wait_seconds, 600.0))
        if after.state != "ready":
            raise WorkloadError(
                f"{unit} did not come back: it is {after.state}", why=after.reason, code="verify.restart"
            )

    subject = managed(plan, name, load_plugins(), restart)
    unit = next((u for u in status.units if u.id == subject.spec.id), None)
    state = "not there" if unit is None else unit.state
    if unit is not None and unit.remark:
        raise WorkloadError(f"{subject.spec.name} has no L3 now", why=unit.remark, code="verify.no-l3")
    if state not in {"ready", "degraded"}:
        raise WorkloadError(
            f"{subject.spec.name} is {state}",
            hint=f"kvtierctl why {subject.spec.name}",
            code="verify.not-ready",
        )
    return subject


def _foreign(url: str, kind: str, env: list[str], api_key_file: Path | None) -> Subject:
    from kvtierd.plugins import load_plugins
    from kvtierd.workload.verify.subject import foreign

    pairs = [pair.partition("=") for pair in env]
    if wrong := [name for name, mark, _ in pairs if not (name and mark)]:
        raise UsageError(f"--env {wrong[0]!r} is not NAME=VALUE")
    return foreign(
        url,
        kind,
        load_plugins(),
        env={name: value for name, _, value in pairs},
        bearer_file=None if api_key_file is None else str(api_key_file.absolute()),
    )


def _as_dict(proof: Proof) -> dict[str, object]:
    import dataclasses

    return {
        "engine": proof.engine,
        "seed": proof.seed,
        "ok": proof.fault is None,
        "reason": None if proof.fault is None else dataclasses.asdict(proof.fault),
        "steps": [
            {"name": s.name, **s.tokens.model_dump(), "seconds": round(s.seconds, 4), "text": s.text}
            for s in proof.steps
        ],
        "remarks": list(proof.remarks),
    }


def _show(proof: Proof) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("STEP", "PROMPT", "L1", "L2", "L3", "COMPUTED", "SECONDS"):
        table.add_column(title, justify="left" if title == "STEP" else "right", no_wrap=title != "STEP")
    for step in proof.steps:
        t = step.tokens
        cells = ["-" if n is None else f"{n:,}" for n in (t.prompt, t.l1, t.l2, t.l3, t.computed)]
        table.add_row(_STEPS[step.name], *cells, f"{step.seconds:.3f}")
    Console().print(table)
    for remark in proof.remarks:
        print(f"note: {remark}")
    if proof.fault is None:
        print(
            f"{proof.engine}: L3 gave back what was put into it, and the text is the same (seed {proof.seed})"
        )
        return
    print(f"{proof.engine}: NOT PROVED ({proof.fault.code}): {proof.fault.message} (seed {proof.seed})")
    if proof.fault.hint:
        print(f"  do: {proof.fault.hint}")
