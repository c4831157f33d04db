"""Regenerates the gRPC code from proto/. ``--check`` only compares (used by the tests).

protoc names modules by the proto path (``kvtierd.v1``); the code lives in the rooms that use it, so the import in the
gRPC files is rewritten.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
# Source -> the package its code goes to.
TARGETS = {
    "kvtierd/v1/control.proto": "kvtierd.control.v1",
    "kvtierd/v1/peers.proto": "kvtierd.cluster.v1",
    "etcd/rpc.proto": "kvtierd.cluster.etcd_v3",
}


def generate(source: str, package: str, into: Path) -> dict[Path, str]:
    """Path from the root -> content of all modules made from one source."""
    include = resources.files("grpc_tools") / "_proto"
    code = protoc.main(
        [
            "protoc",
            f"-I{ROOT / 'proto'}",
            f"-I{include}",
            f"--python_out={into}",
            f"--grpc_python_out={into}",
            f"--pyi_out={into}",
            str(ROOT / "proto" / source),
        ]
    )
    if code != 0:
        raise SystemExit(code)
    directory = Path(source).parent
    target = Path(package.replace(".", "/"))
    files = {target / "__init__.py": f'"""Generated from proto/{directory}; renew with `make proto`."""\n'}
    named = f"from {str(directory).replace('/', '.')} import"
    for path in sorted((into / directory).iterdir()):
        files[target / path.name] = path.read_text().replace(named, f"from {package} import")
    return files


def main() -> None:
    """Writes or compares."""
    files: dict[Path, str] = {}
    for source, package in TARGETS.items():
        with tempfile.TemporaryDirectory() as scratch:
            files |= generate(source, package, Path(scratch))
    if "--check" in sys.argv:
        stale = [
            str(name)
            for name, text in files.items()
            if not (ROOT / name).exists() or (ROOT / name).read_text() != text
        ]
        if stale:
            raise SystemExit(f"stale generated files: {', '.join(stale)}; run make proto")
        return
    for name, text in files.items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    main()
