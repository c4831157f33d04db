"""An emulated Ascend driver, so that the real MemCache pool runs on a host without an NPU.

``build`` compiles the driver on demand; ``launch`` runs a command in a private mount namespace in which
MemCache finds it. Only ``series = "emulated"`` uses this room: it is for development, tests and the demo.

This package imports nothing by itself: ``launch`` runs before every emulated unit and must start fast.
"""
