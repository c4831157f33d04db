"""``[engine.args]`` as vLLM's command line, and what the drivers find out on the way. Pure.

vLLM takes ``max-model-len`` and ``max_model_len`` as the same option; kvtierd passes the operator's spelling on and
compares the spelling with dashes. Booleans are ``--x`` and ``--no-x``, tables become JSON, lists several values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from kvtierd.plan.engine import Remarks

_KEY: Final = re.compile(r"[A-Za-z](?:[A-Za-z0-9]|[-_.](?=[A-Za-z0-9]))+")

# What kvtierd sets itself, and where the operator says it instead.
OWNED: Final[Mapping[str, str]] = {
    "model": "write model = ... in [[engine]]",
    "model-tag": "write model = ... in [[engine]]",
    "host": "write host = ... in [[engine]]",
    "port": "write port = ... in [[engine]]",
    "uds": "kvtierd talks to engines over TCP: write host and port in [[engine]]",
    "kv-transfer-config": "kvtierd writes it; its options go under [engine.args.kv-transfer]",
    "headless": "kvtierd sets it on every node of the engine but the first",
    "data-parallel-start-rank": "kvtierd derives it from the node's place among the engine's nodes",
    "data-parallel-rank": "kvtierd derives it from the node's place among the engine's nodes",
    "data-parallel-address": "kvtierd takes the address of the engine's first node from [cluster] peers",
    "config": "vLLM's own file would hide options from kvtierd: write them under [engine.args]",
}


def canonical(key: str) -> str:
    """``max_num-seqs`` -> ``max-num-seqs``; what follows a dot (a key inside a table) stays as it is."""
    name, dot, rest = key.partition(".")
    return name.replace("_", "-").lower() + dot + rest


def by_name(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under their spelling with dashes."""
    return {canonical(key): value for key, value in args.items()}


def count_of(named: Mapping[str, Any], name: str, findings: Remarks, default: int = 1) -> int:
    """A number of processes (at least 1) from the arguments; a wrong one is refused and counts as the default."""
    value = named.get(name, default)
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        findings.refuse("engine.bad-argument", f"args.{name} is {value!r}, not a whole number from 1 up")
        return default
    return value


def command_line(
    args: Mapping[str, Any], findings: Remarks, *, handled: Collection[str] = ()
) -> tuple[str, ...]:
    """vLLM's options for these arguments, in their order.

    Args:
        args: the operator's ``[engine.args]``.
        findings: where refusals go.
        handled: options (with dashes) that the driver has dealt with itself.
    """
    argv: list[str] = []
    seen: dict[str, str] = {}
    for key, value in args.items():
        name = canonical(key)
        if name in seen:
            findings.refuse("engine.argument-twice", f"args.{key} and args.{seen[name]} are the same option")
            continue
        seen[name] = key
        if name in handled:
            continue
        if name in OWNED:
            findings.refuse("engine.owned-argument", f"kvtierd sets --{name} itself", OWNED[name])
        elif not _KEY.fullmatch(key):
            findings.refuse("engine.bad-argument", f"args.{key} is not the name of an option of vLLM")
        else:
            argv += _option(key, value, findings)
    return tuple(argv)


def compact_json(value: object) -> str:
    """JSON without blanks, non-ASCII text as it is."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _option(key: str, value: Any, findings: Remarks) -> list[str]:
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    if isinstance(value, list | tuple) and value and all(_is_scalar(v) for v in value):
        return [f"--{key}", *(str(v) for v in value)]
    if isinstance(value, Mapping | list | tuple) and value:
        try:
            text = compact_json(value)
        except (TypeError, ValueError) as error:
            findings.refuse("engine.bad-argument", f"args.{key} has no form in JSON: {error}")
            return []
    elif _is_scalar(value) and value != "":
        text = str(value)
    else:
        findings.refuse(
            "engine.bad-argument", f"args.{key} is {value!r}", "leave the key out, or give it a value"
        )
        return []
    # A value with a dash in front would be taken for the next option.
    return [f"--{key}={text}"] if text.startswith("-") else [f"--{key}", text]


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
