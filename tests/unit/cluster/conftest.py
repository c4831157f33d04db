"""The test directories are no packages; this lets these tests say ``from certificates_lab import ...``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
