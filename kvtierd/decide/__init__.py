"""PURE: from pictures to proposed actions with reasons, within budgets. No I/O, no clock."""
