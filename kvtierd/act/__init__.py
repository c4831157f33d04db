"""Carries decisions out; the journal says what was done, why, and what came of it."""
