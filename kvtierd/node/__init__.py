"""The running node: what the daemon's loop is made of, what it knows, and what operators can ask of it."""
