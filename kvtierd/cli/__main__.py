"""``python -m kvtierd.cli`` is kvtierctl."""

from kvtierd.cli import main

main()
