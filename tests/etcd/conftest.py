"""Mode etcd over real etcds: a part of ``make test-cluster``. What needs none is with the cluster's unit tests, and so is
the suite that all ways of naming a master have to pass."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "cluster"))
sys.path.insert(0, str(Path(__file__).parent))
