"""Who is the master: what a coordinator is, the ways of naming one, and how the nodes talk to each other."""

import os

# Units are started while gRPC runs; its fork handlers would only get in their way.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# It writes a line to standard error for every handshake that fails, which anybody in the network can make happen.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
