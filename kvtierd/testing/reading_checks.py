"""Rules for what a driver reads (metrics, output, answers) and for what it asks of its engine."""

from __future__ import annotations

import functools
import itertools
import json
import math
import posixpath
import re
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from kvtierd.plan.engine import EngineObservation, HttpCall, Tier, TierTokens
from kvtierd.testing.guard import watched
from kvtierd.testing.hostile import (
    HARMLESS_LINES,
    OUTPUT_LINES,
    SGLANG_METRICS,
    VLLM_METRICS,
    big_metrics,
    hostile_bodies,
    hostile_lines,
    hostile_metrics,
    long_lines,
)
from kvtierd.testing.subject import (
    Check,
    Subject,
    accepted,
    ask,
    ask_or_refusal,
    expect,
    same_type,
    situations,
)

_PATH = re.compile(r"/[!-~]*")
_LINE_SECONDS = 0.25
_TIERS: tuple[Tier, ...] = ("L1", "L2", "L3")


def _scrapes(subject: Subject) -> Iterator[str]:
    yield from (*subject.metrics, VLLM_METRICS, SGLANG_METRICS)


def _observe(subject: Subject, what: str, text: str) -> EngineObservation | None:
    seen = ask_or_refusal(f"observe() of {what}", lambda: subject.driver.observe(text))
    if seen is not None:
        same_type(f"observe() of {what}", seen, EngineObservation)
    return seen


def _sane(what: str, seen: EngineObservation) -> None:
    for field, value in _figures(seen):
        whole = not isinstance(value, bool) and value >= 0 and math.isfinite(value)
        expect(whole, f"{what}: {field} is {value}")
        if field.endswith(("_rate", "_ratio")):
            expect(value <= 1, f"{what}: {field} is {value}; shares go from 0 to 1")


def _figures(seen: EngineObservation) -> Iterator[tuple[str, float]]:
    for field, value in seen:
        if value is not None and field != "fatal":
            yield field, value


def observe_hostile(subject: Subject) -> None:
    """Whatever answers on the metrics' address: an observation or ValueError, no other exception."""
    for what, text in hostile_metrics():
        _observe(subject, what, text)


def observe_quick(subject: Subject) -> None:
    """A large body is read within the second that the daemon allows."""
    for what, text in big_metrics():
        _observe(subject, what, text)


def observe_nothing(subject: Subject) -> None:
    """A text without the engine's metrics has no figures, and no zeros."""
    for what, text in itertools.islice(hostile_metrics(), 6):
        seen = _observe(subject, what, text)
        figures = dict(_figures(seen)) if seen else {}
        expect(not figures, f"observe() of {what} made up {figures}: what is missing is None")


def observe_reads(subject: Subject) -> None:
    """Reads a recorded scrape, if the engine has metrics."""
    context = accepted(subject)
    if ask("metrics_url()", lambda: subject.driver.metrics_url(context)) is None:
        return
    read = [seen for text in _scrapes(subject) if (seen := _observe(subject, "a recorded scrape", text))]
    for seen in read:
        _sane("observe() of a recorded scrape", seen)
    expect(
        any(dict(_figures(seen)) for seen in read),
        "observe() reads nothing from vLLM's or SGLang's metrics, and no other scrape was given:"
        " record one of your engine and name it with --kvtierd-plugin-metrics FILE",
    )


def observe_missing(subject: Subject) -> None:
    """A metric that is missing leaves None, never 0: the recorded scrapes hold no zero."""
    for text in _scrapes(subject):
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        names = list(dict.fromkeys(re.split(r"[{ ]", line)[0] for line in lines))
        zeros = {re.split(r"[{ ]", line)[0] for line in lines if float(line.rpartition(" ")[2] or "nan") == 0}
        for name in names:
            parts = [[li for li in lines if _has_name(li, name) is kept] for kept in (True, False)]
            for what, part in zip(("only", "all but"), parts, strict=True):
                if any(re.split(r"[{ ]", line)[0] in zeros for line in part):
                    continue
                seen = _observe(subject, f"{what} {name}", "\n".join(part) + "\n")
                made_up = [field for field, value in _figures(seen) if value == 0] if seen else []
                expect(
                    not made_up,
                    f"observe() of {what} {name}: {', '.join(made_up)} is 0, but it is not there: say None",
                )


def _has_name(line: str, name: str) -> bool:
    return re.split(r"[{ ]", line)[0] == name


def _read_line(subject: Subject, what: str, line: str) -> EngineObservation | None:
    seen = ask(f"read_line() of {what}", lambda: subject.driver.read_line(line), seconds=_LINE_SECONDS)
    if seen is not None:
        same_type(f"read_line() of {what}", seen, EngineObservation)
    return seen


def read_line_hostile(subject: Subject) -> None:
    """Any line: an observation or None, never an exception."""
    for what, line in hostile_lines():
        _read_line(subject, what, line)


def read_line_quick(subject: Subject) -> None:
    """64 KiB in a quarter of a second: it sees every line of output."""
    for what, line in long_lines():
        _read_line(subject, what, line)


def read_line_half(subject: Subject) -> None:
    """A line that was cut says what the whole line says, or nothing: never another number."""
    for line in (*subject.lines, *OUTPUT_LINES):
        whole = _read_line(subject, repr(line), line)
        figures = dict(_figures(whole)) if whole else {}
        if whole:
            _sane(f"read_line() of {line!r}", whole)
        for end in range(len(line)):
            seen = _read_line(subject, repr(line[:end]), line[:end])
            for field, value in _figures(seen) if seen else ():
                expect(
                    field not in figures or value == figures[field],
                    f"read_line() of half a line, ...{line[max(end - 40, 0) : end]!r}: {field} is {value};"
                    f" the whole line says {figures.get(field)}",
                )


def read_line_harmless(subject: Subject) -> None:
    """Ordinary lines are no fatal signs: a fatal sign degrades the engine."""
    for line in (*HARMLESS_LINES, *OUTPUT_LINES):
        seen = _read_line(subject, repr(line), line)
        expect(seen is None or seen.fatal is None, f"read_line() takes {line!r} for fatal")


def metrics_url(subject: Subject) -> None:
    """An http address that can be reached from this host, of the engine's own port or a claimed one; or None."""
    for situation, context in situations(subject.driver):
        url = ask(f"metrics_url() with {situation}", functools.partial(subject.driver.metrics_url, context))
        if url is None:
            continue
        same_type("metrics_url()", url, str)
        parts = urlsplit(url)
        expect(
            parts.scheme == "http" and parts.hostname and parts.port,
            f"metrics_url() with {situation} is {url!r}, not http://HOST:PORT/PATH",
        )
        expect(
            parts.hostname not in {"0.0.0.0", "::"},
            f"metrics_url() with {situation} is {url!r}: nobody can connect to that",
        )
        launch = ask("launch()", functools.partial(subject.driver.launch, context))
        own = {context.port, *launch.extra_ports.values()}
        expect(
            parts.port in own,
            f"metrics_url() with {situation} is {url!r}, which is none of the engine's ports {sorted(own)}",
        )


def generation(subject: Subject) -> None:
    """A request that can be sent."""
    for situation, context in situations(subject.driver):
        with watched() as touched:
            call = ask(
                f"generation() with {situation}", functools.partial(subject.driver.generation, context)
            )
        expect(not touched, f"generation() is not pure: {'; '.join(touched[:3])}")
        _sendable(f"generation() with {situation}", call)


def _sendable(what: str, call: object) -> None:
    if not isinstance(call, HttpCall):
        same_type(what, call, HttpCall)
        return
    expect(_PATH.fullmatch(call.path), f"{what}: the path {call.path!r} is not like '/v1/completions'")
    expect(call.ok and all(100 <= status <= 599 for status in call.ok), f"{what}: ok is {call.ok}")
    expect(
        call.bearer_file is None or posixpath.isabs(call.bearer_file),
        f"{what}: bearer_file {call.bearer_file!r} is not an absolute path",
    )
    try:
        json.dumps(call.body, allow_nan=False)
    except (TypeError, ValueError) as error:
        expect(holds=False, message=f"{what}: the body is no JSON: {error}")


def generated(subject: Subject) -> None:
    """An answer without a text is ValueError: an engine that answers nonsense is not ready."""
    for what, body in hostile_bodies():
        text = ask_or_refusal(f"generated() of {what}", functools.partial(subject.driver.generated, body))
        expect(text is None, f"generated() found the text {text!r} in {what}; it should raise ValueError")


def tokens(subject: Subject) -> None:
    """An answer without counts is ValueError, or has only None."""
    for what, body in hostile_bodies():
        found = ask_or_refusal(f"tokens() of {what}", functools.partial(subject.driver.tokens, body))
        if found is None:
            continue
        same_type(f"tokens() of {what}", found, TierTokens)
        made_up = {field: value for field, value in found if value is not None}
        expect(not made_up, f"tokens() found {made_up} in {what}: what is missing is None")


def flush(subject: Subject) -> None:
    """For any tiers: the calls that empty them, or ValueError that says why not. No call for a tier it lacks."""
    driver, context = subject.driver, accepted(subject)
    for size in range(len(_TIERS) + 1):
        for chosen in itertools.combinations(_TIERS, size):
            what = f"flush() of {', '.join(chosen) or 'no tier'}"
            calls = ask_or_refusal(what, functools.partial(driver.flush, context, frozenset(chosen)))
            if calls is None:
                _says_why(what, functools.partial(driver.flush, context, frozenset(chosen)))
                continue
            same_type(what, calls, tuple)
            expect(chosen or not calls, f"{what} returned {len(calls)} calls")
            expect(
                calls or chosen != ("L1",),
                f"{what} returned no call: every engine has an L1, so this empties nothing",
            )
            for call in calls:
                _sendable(what, call)


def l3_switch(subject: Subject) -> None:
    """Off unless the operator wants it. Both calls or neither, each with a reason; a key in a private file of the launch."""
    driver = subject.driver
    for situation, context in situations(driver):
        for wanted in (False, True):
            asked = context.model_copy(update={"l3_switch": wanted, "host": "127.0.0.1"})
            answers = {}
            for on in (True, False):
                what = f"l3_switch(on={on}) with {situation}, l3_switch = {str(wanted).lower()}"
                call = functools.partial(driver.l3_switch, asked, on=on)
                with watched() as touched:
                    calls = ask_or_refusal(what, call)
                expect(not touched, f"{what} is not pure: {'; '.join(touched[:3])}")
                if calls is None:
                    _says_why(what, call)
                    continue
                same_type(what, calls, tuple)
                expect(calls, f"{what} returned no call: what cannot be done is a ValueError that says why")
                for each in calls:
                    _sendable(what, each)
                answers[on] = calls
            if not answers:
                continue
            what = f"l3_switch() with {situation}"
            expect(len(answers) == 2, f"{what} gives calls one way only: L3 could not be put back")
            expect(answers[True] != answers[False], f"{what} gives the same calls for on and off")
            expect(wanted, f"{what} gives calls although the settings do not ask for it")
            launch = ask("launch()", functools.partial(driver.launch, asked))
            private = {f.path for f in launch.files if f.private}
            for each in (*answers[True], *answers[False]):
                expect(
                    each.bearer_file is None or each.bearer_file in private or not launch.serves_http,
                    f"{what}: {each.bearer_file!r} is no file of the launch with mode 0600",
                )


def _says_why(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except ValueError as error:
        expect(str(error).strip(), f"{what} raised a ValueError without a reason")


CHECKS = (
    Check("observe-hostile", observe_hostile),
    Check("observe-quick", observe_quick),
    Check("observe-nothing", observe_nothing),
    Check("observe-reads", observe_reads),
    Check("observe-missing-is-none", observe_missing),
    Check("read-line-hostile", read_line_hostile),
    Check("read-line-quick", read_line_quick),
    Check("read-line-half", read_line_half),
    Check("read-line-harmless", read_line_harmless),
    Check("metrics-url", metrics_url),
    Check("generation", generation),
    Check("generated", generated),
    Check("tokens", tokens),
    Check("flush", flush),
    Check("l3-switch", l3_switch),
)
