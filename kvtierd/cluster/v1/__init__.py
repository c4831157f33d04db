"""Generated from proto/kvtierd/v1; renew with `make proto`."""
