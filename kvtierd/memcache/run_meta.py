#!/usr/bin/env python3
"""Runs MemCache's MetaService so that a failed start is a failed process.

``MetaService.main()`` returns -1 on any start failure and the interpreter would then exit 0. This script exits
0 after SIGTERM, 1 on a failed start (the reason is on stderr, from MemCache) and 78 when the interpreter
that runs it has no usable memcache_hybrid.

It is run by path in the inference engine's interpreter: standard library and memcache_hybrid only, nothing of
kvtierd. MMC_META_CONFIG_PATH in the environment names the configuration.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

EXIT_FAILED = 1
EXIT_CONFIG = 78  # sysexits EX_CONFIG: retrying cannot mend it


def main() -> int:
    """Runs the MetaService until it is told to stop; the exit status."""
    path = os.environ.get("MMC_META_CONFIG_PATH", "")
    if not Path(path).is_file():
        print(f"kvtierd-meta: MMC_META_CONFIG_PATH={path!r} is not a file", file=sys.stderr)
        return EXIT_CONFIG
    # Run by path, the script's directory leads sys.path: its modules must not shadow the interpreter's own.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    try:
        from memcache_hybrid import MetaService
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries cannot be loaded
        print(f"kvtierd-meta: {sys.executable} has no usable memcache_hybrid: {error}", file=sys.stderr)
        return EXIT_CONFIG
    result = MetaService.main()
    if result != 0:
        print(f"kvtierd-meta: the MetaService failed to start (it returned {result})", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
