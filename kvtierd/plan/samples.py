"""Finding a few metrics in a long Prometheus text, for ``EngineDriver.observe``. Pure.

Engines export hundreds of series and a driver reads a handful of them, every second, for every engine.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

# What follows a sample's name: labels (a quoted value may hold braces and escapes), the value, perhaps a time stamp.
_REST: Final = re.compile(
    r'(?:\{(?P<labels>(?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+)\})?[ \t]+(?P<value>[^\s]+)(?:[ \t]+-?\d+)?[ \t]*\r?(?:\n|\Z)'
)
_LABEL: Final = re.compile(r'(?:^|,)\s*(\w+)\s*=\s*"((?:[^"\\]++|\\.)*+)"')
_KEPT_LABELS_CHARS: Final = 512
_ESCAPE: Final = re.compile(r"\\(.)")


class Sample(NamedTuple):
    """One sample: its labels, which must not be changed, and its value, which is finite."""

    labels: Mapping[str, str]
    value: float


def read_samples(metrics_text: str, names: Collection[str]) -> dict[str, list[Sample]]:
    """The samples of exactly these names, by name; a name without any is left out.

    Several times faster than a general parser, because lines of other names are not looked at. NaN and infinities are
    left out: a gauge that nothing was divided by yet is unknown.

    Raises:
        ValueError: A line of one of these names is not a sample.
    """
    text = f"\n{metrics_text}"
    samples: dict[str, list[Sample]] = {}
    for name in names:
        start, at = f"\n{name}", 0
        while (at := text.find(start, at)) >= 0:
            after = at + len(start)
            if text[after : after + 1] in {"{", " ", "\t", "\n", ""}:  # else it is a longer name
                found = _REST.match(text, after)
                if found is None:
                    raise ValueError(f"not a Prometheus sample: {text[at + 1 : at + 200].splitlines()[0]!r}")
                value = _number(name, found["value"])
                if math.isfinite(value):
                    labels = found["labels"] or ""
                    read = _labels_again if len(labels) <= _KEPT_LABELS_CHARS else _labels
                    samples.setdefault(name, []).append(Sample(read(labels), value))
            at = after
    return samples


def read_buckets(samples: Mapping[str, list[Sample]], name: str) -> dict[float, int] | None:
    """A histogram as upper bound -> how many were at most that, over all label sets; ``None`` when it is not there.

    Args:
        samples: What ``read_samples`` found.
        name: The buckets' name, ``..._bucket``.

    A series whose bound is no number is left out, and so are counts of bounds that not all label sets have: a sum over
    different ones would not be cumulative.
    """
    bounds: dict[float, list[float]] = {}
    for sample in samples.get(name, ()):
        try:
            bound = float(sample.labels.get("le", ""))
        except ValueError:
            continue
        if not math.isnan(bound):
            bounds.setdefault(bound, []).append(sample.value)
    most = max((len(values) for values in bounds.values()), default=0)
    counts = {b: int(sum(v)) for b, v in sorted(bounds.items()) if len(v) == most}
    return counts or None


def only_samples(metrics_text: str, names: Collection[str]) -> str:
    """The lines of a Prometheus text that are samples of these names, for a parser of one's own.

    Parsing only those costs a tenth of the time. Comment lines go too, so a parser sees the samples as untyped, under
    their full names.
    """
    kept = _sample_lines(frozenset(names)).findall(metrics_text)
    return "\n".join(kept) + "\n" if kept else ""


@functools.lru_cache(maxsize=32)
def _sample_lines(names: frozenset[str]) -> re.Pattern[str]:
    choice = "|".join(re.escape(name) for name in sorted(names))
    return re.compile(rf"^(?:{choice})(?=[{{ ]).*$", re.MULTILINE)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is {text[:40]!r}, not a number") from None


def _labels(text: str) -> Mapping[str, str]:
    labels = dict(_LABEL.findall(text))
    if "\\" in text:
        labels = {name: _ESCAPE.sub(_unescaped, value) for name, value in labels.items()}
    return labels


# An engine's labels are the same at every scrape. Few and short ones are kept, so that nothing grows.
_labels_again = functools.lru_cache(maxsize=1024)(_labels)


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]
