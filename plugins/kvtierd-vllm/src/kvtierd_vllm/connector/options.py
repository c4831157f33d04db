"""The connector's options: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Final

CONF_VARIABLE: Final = "MMC_LOCAL_CONFIG_PATH"
MIB: Final = 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """All of them have defaults.

    Attributes:
        namespace: First part of every key. Engines share blocks only within one namespace.
        call_limit_seconds: How long a request may wait for the tier, for its lookup or for its load.
        init_deadline_seconds: When joining the pool counts as hung. The engine serves without the tier meanwhile.
        probe_seconds: How soon after a failure the tier is tried again; doubles up to half a minute.
        lane_bytes: Size of one of the six transfer buffers. At least one block fits in any case.
    """

    namespace: str = "kv"
    call_limit_seconds: float = 1.0
    init_deadline_seconds: float = 10.0
    probe_seconds: float = 1.0
    lane_bytes: int = 32 * MIB

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Options:
        """Checks what vLLM hands over.

        Raises:
            ValueError: An unknown name or an unusable value; the text says which and what would do.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in extra.items():
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                meant = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(fields)}"
                raise ValueError(f"kv_connector_extra_config: unknown option {name!r}{meant}")
            values[name] = _checked(name, value)
        return cls(**values)


def _checked(name: str, value: Any) -> Any:
    if name == "namespace":
        # "@" separates the parts of a key.
        if not isinstance(value, str) or not value or len(value) > 64 or "@" in value or not value.isascii():
            raise ValueError(
                f"kv_connector_extra_config: namespace {value!r} must be 1 to 64 ASCII characters without @"
            )
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"kv_connector_extra_config: {name} {value!r} must be a positive number")
    if name == "lane_bytes":
        return int(value)
    return float(value)
