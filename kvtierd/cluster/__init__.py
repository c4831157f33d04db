"""Several hosts, one pool: who is the master, and how every node learns of it."""
