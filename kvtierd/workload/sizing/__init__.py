"""How large a pool has to be: bytes per token, demand, and the hit rate that each size would give."""
