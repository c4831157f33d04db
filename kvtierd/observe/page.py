"""The status page: one HTML document with its style and its script inside, and a policy that allows nothing else.

Everything the script shows goes in as text (``textContent``), never as HTML: reasons and events carry words of engines.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from typing import NamedTuple


class Page(NamedTuple):
    """The document, and the ``Content-Security-Policy`` that fits it."""

    body: bytes
    policy: str


def load_page() -> Page:
    """Reads it from the package, once at the exporter's start."""
    files = importlib.resources.files("kvtierd.observe") / "status_page"
    style = (files / "status.css").read_text(encoding="utf-8")
    script = (files / "status.js").read_text(encoding="utf-8")
    html = (files / "status.html").read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Page(html.replace("%STYLE%", style).replace("%SCRIPT%", script).encode(), policy)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
