"""The table of known issues: faults of certain versions of other people's software, as data (``known_issues.toml``).

An issue holds where the component's version is in ``versions`` and every word of ``when`` is true; a word that cannot be
told from the settings leaves it open.
"""

from __future__ import annotations

import json
import re
import tomllib
from importlib import resources
from typing import Annotated, Any, Final, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kvtierd.errors import UsageError
from kvtierd.settings import Settings

FILE: Final = "known_issues.toml"
Component = Literal["memcache", "vllm", "vllm-ascend", "sglang", "driver", "cann"]

WORDS: Final = {
    "pool": "an engine uses the pool",
    "pipeline": "pipeline parallelism",
    "hybrid-model": "a model with hybrid attention",
    "multi-host": "several hosts",
    "prefill-decode": "prefill and decode apart",
    "recompute": "kv_load_failure_policy = recompute",
    "direct": "engines talk to the MetaService themselves (endpoint = direct)",
    "ssd": "the SSD tier",
    "l2": "host memory as the engine's second tier",
    "container": "engines in containers",
    "ascend-scheduler-config": "ascend_scheduler_config in the engine's options",
    "torchair-graph-config": "torchair_graph_config in the engine's options",
    "mooncake": "the backend mooncake",
}
"""Every word that ``when`` may have, and what it means."""


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f"{text!r} is not a version specifier of PEP 440") from None
    return text


def _word(text: str) -> str:
    if text not in WORDS:
        raise ValueError(f"{text!r} is none of {', '.join(WORDS)}")
    return text


class KnownIssue(BaseModel):
    """One issue.

    Attributes:
        id: Stable, begins with the component.
        versions: PEP 440; "" is every version known so far.
        when: Words of ``WORDS``, all of which must be true.
        severity: As of a check: note, warn, or fail (does not work, or gives wrong results).
        handled: kvtierd works around it; it matters to those who run the component by hand.
        title: What happens.
        advice: What to do.
        source: ``owner/repo#number``, a security advisory, or where it was measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)+$")]
    component: Component
    versions: Annotated[str, AfterValidator(_specifier)]
    when: list[Annotated[str, AfterValidator(_word)]] = Field(default_factory=list)
    severity: Literal["note", "warn", "fail"]
    handled: bool = False
    title: Annotated[str, Field(min_length=10, max_length=160)]
    advice: Annotated[str, Field(min_length=10, max_length=400)]
    source: Annotated[
        str,
        Field(pattern=r"^([\w.-]+/[\w.-]+#\d+|GHSA(-[0-9a-z]{4}){3}|measured with \S.*|documented in \S.*)$"),
    ]

    def concerns(self, version: str) -> bool | None:
        """Whether this version has it; ``None`` when the version cannot be read."""
        read = read_version(version)
        return None if read is None else SpecifierSet(self.versions).contains(read, prereleases=True)


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    issue: list[KnownIssue]


def known_issues() -> tuple[KnownIssue, ...]:
    """The issues that kvtierd brings, in the order of the file. Raises ``UsageError``."""
    return parse_issues((resources.files("kvtierd.doctor") / FILE).read_text("utf-8"))


def parse_issues(text: str) -> tuple[KnownIssue, ...]:
    """The issues of a table in TOML.

    Raises:
        UsageError: ``usage``: it is not of the form above; an id is given twice or does not begin with its component.
    """
    try:
        found = _Table.model_validate(tomllib.loads(text)).issue
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{FILE} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{FILE}: {place}: {first['msg']}") from None
    seen: set[str] = set()
    for issue in found:
        if issue.id in seen:
            raise UsageError(f"{FILE}: {issue.id} is there twice")
        if not issue.id.startswith(f"{issue.component}-"):
            raise UsageError(f"{FILE}: {issue.id} does not begin with {issue.component}-")
        seen.add(issue.id)
    return tuple(found)


def read_version(text: str) -> Version | None:
    """A version as packages, driver and CANN write it (``0.22.1rc1``, ``25.0.rc1.1``, ``8.3.RC2``)."""
    match = re.match(r"v?(\d+(?:\.\d+)*)[.-]?((?:rc|a|b|alpha|beta|post|dev)\.?\d+)?", text.strip().lower())
    try:
        return Version(text)
    except InvalidVersion:
        pass
    try:
        return Version(f"{match[1]}{(match[2] or '').replace('.', '')}") if match else None
    except InvalidVersion:
        return None


def words_that_hold(settings: Settings | None) -> dict[str, bool]:
    """Word -> whether it is true here; one that cannot be told is missing."""
    if settings is None:
        return {}
    options = [json.dumps(engine.args, default=str) for engine in settings.engine]
    return {
        "pool": any(_uses_pool(engine.args, engine.role) for engine in settings.engine),
        "pipeline": any(
            _parallel(e.args, "pipeline-parallel-size", "pp-size", "pp") > 1 for e in settings.engine
        ),
        "multi-host": len(settings.cluster.nodes) > 1,
        "prefill-decode": any(engine.role != "both" for engine in settings.engine),
        "recompute": any("recompute" in text for text in options),
        "direct": settings.meta.endpoint == "direct",
        "ssd": settings.meta.local_conf.get("ock.mmc.local_service.storage.enabled", "").lower() == "true",
        "l2": any(engine.l2 for engine in settings.engine),
        "container": any(engine.runner == "docker" for engine in settings.engine),
        "ascend-scheduler-config": any("ascend_scheduler_config" in text for text in options),
        "torchair-graph-config": any("torchair_graph_config" in text for text in options),
        "mooncake": any("mooncake" in text.lower() for text in options),
    }


def _uses_pool(args: dict[str, Any], role: str) -> bool:
    return role != "decode" and args.get("l3", True) is not False


def _parallel(args: dict[str, Any], *names: str) -> int:
    for name in names:
        value = args.get(name, args.get(name.replace("-", "_")))
        if value is not None:
            try:
                return int(value)
            except (TypeError, ValueError):
                return 1
    return 1
