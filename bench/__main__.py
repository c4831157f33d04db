"""``python -m bench``: all benchmarks, one table."""

from __future__ import annotations

from bench import endpoint, engines, node
from bench.report import print_table

print_table([*node.rows(), *endpoint.rows(), *engines.rows()])
