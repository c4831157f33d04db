"""Asks the real MemCache what it makes of a configuration. Run by test_conf_real.py inside the emulation.

Reads one JSON request a line: {"kind", "data" (latin-1 text of the file's bytes), "ports"}, and answers with one JSON
line: {"outcome": "up" | "refused", "listening", "log_path", "log_level", "dram", "output"}. The library is imported
once; each request is a forked child that is killed as soon as the answer is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 6.0
CLONE_NEWNET = 0x40000000
STARTED = "Starting meta service local_service"
BAD_STORE_URL = "PrepareStore] Assert"


def own_network() -> None:
    """A network of its own with loopback up, so that default ports are free. Without the right to it: the host's."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS


def run_child(kind: str, data: str, conf: Path) -> None:
    """What the real start scripts do; the result goes to standard output."""
    import memcache_hybrid as mmc

    if kind == "meta":
        result: Any = mmc.MetaService.main()
    elif kind == "local":
        result = mmc.DistributedObjectStore().init(0)
    else:  # as SGLang's start_meta_service and npu_memcache do
        config = mmc.MetaConfig() if kind == "sglang-meta" else mmc.LocalConfig()
        for key, value in json.loads(conf.read_text(encoding="utf-8")).items():
            if hasattr(config, key):
                setattr(config, key, value)
        if kind == "sglang-meta":
            result = mmc.MetaService.setup(config) or mmc.MetaService.main()
        else:
            result = mmc.DistributedObjectStore().setup(config)
    os.write(1, f"\n@@result {result}\n".encode())


def listening(pid: int) -> list[str]:
    """The IPv4 addresses that the process listens on."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(fd.readlink()))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            found.append(f"{socket.inet_ntoa(struct.pack('<I', int(address, 16)))}:{int(port, 16)}")
    return sorted(found)


def ask(request: dict[str, Any], directory: Path) -> dict[str, Any]:
    kind = request["kind"]
    conf = directory / {"meta": "mmc-meta.conf", "local": "mmc-local.conf"}.get(kind, "config.json")
    conf.unlink(missing_ok=True)
    conf.write_bytes(request["data"].encode("latin-1"))
    if request.get("link"):
        conf.rename(conf.with_suffix(".target"))
        conf.symlink_to(conf.with_suffix(".target"))
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        try:
            run_child(kind, request["data"], conf)
        except BaseException as error:
            os.write(1, f"\n@@raised {error!r}\n".encode())
        os._exit(0)
    os.close(write_end)
    output, addresses = b"", []
    quiet_since = None
    end = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < end and b"@@" not in output:
        if select.select([read_end], [], [], 0.05)[0]:
            chunk = os.read(read_end, 65536)
            if not chunk:
                break
            output += chunk
        if kind.endswith("meta"):
            with contextlib.suppress(OSError):
                addresses = listening(pid)
            # All ports open is not enough: with a bad HTTP address it gives up a moment later.
            if len(addresses) >= 3:
                quiet_since = quiet_since or time.monotonic()
                if time.monotonic() - quiet_since > 0.25:
                    break
        elif STARTED.encode() in output:
            quiet_since = quiet_since or time.monotonic()
            if time.monotonic() - quiet_since > 0.3:
                break
    os.close(read_end)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    text = output.decode("utf-8", "replace")
    result = re.search(r"@@(result|raised) (.*)", text)
    if kind.endswith("meta"):
        up = result is None and len(addresses) >= 3
    elif kind == "local":
        # Of a bad config_store_url the client says so, then tries again for a while before it gives up.
        up = result is None and STARTED in text and BAD_STORE_URL not in text
    else:
        up = result is not None and result[1] == "result" and result[2] in {"0", "None"}
    log_path = re.search(r"log path: (.*?)/logs/mmc-meta\.log", text)
    log_level = re.search(r"service log level (\d)", text)
    dram = re.search(r"local_service\.dram\.size is (\d+)", text)
    return {
        "outcome": "up" if up else "refused",
        "listening": addresses,
        "log_path": log_path[1] if log_path else None,
        "log_level": int(log_level[1]) if log_level else None,
        "dram": int(dram[1]) if dram else None,
        "output": text[-2000:],
    }


def main() -> None:
    directory = Path(sys.argv[1])
    own_network()
    os.environ["MMC_META_CONFIG_PATH"] = str(directory / "mmc-meta.conf")
    os.environ["MMC_LOCAL_CONFIG_PATH"] = str(directory / "mmc-local.conf")
    answers = os.dup(1)
    os.dup2(2, 1)  # the library writes to standard output when it is loaded
    import memcache_hybrid  # noqa: F401 - once, here: a child then starts in milliseconds

    for line in sys.stdin:
        os.write(answers, json.dumps(ask(json.loads(line), directory)).encode() + b"\n")


if __name__ == "__main__":
    main()
