"""Several hosts, one master: the election, its durable memory, and what drives it."""
