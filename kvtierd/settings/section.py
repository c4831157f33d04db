"""What the tables of the settings are made of: a base, and the types that several of them use."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvtierd.quantities import parse_duration, parse_size

Size = Annotated[int, BeforeValidator(parse_size)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
Port = Annotated[int, Field(ge=1025, le=65535)]

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62})")


def _absolute(value: object) -> object:
    if isinstance(value, str) and not value.startswith("/"):
        raise ValueError(f"{value!r} is not an absolute path")
    return value


def _unit_name(value: object) -> object:
    if isinstance(value, str) and not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a name: small letters, digits, '.', '_' and '-', at most 63")
    return value


AbsolutePath = Annotated[str, BeforeValidator(_absolute)]
UnitName = Annotated[str, BeforeValidator(_unit_name)]


class Section(BaseModel):
    """Base of all tables: immutable, unknown keys are errors.

    Not pydantic's strict mode: values from the environment arrive as text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunnerSettings(Section):
    """What [meta] and [[engine]] share: as a process of the host, or in a container."""

    runner: Literal["host", "docker"] = Field(
        "host", description="host: as a process; docker: in a container"
    )
    image: str | None = Field(
        None, description="container image (runner = docker)",
        examples=["quay.io/ascend/vllm-ascend:releases-v0.13.0-openeuler"],
    )  # fmt: skip
    mounts: tuple[str, ...] = Field(
        (),
        description="further bind mounts, source:target[:ro] (runner = docker)",
        examples=[["/data/weights:/root/.cache"]],
    )

    @model_validator(mode="after")
    def _container(self) -> Self:
        if self.runner == "docker" and not self.image:
            raise ValueError("runner docker needs an image")
        if self.runner == "host" and (self.image or self.mounts):
            written = "image" if self.image else "mounts"
            raise ValueError(
                f'{written} is for a container; write runner = "docker" as well, or leave it out'
            )
        # A word of docker's command line: one that begins with a dash would be an option.
        if self.image and not re.fullmatch(r"[\w][\w./:@+-]*", self.image):
            raise ValueError(f"image {self.image!r} is not the name of an image")
        wrong = [m for m in self.mounts if not re.fullmatch(r"/[^:]*:/[^:]*(:ro)?", m)]
        if wrong:
            raise ValueError(f"mount {wrong[0]!r} is not of the form /source:/target[:ro]")
        return self
