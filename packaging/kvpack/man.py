"""kvtierd(8), kvtierctl(1) and kvtierd.toml(5), from the command lines and the settings' model."""

from __future__ import annotations

import argparse

from kvpack import verbs
from kvpack.keys import Table, tables
from kvpack.roff import Page, bold, escape, italic
from kvtierd.daemon import argument_parser

FILES = (
    (
        "/etc/kvtierd/kvtierd.toml",
        "settings, see `kvtierd.toml`(5); `/etc/kvtierd/conf.d/*.toml` are laid over it",
    ),
    (
        "/var/lib/kvtierd",
        "state: the plan in force, hugepages that kvtierd raised, events, MemCache's files (conf/)",
    ),
    ("/run/kvtierd", "the control socket kvtierd.sock (mode 0660, group kvtierd) and records of processes"),
    ("/var/log/kvtierd", "MemCache's logs, and the output of units where no systemd keeps it"),
)
ENVIRONMENT = (
    ("KVTIERD_<SECTION>__<KEY>", "lays a value over the settings, as in `KVTIERD_POOL__DRAM=64GiB`"),
    ("KVTIERD_SETTINGS", "the settings file that kvtierctl uses when --settings is not given"),
    ("KVTIERD_SOCKET", "the control socket that kvtierctl uses when --socket is not given"),
)


def pages(version: str, date: str) -> dict[str, str]:
    """The pages' sources by file name. ``date`` as YYYY-MM-DD."""
    return {
        "kvtierd.8": _kvtierd(version, date),
        "kvtierctl.1": _kvtierctl(version, date),
        "kvtierd.toml.5": _settings(version, date),
    }


def _kvtierd(version: str, date: str) -> str:
    page = Page(
        "kvtierd", 8, version=version, date=date, summary="node daemon for a tiered KV cache on Ascend hosts"
    )
    actions = [a for a in argument_parser()._actions if a.option_strings]
    page.heading("Synopsis")
    page.roff(" ".join((bold("kvtierd"), *(f"[{_spelled(a)}]" for a in actions))))
    page.heading("Description")
    page.text(
        "kvtierd makes this host's part of a tiered KV cache real and keeps it real: HBM in the inference engine, and"
        " a shared DRAM pool over MemCache. From one settings file it makes a plan, reserves hugepages, writes"
        " MemCache's files, and runs the MetaService, the pool holders, a local endpoint and the engines.",
        "Units outlive the daemon. When it stops, is killed or is replaced by a new version, the units go on, and the"
        " next daemon adopts them. `kvtierctl stop --all` stops them.",
    )
    page.heading("Options")
    for action in actions:
        page.item(_spelled(action), action.help or "")
    page.heading("Signals")
    page.item(
        bold("SIGHUP"), "Reads the settings again, as `kvtierctl reload` does. No running unit is restarted."
    )
    page.item(
        bold("SIGTERM, SIGINT"),
        "Ends the daemon. Units go on, unless stop_units_on_exit is true in [daemon] of the settings.",
    )
    page.heading("Under systemd")
    page.text(
        "`kvtierd.service` starts the daemon; it wants `kvtierd-hugepages.service`, which reserves hugepages first and"
        " fails loudly when the kernel grants fewer. Units are in `kvtierd.slice`, as is the daemon:"
        " `systemctl stop kvtierd.slice` stops everything. Neither is enabled when the package is installed, since"
        " only the operator knows how much memory the pool may have.",
    )
    _common(page)
    return page.render()


def _spelled(action: argparse.Action) -> str:
    names = ", ".join(bold(option) for option in action.option_strings)
    return names if action.nargs == 0 else f"{names} {italic(str(action.metavar or action.dest.upper()))}"


def _kvtierctl(version: str, date: str) -> str:
    page = Page(
        "kvtierctl", 1, version=version, date=date, summary="look after the tiered KV cache of this host"
    )
    page.heading("Synopsis")
    page.roff(f"{bold('kvtierctl')} [{italic('OPTION')}]... {italic('VERB')} [{italic('ARGUMENT')}]...")
    page.heading("Description")
    page.text(verbs.program_help())
    page.heading("Options before the verb")
    for param in (*verbs.global_params(), verbs.HELP):
        page.item(_option(param), param.help)
    page.heading("Verbs")
    for verb in verbs.verbs():
        page.subheading(" ".join((*verb.words, *(_argument_words(p) for p in verb.arguments))))
        page.text(*verb.help.split("\n\n"))
        for param in verb.arguments:
            page.item(italic(param.metavar), param.help)
        for param in verb.options:
            page.item(_option(param), param.help)
    page.heading("Exit status")
    page.item("0", "All is well, or what was asked for is done.")
    page.item("1", "The thing asked about is bad, or what was asked for is refused; the reason is on stderr.")
    page.item("2", "The command line is wrong.")
    page.item("3", "The daemon cannot be reached.")
    _common(page)
    return page.render()


def _argument_words(param: verbs.Param) -> str:
    word = f"{param.metavar}..." if param.multiple else param.metavar
    return word if param.required else f"[{word}]"


def _option(param: verbs.Param) -> str:
    names = ", ".join(bold(opt) for opt in param.opts)
    return f"{names} {italic(param.metavar)}" if param.takes_value else names


def _settings(version: str, date: str) -> str:
    page = Page("kvtierd.toml", 5, version=version, date=date, summary="settings of kvtierd")
    page.heading("Synopsis")
    page.text("`/etc/kvtierd/kvtierd.toml`, `/etc/kvtierd/conf.d/*.toml`")
    page.heading("Description")
    page.text(
        "One TOML file. The files of conf.d beside it are laid over it by name, and the environment over those."
        " An [[engine]] of a drop-in with a known name changes that engine, one with a new name adds one."
        " `kvtierctl conf check` names the file, line and key of everything that is wrong.",
        'A `size` is text such as "64GiB" or "500MB": KiB, MiB, GiB and TiB count by 1024; kB, MB, GB and TB by'
        ' 1000. A `duration` is text such as "500ms", "10s" or "2min".',
    )
    for table in tables():
        page.heading(table.header)
        _describe(page, table)
    page.heading("Example")
    page.example(
        [
            "[pool]",
            'dram = "256GiB"',
            "",
            "[meta]",
            'python = "/usr/local/python3.11.14/bin/python3"',
            "",
            "[[engine]]",
            'name = "qwen3"',
            'plugin = "vllm-ascend"',
            'model = "/data/weights/Qwen3-32B"',
            "devices = [0, 1]",
            "port = 8113",
            "args = { tensor-parallel-size = 2, max-model-len = 32768 }",
        ]
    )
    _common(page)
    return page.render()


def _describe(page: Page, table: Table) -> None:
    page.text(table.description[:1].upper() + table.description[1:])
    for key in table.keys:
        if key.required:
            default = "required"
        elif key.default is None:
            default = "not set by default"
        else:
            default = f"default {key.default}"
        text = f"{key.description[:1].upper()}{key.description[1:]}. "
        page.item(f"{bold(key.name)} ({escape(key.kind)}; {escape(default)})", text.rstrip())
        if key.examples:
            page.roff(f"Example: {escape(f'{key.name} = {key.examples[0]}')}")


def _common(page: Page) -> None:
    page.heading("Files")
    for path, text in FILES:
        page.item(italic(path), text[:1].upper() + text[1:] + ".")
    page.heading("Environment")
    for name, text in ENVIRONMENT:
        page.item(bold(name), text[:1].upper() + text[1:] + ".")
    page.heading("See also")
    page.text(
        "`kvtierd`(8), `kvtierctl`(1), `kvtierd.toml`(5), `systemctl`(1); /usr/share/doc/kvtierd/operator.md"
    )
