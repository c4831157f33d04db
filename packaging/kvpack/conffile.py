"""The settings file the packages install: short enough to read, valid as it is, every key in it."""

from __future__ import annotations

import textwrap

from kvpack.keys import Key, Table, tables

WIDTH = 100
SET_HERE = {("[pool]", "dram"): '"32GiB"'}
HEAD = """\
# Settings of kvtierd. What each key means at length: man 5 kvtierd.toml
#
#   kvtierctl conf check /etc/kvtierd/kvtierd.toml    is it right?
#   kvtierctl plan                                    what would happen? (touches nothing)
#   systemctl enable --now kvtierd                    do it, now and after every boot
#   systemctl reload kvtierd                          take changes; engines go on
#
# Lines that begin with "#" and a key show the default. Files in /etc/kvtierd/conf.d/*.toml are laid over this
# one, by name. Whole examples are in /usr/share/doc/kvtierd/examples/.
"""


def render() -> str:
    """The file's text."""
    parts = [HEAD]
    parts += [_table(table) for table in tables()]
    return "\n".join(parts)


def _table(table: Table) -> str:
    lines = [f"# {line}" for line in textwrap.wrap(_sentence(table.description), WIDTH)]
    # A header that stands there costs nothing, and a key that is uncommented below it is in the right table.
    lines.append(f"#{table.header}" if table.means_something else table.header)
    lines += [line for key in table.keys for line in _key(table, key)]
    return "\n".join(lines) + "\n"


def _key(table: Table, key: Key) -> list[str]:
    text = f"{key.description} ({key.kind})"
    lines = ["", *(f"# {line}" for line in textwrap.wrap(text, WIDTH))]
    value = SET_HERE.get((table.header, key.name))
    if value is not None:
        return [*lines, f"{key.name} = {value}"]
    if key.default is not None:
        empty = key.default in {"[]", "{}", '""'} and key.examples
        example = f"    # for example: {key.name} = {key.examples[0]}" if empty else ""
        return [*lines, f"#{key.name} = {key.default}{example}"]
    return [
        *lines,
        f"# for example: {key.name} = {key.examples[0]}" if key.examples else f"# {key.name}: not set",
    ]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
