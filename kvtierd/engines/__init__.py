"""The life of engines on top of units: ready by a generated token, drained before a stop, restarted one by one."""
