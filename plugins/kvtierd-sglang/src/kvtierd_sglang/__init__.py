"""SGLang under kvtierd: how it is launched, watched, flushed and proved. Importing it imports no SGLang."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"

READ_VERSION: Final = "0.5.23"
"""The release of SGLang whose source and behaviour this plugin was made from."""
