"""Regenerates kvtierd/control/v1 from proto/. ``--check`` only compares (used by the tests).

protoc names modules by the proto path (``kvtierd.v1``); the code lives in ``kvtierd/control/v1``, so the
import in the gRPC file is rewritten.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "kvtierd" / "control" / "v1"


def generate(into: Path) -> dict[str, str]:
    """File name -> content of all generated modules."""
    include = resources.files("grpc_tools") / "_proto"
    code = protoc.main(
        [
            "protoc",
            f"-I{ROOT / 'proto'}",
            f"-I{include}",
            f"--python_out={into}",
            f"--grpc_python_out={into}",
            f"--pyi_out={into}",
            str(ROOT / "proto/kvtierd/v1/control.proto"),
        ]
    )
    if code != 0:
        raise SystemExit(code)
    files = {"__init__.py": '"""Generated from proto/kvtierd/v1; renew with `make proto`."""\n'}
    for path in sorted((into / "kvtierd" / "v1").iterdir()):
        text = path.read_text().replace("from kvtierd.v1 import", "from kvtierd.control.v1 import")
        files[path.name] = text
    return files


def main() -> None:
    """Writes or compares."""
    with tempfile.TemporaryDirectory() as scratch:
        files = generate(Path(scratch))
    if "--check" in sys.argv:
        stale = [
            n for n, text in files.items() if not (TARGET / n).exists() or (TARGET / n).read_text() != text
        ]
        if stale:
            raise SystemExit(f"stale generated files: {', '.join(stale)}; run make proto")
        return
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (TARGET / name).write_text(text)


if __name__ == "__main__":
    main()
