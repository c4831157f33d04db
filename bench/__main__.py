"""``python -m bench``: all benchmarks, one table."""

from __future__ import annotations

from bench import decide, endpoint, engines, node, observe, units
from bench.report import print_table

print_table([*node.rows(), *decide.rows(), *units.rows(), *endpoint.rows(), *engines.rows(), *observe.rows()])
