"""Supervision of units: backends that run processes, probes, restart policy, the state machine."""
