from __future__ import annotations

import sys
from pathlib import Path

# The test directories are no packages; this lets the tests of this directory say ``from endpoint_lab import ...``.
sys.path.insert(0, str(Path(__file__).parent))
