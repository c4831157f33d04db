"""Builds kvtierd's packages: the bundled interpreter directory, manuals, completion, .deb and .rpm."""
