"""The reference engine: a small inference engine for developing and testing kvtierd, and its example plugin.

It is not for serving. Its weights are random numbers, so its text means nothing; what is real is the work: prefill
costs compute, KV blocks live in a bounded L1 cache, and full blocks go to and come from a MemCache pool (L3).
"""

__version__ = "0.1.0"

NOTICE = (
    "kvtierd reference engine: for development, tests and as the example plugin. "
    "Random weights, meaningless text, not for serving."
)
