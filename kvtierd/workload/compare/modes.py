"""PURE: what an engine's ``args`` must be for each mode of a comparison, and the drop-in that says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kvtierd.errors import WorkloadError

DROP_IN: Final = "zz-kvtierctl-bench.toml"
Args = Mapping[str, Any]


class Mode(NamedTuple):
    """One mode: its name for people, for file names, and what is laid over the engine's args."""

    label: str
    name: str
    args: Args


# Driver (or the beginning of its name) -> args without any cache, and with the engine's own only.
_SWITCHES: Final[Mapping[str, tuple[Args, Args]]] = MappingProxyType(
    {
        "refengine": ({"l3": "off", "prefix-cache": "off"}, {"l3": "off"}),
        "vllm": ({"l3": "off", "enable-prefix-caching": False}, {"l3": "off", "enable-prefix-caching": True}),
        "sglang": ({"l3": "off", "l2": "off", "disable-radix-cache": True}, {"l3": "off", "l2": "off"}),
    }
)


def modes_for(plugin: str) -> tuple[Mode, Mode, Mode]:
    """The three modes, in the order in which they run. The last one is the engine as the settings have it.

    Raises:
        WorkloadError: it is not known how this kind of engine does without its caches.
    """
    found = next(
        (switches for kind, switches in _SWITCHES.items() if plugin.split("-", maxsplit=1)[0] == kind), None
    )
    if found is None:
        raise WorkloadError(
            f"it is not known how an engine of the driver {plugin!r} does without its caches",
            hint="put it into each mode by hand, kvtierctl bench run in each, then kvtierctl bench report DIR DIR DIR",
            code="compare.driver",
        )
    nothing, own = found
    return (
        Mode("no cache", "no-cache", nothing),
        Mode("prefix cache", "prefix-cache", own),
        Mode("prefix cache + pool", "prefix-cache-and-pool", {}),
    )


def drop_in(engine: str, args: Args, written: Args) -> str:
    """The text of the drop-in. A key that the settings have in another spelling keeps that spelling.

    Args:
        engine: the engine's name in the settings.
        args: what is to be laid over.
        written: the engine's args as the settings have them.
    """
    spelled = {name.replace("_", "-"): name for name in written}
    lines = [f"{json.dumps(spelled.get(name, name))} = {json.dumps(value)}" for name, value in args.items()]
    return (
        "# Written by kvtierctl bench compare for as long as it runs. If it is still here afterwards, remove it and run\n"
        f"# kvtierctl apply.\n[[engine]]\nname = {json.dumps(engine)}\n[engine.args]\n"
        + "\n".join(lines)
        + "\n"
    )
