"""The local endpoint: a process that engines and pool holders take for the MetaService, for ever.

It relays to wherever the MetaService is, answers requests in flight when that goes away, holds new ones
during a planned stop, keeps new clients waiting until the survivors are back, and counts. It outlives the
daemon and does not depend on it. Start it with ``python -m kvtierd.endpoint --config FILE.json``.

In a cluster the MetaService listens on its host's loopback only. The endpoint of the node that is master relays to it for
its own clients and for the endpoints of the other nodes, which reach it over mutual TLS (a *hop*). What a daemon has to
say to it, and when, is in ``control``.

Inside, without I/O: ``link`` (one connection), ``flight``, ``actions``, ``state`` (the whole endpoint), ``clients`` (who is
connected), ``epochs`` (which master counts), ``hop`` (what endpoints say to each other), ``names`` (in certificates),
``peers``, ``targets``. ``pump``, ``relay``, ``door``, ``dial``, ``inbound``, ``watcher`` and ``service`` move the bytes;
``certificates``, ``saver`` and ``statefile`` read and write files; ``control``, ``commands`` and ``status`` talk with the
daemon.
"""
