"""The gRPC control service on a unix socket, and its client."""
