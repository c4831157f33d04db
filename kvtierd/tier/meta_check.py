"""Does the MetaService listen where its configuration says? MemCache ignores misspelt keys and binds defaults."""

from __future__ import annotations

import asyncio

from kvtierd.errors import MemcacheError
from kvtierd.memcache.listening import listening_addresses
from kvtierd.plan.model import UnitSpec
from kvtierd.units.backend import UnitProcess


async def check_listening(spec: UnitSpec, process: UnitProcess) -> str | None:
    """``None`` when all ports of the unit are bound by its process, else what is missing.

    A readiness check of the MetaService's unit, beside its probes.
    """
    try:
        bound = {port for _, port in await asyncio.to_thread(listening_addresses, process.pid)}
    except MemcacheError as error:
        return error.message
    missing = sorted(set(spec.ports) - bound)
    if not missing:
        return None
    others = sorted(bound - set(spec.ports))
    text = f"it does not listen on {', '.join(map(str, missing))}"
    return text + (f" but on {', '.join(map(str, others))}" if others else "")
