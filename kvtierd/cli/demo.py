"""kvtierctl demo: the main job on real input, in about half a minute."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtierd.cli.common import JsonOption, print_json
from kvtierd.errors import KvtierError
from kvtierd.quantities import format_duration

if TYPE_CHECKING:
    from kvtierd.workload.demo import DemoNode
    from kvtierd.workload.stream import Completion

MODEL = "refengine"
TEXT = "alice_in_wonderland.txt"
MAX_TOKENS = 16
PERSIST_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """All prompts sent once: what it was, and what came back in the order of the prompts."""

    name: str
    answers: tuple[Completion, ...]

    def tokens(self, field: str) -> int:
        """Sum of one of the engine's own token counts: l1_tokens, l3_tokens, computed_tokens."""
        return sum(int(a.usage.get("kvtier", {}).get(field, 0)) for a in self.answers)

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
    as_json: JsonOption = False,
) -> None:
    """Show what kvtierd does: real MetaService, real pool, reference engine, in emulation.

    Sends long prompts of real text, then the same again, then restarts the engine and sends them again. Leaves
    nothing behind. JSON: passes [{name, ttft_seconds, prompt_tokens, l1_tokens, l3_tokens, computed_tokens}],
    same_output, seconds, status.
    """
    import signal

    from kvtierd.workload.demo import DemoNode

    started = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: leave nothing behind
        signal.signal(number, signal.default_int_handler)
    with _progress(quiet=as_json) as say, DemoNode(say) as node:
        passes = _run(node, _texts(prompts, length), say)
        time.sleep(3.2)  # the next look at everything, so that status shows the last pass
        reply = node.status()
        seconds = time.monotonic() - started
        same = all(p.answers[i].text == passes[0].answers[i].text for p in passes for i in range(prompts))
        say("")
        if as_json:
            _print_json(passes, reply, same=same, seconds=seconds)
        else:
            _print(passes, reply, same=same, seconds=seconds)
    hit = passes[2].tokens("l3_tokens") > 0 and passes[1].tokens("l1_tokens") > 0
    if not (same and hit):
        raise KvtierError(
            "the demo did not show what it should: "
            + ("the outputs differ" if not same else "a tier did not answer the prompts it should have"),
            code="demo.failed",
        )


def _texts(count: int, length: int) -> list[str]:
    text = resources.files("kvtierd.data").joinpath(TEXT).read_text(encoding="utf-8")
    return [text[i * length : (i + 1) * length] for i in range(count)]


def _run(node: DemoNode, texts: list[str], say: Callable[[str], None]) -> list[Pass]:
    passes = [_send(node, "cold", texts, say), _send(node, "again", texts, say)]
    say("waiting until the blocks are in the pool")
    _wait_persisted(node)
    say("restarting the engine: its own cache is gone, the pool stays")
    node.restart_engine()
    passes.append(_send(node, "after engine restart", texts, say))
    return passes


def _send(node: DemoNode, name: str, texts: list[str], say: Callable[[str], None]) -> Pass:
    from kvtierd.workload.stream import complete

    answers = []
    for number, text in enumerate(texts, 1):
        say(f"{name}: prompt {number} of {len(texts)}")
        answers.append(
            complete("127.0.0.1", node.engine_port, model=MODEL, prompt=text, max_tokens=MAX_TOKENS)
        )
    return Pass(name, tuple(answers))


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


class _progress:  # noqa: N801 - used like a function
    """A line that says what is being waited for: rewritten on a terminal, one line a change elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._last = ""
        self._status: Any = None
        self._started = time.monotonic()

    def __enter__(self) -> Callable[[str], None]:
        if self._terminal and not self._quiet:
            from rich.console import Console

            self._status = Console(stderr=True).status("starting kvtierd")
            self._status.start()
        return self._say

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _say(self, text: str) -> None:
        if self._quiet or text == self._last:
            return
        self._last = text
        if self._status is not None:
            if text:
                self._status.update(text)
                self._status.start()
            else:
                self._status.stop()
        elif text:
            print(f"[{time.monotonic() - self._started:5.1f}s] {text}", file=sys.stderr, flush=True)


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


def _print_json(passes: list[Pass], reply: Any, *, same: bool, seconds: float) -> None:
    from kvtierd.cli.common import message_dict

    print_json(
        {"passes": _rows(passes), "same_output": same, "seconds": seconds, "status": message_dict(reply)}
    )


def _print(passes: list[Pass], reply: Any, *, same: bool, seconds: float) -> None:
    from rich import box
    from rich.table import Table

    from kvtierd.cli.status import _console, render

    console = _console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in (
        "PASS",
        "TTFT (MEDIAN)",
        "x FASTER",
        "FROM L1",
        "FROM POOL (L3)",
        "COMPUTED",
        "PROMPT TOKENS",
    ):
        table.add_column(column, justify="left" if column == "PASS" else "right")
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
    console.print(
        f"output the same in all passes: {'yes' if same else 'NO'}; {format_duration(seconds)} in all\n"
    )
    console.print("What ran where (kvtierctl status):", style="bold")
    console.print(render(reply))
    console.print(
        "\nEMULATED: the Ascend driver is a stand-in and the engine is the reference engine; MetaService, pool and"
        "\nMemCache's client are the real ones. The times show the principle, not what an NPU does."
    )
