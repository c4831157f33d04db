"""The local endpoint: a process that engines and pool holders take for the MetaService, for ever.

It relays to wherever the MetaService is, answers requests in flight when that goes away, holds new ones
during a planned stop, keeps new clients waiting until the survivors are back, and counts. It outlives the
daemon and does not depend on it. Start it with ``python -m kvtierd.endpoint --config FILE.json``.

Inside: ``link`` (one connection, no I/O), ``state`` (the whole endpoint, no I/O), ``clients`` (who is
connected, no I/O); ``relay``, ``door``, ``watcher`` and ``service`` move the bytes; ``control`` is how the
daemon talks to it.
"""
