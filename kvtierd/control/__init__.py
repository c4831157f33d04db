"""The gRPC control service on a unix socket, and its client."""

import os

# Before grpc is imported: the daemon starts processes beside it, and gRPC's fork handlers would only get in the way.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
