"""Writes docs/checks.md from the checks: ``python -m kvtierd.doctor.page > docs/checks.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from kvtierd.checks import Check
from kvtierd.doctor.registry import built_in

HEAD = """# What doctor checks

<!-- made by: make docs-checks -->

`kvtierctl doctor` looks at this host, at the settings, and with `--conf FILE` at MemCache files written by hand; with a
command line after `--` at an engine's arguments. It changes nothing, needs no daemon, and ends within ten seconds: what
does not answer is `unknown`, with the reason. A check ends as

| | |
|---|---|
| `ok` | as it should be, or there is nothing here to look at |
| `note` | worth knowing, nothing to mend |
| `unknown` | it could not be found out, and why |
| `warn` | it works now and will hurt |
| `fail` | it does not work, or gives wrong results; exit status 1 |

`--only GROUP` or `--only ID` chooses, `--fix-hints` adds what stands here, `--json` is for programs, `--root DIR` looks at
a host that is only a directory, its commands recorded in `DIR/.commands`. Checks marked below are made by kvtierd before it
starts a unit: while one fails, units of those kinds are not started, and `kvtierctl status` says why; what runs goes on.
Plugins add checks of their own ([plugins.md](plugins.md)).
"""


def page(checks: Sequence[Check]) -> str:
    """The whole page, in Markdown."""
    return "\n".join([HEAD, *_contents(checks), *_groups(checks)])


def _contents(checks: Sequence[Check]) -> Iterator[str]:
    yield "| check | what should be so |"
    yield "|---|---|"
    for check in checks:
        yield f"| [`{check.id}`](#{check.id.replace('.', '')}) | {check.title} |"
    yield ""


def _groups(checks: Sequence[Check]) -> Iterator[str]:
    group = ""
    for check in checks:
        if check.group != group:
            group = check.group
            yield f"## {group}"
            yield ""
        yield f"### {check.id}"
        yield ""
        yield f"**{check.title}.** {check.why}"
        yield ""
        yield f"Looks at: {_first_paragraph(check)}"
        yield ""
        yield f"To mend it: {check.fix}."
        if check.blocks:
            kinds = ", ".join(sorted(check.blocks))
            yield ""
            yield f"Before a start of: {kinds}."
        yield ""


def _first_paragraph(check: Check) -> str:
    words = " ".join((check.examine.__doc__ or "").split("\n\n")[0].replace("``", "`").split())
    return words[:1].lower() + words[1:] if not words[:2].isupper() else words


if __name__ == "__main__":
    sys.stdout.write(page(built_in()))
