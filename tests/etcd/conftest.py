"""Mode etcd is in the making: these tests are not part of ``make test`` yet, and not all of them pass.

What they share is with the cluster's unit tests.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "cluster"))
sys.path.insert(0, str(Path(__file__).parent))
