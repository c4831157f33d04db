"""Packages that only the workload tools need: brought in when used, and named when missing."""

from __future__ import annotations

import importlib
from typing import Any

from kvtierd.errors import WorkloadError


def need(module: str, purpose: str) -> Any:
    """The module, imported.

    Args:
        module: Its dotted name, for example ``zstandard``.
        purpose: What it is for, to stand after "is needed to", for example ``read .zst files``.

    Raises:
        WorkloadError: ``workload.missing-package``.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise WorkloadError(
            f"the Python package {module.partition('.')[0]} is needed to {purpose}",
            why=str(error),
            hint="pip install 'kvtierd[workload]'; the .deb and .rpm packages have it",
            code="workload.missing-package",
        ) from None
