"""kvtierctl demo: the main job on real input, in about a minute."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kvtierd.cli.common import JsonOption, print_json
from kvtierd.cli.progress import progress
from kvtierd.control.messages import message_dict
from kvtierd.errors import KvtierError, UsageError
from kvtierd.quantities import format_duration

if TYPE_CHECKING:
    from kvtierd.workload.demo import DemoNode
    from kvtierd.workload.report.write import Report
    from kvtierd.workload.stream import Completion

REFERENCE = "refengine"
READY_SECONDS = 60.0
SLOW_READY_SECONDS = 600.0  # a real engine loads for minutes on a small machine
METRICS_SECONDS = 2.5  # until the counters of what was just served have been read
TEXT = "alice_in_wonderland.txt"
MAX_TOKENS = 16
PERSIST_SECONDS = 5.0


class Counters(NamedTuple):
    """Hit tokens of L1 and L3."""

    l1: int
    l3: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """All prompts sent once: what it was, and what came back in the order of the prompts."""

    name: str
    answers: tuple[Completion, ...]
    counted: Counters

    def tokens(self, field: str) -> int:
        """Tokens of all prompts by where they came from: l1_tokens, l3_tokens, computed_tokens.

        The engine's own account of each request where it gives one, else the growth of its counters.
        """
        if all("kvtier" in a.usage for a in self.answers):
            return sum(int(a.usage["kvtier"].get(field, 0)) for a in self.answers)
        if field == "computed_tokens":
            return self.prompt_tokens - self.counted.l1 - self.counted.l3
        return self.counted.l1 if field == "l1_tokens" else self.counted.l3

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(int(a.usage.get("prompt_tokens", 0)) for a in self.answers)

    @property
    def ttft_seconds(self) -> float:
        """Median time to the first token."""
        ordered = sorted(a.ttft_seconds for a in self.answers)
        return ordered[len(ordered) // 2]


def demo(
    prompts: Annotated[int, typer.Option(min=1, max=8, help="How many long prompts.")] = 3,
    length: Annotated[int, typer.Option(min=256, max=3500, help="Tokens (bytes) of each prompt.")] = 2000,
    engine: Annotated[
        str, typer.Option(help="Engine driver: refengine, or vllm-cpu for the real vLLM.")
    ] = REFERENCE,
    python: Annotated[Path | None, typer.Option(help="The engine's interpreter (vllm-cpu).")] = None,
    model: Annotated[Path | None, typer.Option(help="The engine's model (vllm-cpu).")] = None,
    comparison: Annotated[
        bool, typer.Option("--compare/--no-compare", help="End with a short bench compare (refengine).")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Show what kvtierd does: real MetaService, real pool, an engine, in emulation.

    Sends long prompts of real text, then the same again, then restarts the engine and sends them again; then compares
    the engine without a cache, with its own, and with the pool. Leaves nothing behind but the report of that. JSON:
    passes [{name, ttft_seconds, prompt_tokens, l1_tokens, l3_tokens, computed_tokens}], same_output, seconds, status,
    comparison {runs, files}.
    """
    import signal

    from kvtierd.workload.demo import DemoNode

    started = time.monotonic()
    interrupted: list[int] = []

    def interrupt(number: int, _: object) -> None:
        interrupted.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # all like Ctrl-C: leave nothing behind
        signal.signal(number, interrupt)
    settings, ready = _engine_settings(engine, python, model)
    with progress(quiet=as_json) as say, DemoNode(say, engine=settings, ready_seconds=ready) as node:
        passes = _run(node, _texts(prompts, length), say)
        time.sleep(3.2)  # the next look at everything, so that status shows the last pass
        reply = node.status()
        seconds = time.monotonic() - started
        # A real engine's cold prefill may differ in the last bits; what the tiers return must not.
        compared = passes if engine == REFERENCE else passes[1:]
        same = all(p.answers[i].text == compared[0].answers[i].text for p in compared for i in range(prompts))
        say("")
        if not as_json:
            _print(passes, reply, engine, same=same, seconds=seconds)
        report = _compare(node, say) if comparison and engine == REFERENCE else None
        if as_json:
            _print_json(passes, reply, report, same=same, seconds=seconds)
        elif report is not None:
            _print_comparison(report)
    if interrupted:  # it came where Python drops exceptions: in a destructor, or a callback of a library
        raise KeyboardInterrupt
    hit = passes[2].tokens("l3_tokens") > 0 and passes[1].tokens("l1_tokens") > 0
    if not (same and hit):
        raise KvtierError(
            "the demo did not show what it should: "
            + ("the outputs differ" if not same else "a tier did not answer the prompts it should have"),
            code="demo.failed",
        )


def _compare(node: DemoNode, say: Callable[[str], None]) -> Report:
    from kvtierd.workload.brief_compare import compare_briefly

    _, report = compare_briefly(node, say)
    say("")
    return report


def _print_comparison(report: Report) -> None:
    print("\nWithout a cache, with the engine's own, and with the pool (kvtierctl bench compare):")
    print(report.text, end="")
    shown = {path.name: path for path in report.files}
    print(f"plot:   {shown['comparison.png']}\nreport: {shown['report.html']}")


def _engine_settings(engine: str, python: Path | None, model: Path | None) -> tuple[str, float]:
    """The engine's settings as TOML lines, and how long it may take to be ready.

    Raises:
        UsageError: an engine other than the reference engine needs an interpreter and a model.
    """
    if engine == REFERENCE:
        return f'plugin = "{REFERENCE}"\n', READY_SECONDS
    if python is None or model is None:
        raise UsageError(
            f"demo --engine {engine} needs --python and --model",
            hint="make demo ENGINE=vllm-cpu prepares both",
        )
    lines = f'plugin = "{engine}"\npython = "{python.absolute()}"\nmodel = "{model.absolute()}"\n'
    # Without AVX-512 a CPU computes bfloat16 ten times slower, and compiling takes minutes.
    lines += 'args = { dtype = "float32", enforce-eager = true }\n'
    return lines, SLOW_READY_SECONDS


def _texts(count: int, length: int) -> list[str]:
    text = resources.files("kvtierd.data").joinpath(TEXT).read_text(encoding="utf-8")
    return [text[i * length : (i + 1) * length] for i in range(count)]


def _run(node: DemoNode, texts: list[str], say: Callable[[str], None]) -> list[Pass]:
    from kvtierd.workload.stream import served_model

    model = served_model("127.0.0.1", node.engine_port)
    passes = [_send(node, "cold", texts, model, say), _send(node, "again", texts, model, say)]
    say("waiting until the blocks are in the pool")
    _wait_persisted(node)
    say("restarting the engine: its own cache is gone, the pool stays")
    node.restart_engine()
    passes.append(_send(node, "after engine restart", texts, model, say))
    return passes


def _send(node: DemoNode, name: str, texts: list[str], model: str, say: Callable[[str], None]) -> Pass:
    from kvtierd.workload.stream import complete

    before = _counters(node)
    answers = []
    for number, text in enumerate(texts, 1):
        say(f"{name}: prompt {number} of {len(texts)}")
        answers.append(
            complete("127.0.0.1", node.engine_port, model=model, prompt=text, max_tokens=MAX_TOKENS)
        )
    if all("kvtier" in a.usage for a in answers):
        return Pass(name, tuple(answers), Counters(0, 0))
    time.sleep(METRICS_SECONDS)
    after = _counters(node)
    return Pass(name, tuple(answers), Counters(after.l1 - before.l1, after.l3 - before.l3))


def _counters(node: DemoNode) -> Counters:
    hits = {t.name: t.hit_tokens for t in node.status().tiers if t.HasField("hit_tokens")}
    return Counters(hits.get("L1", 0), hits.get("L3", 0))


def _wait_persisted(node: DemoNode) -> None:
    """Blocks are put behind the answer's back: wait until the pool has stopped growing."""
    deadline = time.monotonic() + PERSIST_SECONDS
    before = -1
    while time.monotonic() < deadline:
        used = next((t.used_bytes for t in node.status().tiers if t.name == "L3"), 0)
        if used and used == before:
            return
        before = used
        time.sleep(0.7)


def _rows(passes: list[Pass]) -> list[dict[str, Any]]:
    return [
        {
            "name": p.name,
            "ttft_seconds": p.ttft_seconds,
            "prompt_tokens": p.prompt_tokens,
            "l1_tokens": p.tokens("l1_tokens"),
            "l3_tokens": p.tokens("l3_tokens"),
            "computed_tokens": p.tokens("computed_tokens"),
        }
        for p in passes
    ]


def _print_json(passes: list[Pass], reply: Any, report: Report | None, *, same: bool, seconds: float) -> None:
    print_json(
        {
            "passes": _rows(passes),
            "same_output": same,
            "seconds": seconds,
            "status": message_dict(reply),
            "comparison": None
            if report is None
            else {"runs": report.rows, "files": [str(path) for path in report.files]},
        }
    )


def _print(passes: list[Pass], reply: Any, engine: str, *, same: bool, seconds: float) -> None:
    from kvtierd.cli.status import _console, _table, render

    console = _console()
    columns = ("TTFT (MEDIAN)", "x FASTER", "FROM L1", "FROM POOL (L3)", "COMPUTED", "PROMPT TOKENS")
    table = _table("PASS", *columns, right=columns)
    cold = passes[0].ttft_seconds
    for row in _rows(passes):
        total = row["prompt_tokens"] or 1
        table.add_row(
            row["name"],
            f"{row['ttft_seconds'] * 1000:.0f} ms",
            f"{cold / row['ttft_seconds']:.1f}",
            f"{row['l1_tokens'] / total:.1%}",
            f"{row['l3_tokens'] / total:.1%}",
            f"{row['computed_tokens'] / total:.1%}",
            str(row["prompt_tokens"]),
        )
    console.print(table)
    which = "in all passes" if engine == REFERENCE else "from L1 and from the pool"
    verdict = "yes" if same else "NO"
    console.print(f"output the same {which}: {verdict}; {format_duration(seconds)} in all\n")
    console.print("What ran where (kvtierctl status):", style="bold")
    console.print(render(reply))
    what = "the engine is the reference engine" if engine == REFERENCE else f"the engine is the real {engine}"
    console.print(
        f"\nEMULATED: the Ascend driver is a stand-in and {what}; MetaService, pool and MemCache's client"
        "\nare the real ones. The times show the principle, not what an NPU does."
    )
