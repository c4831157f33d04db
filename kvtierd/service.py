"""The daemon as a service: its log, and what it tells systemd."""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal

import sdnotify
import structlog

LogFormat = Literal["auto", "json", "console"]


def configure_logging(level: str, form: LogFormat) -> None:
    """One line an event on stderr: JSON, or for people on a terminal. Journald adds its own time stamps."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
    ]
    if not os.environ.get("JOURNAL_STREAM"):
        processors.append(structlog.processors.TimeStamper(fmt="iso", utc=True))
    processors.append(
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if console
        else structlog.processors.JSONRenderer(sort_keys=True)
    )
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


class ServiceManager:
    """sd_notify: ready, status, watchdog, stopping. Without systemd every call does nothing.

    The variables are taken out of the environment, so that no child can ever speak in our name.
    """

    def __init__(self) -> None:
        self._notifier = sdnotify.SystemdNotifier()
        usec = os.environ.get("WATCHDOG_USEC", "")
        for_us = os.environ.get("WATCHDOG_PID", "") in {"", str(os.getpid())}
        self.watchdog_seconds = int(usec) / 1_000_000 if usec.isdecimal() and for_us else None
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
            os.environ.pop(name, None)

    def ready(self) -> None:
        """The daemon answers its control socket."""
        self._notifier.notify("READY=1")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._notifier.notify(f"STATUS={text}")

    def alive(self) -> None:
        """Feeds the watchdog. Call it only when the reconcile loop has just gone round."""
        self._notifier.notify("WATCHDOG=1")

    def reloading(self, monotonic_seconds: float) -> None:
        """A reload began; ``ready`` ends it."""
        self._notifier.notify(f"RELOADING=1\nMONOTONIC_USEC={int(monotonic_seconds * 1_000_000)}")

    def stopping(self) -> None:
        """The daemon is about to end."""
        self._notifier.notify("STOPPING=1")
