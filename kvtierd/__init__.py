"""kvtierd: the node daemon that makes a tiered KV cache real on Ascend hosts."""

__version__ = "0.1.0"
