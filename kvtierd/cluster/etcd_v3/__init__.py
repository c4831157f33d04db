"""Generated from proto/etcd; renew with `make proto`."""
