"""Reads what the figures come from: log files, config.json, a running engine's metrics. The I/O of this room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvtierd.errors import WorkloadError
from kvtierd.http_get import HttpError, http_get
from kvtierd.plan.engine import EngineDriver
from kvtierd.workload.dataset.records import Skips, read_lines
from kvtierd.workload.sizing.figures import TokenFigure
from kvtierd.workload.sizing.from_config import Spread, figure_of_config, parse_config
from kvtierd.workload.sizing.from_engine import engine_log, figure_of_metrics

_MOST_CONFIG_BYTES: Final = 16 * 1024 * 1024
_MOST_METRICS_BYTES: Final = 32 * 1024 * 1024
_SCRAPE_SECONDS: Final = 5.0
_MOST_LINE_BYTES: Final = 64 * 1024


def ask_log(
    path: Path, drivers: Mapping[str, EngineDriver], *, cards: int, block_tokens: int | None
) -> TokenFigure:
    """From an engine's log, plain or packed.

    Raises:
        WorkloadError: as :meth:`EngineLog.figure`; ``dataset.unreadable``, ``dataset.encoding`` for a binary file,
            ``dataset.damaged``.
    """

    def lines() -> Iterator[str]:
        for _, line in read_lines(path, Skips()):
            yield line[:_MOST_LINE_BYTES].decode("utf-8", "replace")

    return engine_log(lines(), drivers).figure(cards=cards, block_tokens=block_tokens)


def ask_config(path: Path, *, spread: Spread, dtype: str | None) -> TokenFigure:
    """From a model's config.json, or the directory that has it.

    Raises:
        WorkloadError: as ``parse_config`` and ``figure_of_config``; ``sizing.unreadable``.
    """
    file = path / "config.json" if path.is_dir() else path
    return figure_of_config(
        parse_config(_content(file, _MOST_CONFIG_BYTES), str(file)), spread=spread, dtype=dtype
    )


def ask_metrics(where: str, drivers: Mapping[str, EngineDriver], *, cards: int, replicas: int) -> TokenFigure:
    """From a running engine, ``http://HOST:PORT[/metrics]``, or a file with a scrape.

    Raises:
        WorkloadError: as ``figure_of_metrics``; ``sizing.unreadable``; ``sizing.metrics`` for another status than 200.
        WorkloadError: ``http.unreachable`` and the like, when nobody answers.
    """
    if "://" in where:
        text = asyncio.run(_scrape(where))
    else:
        text = _content(Path(where), _MOST_METRICS_BYTES).decode("utf-8", "replace")
    return figure_of_metrics(text, drivers, cards=cards, replicas=replicas)


async def _scrape(url: str) -> str:
    scheme, _, rest = url.partition("://")
    if not rest.partition("/")[2]:
        url = f"{scheme}://{rest.rstrip('/')}/metrics"
    try:
        answer = await http_get(url, timeout_seconds=_SCRAPE_SECONDS, most_body_bytes=_MOST_METRICS_BYTES)
    except HttpError as error:
        raise WorkloadError(
            error.message,
            why=error.why,
            hint=error.hint or "name a running engine, http://HOST:PORT; kvtierctl status shows which run",
            code=error.stable_code,
        ) from None
    if answer.status != 200:
        raise WorkloadError(
            f"{url} answered {answer.status}",
            hint="name the engine's /metrics; SGLang has them with --enable-metrics only",
            code="sizing.metrics",
        )
    return answer.body.decode("utf-8", "replace")


def _content(path: Path, most_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise WorkloadError(
            f"cannot read {path}: {error.strerror}",
            hint="ls -l shows what is there",
            code="sizing.unreadable",
        ) from None
    if len(content) > most_bytes:
        raise WorkloadError(
            f"{path} is larger than {most_bytes:,} bytes",
            hint="name the model's config.json, or one scrape of an engine's /metrics",
            code="sizing.unreadable",
        )
    return content


def number(value: float | None) -> Any:
    """A number as JSON shows it best: whole where it is whole, else three decimals."""
    if value is None:
        return None
    return int(value) if value == int(value) else round(value, 3)
