"""``KVTIERD_<SECTION>__<KEY>`` from the environment, read by pydantic-settings.

A module of its own because that library brings readers for several clouds and takes longer to import than the
rest of a plan takes to make; most starts have no such variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import create_model
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from kvtierd.settings.model import Settings

PREFIX = "KVTIERD_"


class _Base(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", env_ignore_empty=True, extra="ignore"
    )


_FIELDS: dict[str, Any] = {name: (field.annotation, field) for name, field in Settings.model_fields.items()}
# Only a carrier of the fields, whose names and nesting the reader must know.
_Environment = create_model("_Environment", __base__=_Base, **_FIELDS)


class _Source(EnvSettingsSource):
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        super().__init__(_Environment)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._environment.items()}


def environment_values(environment: Mapping[str, str]) -> dict[str, Any]:
    """The values as nested dictionaries, section by section; JSON where a key takes a list or a table."""
    return dict(_Source(environment)())
