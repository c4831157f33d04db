"""MemCache as processes and wires: the MetaService, the pool holder, their HTTP face and their framing."""
