"""A MemCache client driven over a pipe: JSON requests on stdin, JSON answers on the descriptor given as argv[1].

Run by ``lab.RawClient`` in a process of its own, since MemCache allows one client a process and can block or crash it.
Each request runs in a thread, so that one call that hangs does not keep others from being made. The value of a
key is computed from the key, a version and the size on both ends: nothing large crosses the pipe, and every
value that is read is checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

from memcache_hybrid import DistributedObjectStore

OK, MISS, WRONG = "ok", "miss", "wrong"


def value_of(key: str, size: int, version: int = 0) -> bytes:
    return random.Random(f"{key}\0{version}").randbytes(size)


class Load:
    """Threads that put new keys and read old ones back until told to stop."""

    def __init__(self, client: Client, prefix: str, size: int, threads: int, pause_seconds: float) -> None:
        self._client, self._prefix, self._size, self._pause = client, prefix, size, pause_seconds
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.longest_seconds = 0.0
        self.written: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def _timed(self, function: Any, *arguments: Any) -> Any:
        started = time.monotonic()
        try:
            return function(*arguments)
        finally:
            with self._lock:
                self.longest_seconds = max(self.longest_seconds, time.monotonic() - started)

    def _run(self, number: int) -> None:
        rng, count, mine = random.Random(number), 0, []
        while not self._stop.is_set():
            key = f"{self._prefix}-{number}-{count}"
            count += 1
            result = self._timed(self._client.put, key, self._size)
            with self._lock:
                self.counts["puts" if result == 0 else "failed_puts"] += 1
            if result == 0:
                mine.append(key)
                self.written.append(key)
            if mine:
                got = self._timed(self._client.get_into, rng.choice(mine), self._size)
                with self._lock:
                    self.counts[f"gets_{got}"] += 1
            time.sleep(self._pause)

    def stop(self, timeout_seconds: float) -> dict[str, Any]:
        self._stop.set()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in self._threads)
        return {
            **self.counts,
            "longest_seconds": self.longest_seconds,
            "stuck": stuck,
            "written": self.written,
        }


class Client:
    def __init__(self) -> None:
        self.store = DistributedObjectStore()
        self.load: Load | None = None

    def init(self, device: int = 0, init_bm: bool = True) -> int:
        return int(self.store.init(device, init_bm=init_bm))

    def rank(self) -> int:
        return int(self.store.get_local_service_id())

    def put(self, key: str, size: int, version: int = 0) -> int:
        return int(self.store.put(key, value_of(key, size, version)))

    def get_into(self, key: str, size: int, version: int = 0) -> str:
        """``ok``, ``wrong`` or ``miss``. Never the library's ``get``: it keeps the GIL for up to 60 s."""
        buffer = ctypes.create_string_buffer(size)
        if self.store.get_into(key, ctypes.addressof(buffer), size) != 0:
            return MISS
        return OK if buffer.raw == value_of(key, size, version) else WRONG

    def exist(self, key: str) -> int:
        return int(self.store.is_exist(key))

    def put_many(self, keys: list[str], size: int, version: int = 0) -> list[int]:
        values = [ctypes.create_string_buffer(value_of(key, size, version), size) for key in keys]
        addresses = [ctypes.addressof(value) for value in values]
        return [int(r) for r in self.store.batch_put_from(keys, addresses, [size] * len(keys))]

    def get_many(self, keys: list[str], size: int, version: int = 0) -> list[str]:
        buffers = [ctypes.create_string_buffer(size) for _ in keys]
        addresses = [ctypes.addressof(buffer) for buffer in buffers]
        results = self.store.batch_get_into(keys, addresses, [size] * len(keys))
        return [
            MISS if result != 0 else OK if buffer.raw == value_of(key, size, version) else WRONG
            for key, buffer, result in zip(keys, buffers, results, strict=True)
        ]

    def exist_many(self, keys: list[str]) -> list[int]:
        return [int(r) for r in self.store.batch_is_exist(keys)]

    def alloc_many(self, keys: list[str], size: int) -> list[int]:
        """Allocates without ever finishing the write: what a client that died in a put leaves behind."""
        return [int(r) for r in self.store.batch_alloc(keys, [size] * len(keys))]

    def remove(self, key: str) -> int:
        return int(self.store.remove(key))

    def remove_all(self) -> int:
        return int(self.store.remove_all())

    def close(self) -> int:
        return int(self.store.close())

    def start_load(self, prefix: str, size: int, threads: int = 1, pause_seconds: float = 0.0) -> bool:
        self.load = Load(self, prefix, size, threads, pause_seconds)
        return True

    def stop_load(self, timeout_seconds: float = 5.0) -> dict[str, Any]:
        assert self.load is not None
        return self.load.stop(timeout_seconds)


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    lock = threading.Lock()
    client = Client()

    def handle(request: dict[str, Any]) -> None:
        started = time.monotonic()
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            answer["result"] = getattr(client, request["op"])(**request["arguments"])
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answer["seconds"] = time.monotonic() - started
        with lock, contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)

    for line in sys.stdin:
        threading.Thread(target=handle, args=(json.loads(line),), daemon=True).start()


if __name__ == "__main__":
    main()
    os._exit(0)
