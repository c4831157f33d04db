"""Proof that an engine's tiers work: the same text comes back from each of them, and from no other."""
