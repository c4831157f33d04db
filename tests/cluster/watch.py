"""What must hold while a fault is on: a watch that asks every MetaService and every engine all the time.

A MetaService *accepts* when it answers MemCache's handshake on its own port, past the endpoint. Two nodes of which both
do so at the same moment are what fencing must prevent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import threading
import time
from types import TracebackType
from typing import Self

from cluster_lab import Cluster, ClusterNode

from kvtierd.errors import KvtierError
from kvtierd.memcache.framing import ANONYMOUS_HANDSHAKE, HANDSHAKE_ACCEPTED

PROBE_SECONDS = 0.1
PROBE_LIMIT_SECONDS = 0.5
ASK_SECONDS = 0.15
PROMPTS = 2  # together more than an engine's first level holds
TEXT = "The quick brown fox jumps over the lazy dog and thinks about caches. " * 12  # about 800 tokens


@dataclasses.dataclass
class Span:
    """From the first to the last of successive answers of one MetaService."""

    first: float
    last: float


@dataclasses.dataclass
class Asked:
    """One request: when its answer was complete, and what came of it."""

    node: str
    at: float
    seconds: float
    l3_tokens: int = 0
    wrong: bool = False
    error: str = ""


class Watch:
    """Times are of time.monotonic(). ``load``: names of the nodes whose engines are asked; default: all."""

    def __init__(self, cluster: Cluster, *, load: list[str] | None = None) -> None:
        self.cluster = cluster
        self.spans: dict[str, list[Span]] = {name: [] for name in cluster.nodes}
        self.asked: list[Asked] = []
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._idle = {name: threading.Event() for name in cluster.nodes}
        loaded = cluster.nodes if load is None else load
        self._threads = [
            threading.Thread(target=node.inside, args=(lambda n=node: self._probe(n),), daemon=True)
            for node in cluster.nodes.values()
        ] + [
            threading.Thread(
                target=cluster[n].inside, args=(lambda n=n: self._load(cluster[n]),), daemon=True
            )
            for n in loaded
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Waits for what is under way."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(40)

    def leave(self, name: str) -> None:
        """This node's engine is not asked from now on: it is about to be killed with its host."""
        self._idle[name].set()
        time.sleep(1.0)

    # -- MetaServices

    def _probe(self, node: ClusterNode) -> None:
        spans, open_span = self.spans[node.name], False
        while not self._stop.is_set():
            began = time.monotonic()
            if accepts(node.ports["backend_port"]):
                if not open_span:
                    spans.append(Span(began, time.monotonic()))
                spans[-1].last = began  # it certainly lived when it was asked
                open_span = True
            else:
                open_span = False
            self._stop.wait(max(0.0, PROBE_SECONDS - (time.monotonic() - began)))

    def accepted_after(self, at: float, *, but: str = "") -> tuple[str, float] | None:
        """Which MetaService was the first to begin to accept after that moment, and when."""
        found = [
            (span.first, name)
            for name, spans in self.spans.items()
            if name != but
            for span in list(spans)
            if span.first > at
        ]
        return (min(found)[1], min(found)[0]) if found else None

    def overlap_seconds(self) -> float:
        """The longest time for which two nodes' MetaServices accepted together."""
        longest = 0.0
        for one, other in itertools.combinations(self.spans.values(), 2):
            for a, b in itertools.product(list(one), list(other)):
                longest = max(longest, min(a.last, b.last) - max(a.first, b.first))
        return max(0.0, longest)

    # -- engines

    def _load(self, node: ClusterNode) -> None:
        for number in itertools.count():
            if self._stop.is_set() or self._idle[node.name].is_set():
                return
            # Prompts that all nodes share, so that each reads what the others have written.
            prompt = f"{number % PROMPTS} " + TEXT
            began = time.monotonic()
            asked = Asked(node.name, began, 0.0)
            try:
                answer = node.ask(prompt)
                asked.l3_tokens = int(answer.usage.get("kvtier", {}).get("l3_tokens", 0))
                with self._lock:
                    asked.wrong = self._texts.setdefault(prompt, answer.text) != answer.text
            except KvtierError as error:
                asked.error = str(error)
            asked.at = time.monotonic()
            asked.seconds = asked.at - began
            if not (asked.error and self._idle[node.name].is_set()):
                self.asked.append(asked)
            self._stop.wait(ASK_SECONDS)

    @property
    def failed(self) -> list[Asked]:
        return [a for a in self.asked if a.error]

    @property
    def wrong(self) -> list[Asked]:
        return [a for a in self.asked if a.wrong]

    def longest_seconds(self, since: float) -> float:
        return max((a.seconds for a in self.asked if a.at >= since), default=0.0)

    def hit_after(self, at: float, nodes: set[str]) -> float | None:
        """When each of these nodes has read from the pool in a request that it began after that moment."""
        firsts = {}
        for a in list(self.asked):
            if a.node in nodes and a.l3_tokens and a.at - a.seconds >= at:
                firsts.setdefault(a.node, a.at)
        return max(firsts.values()) if set(firsts) == nodes else None

    def wait_hits(self, at: float, nodes: set[str], seconds: float = 40.0) -> float:
        """Until they have; the moment."""
        deadline = time.monotonic() + seconds
        while (when := self.hit_after(at, nodes)) is None:
            assert time.monotonic() < deadline, f"{nodes}: no hits\n{self.cluster.told()}"
            time.sleep(0.05)
        return when


def accepts(port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), PROBE_LIMIT_SECONDS) as c,
    ):
        c.settimeout(PROBE_LIMIT_SECONDS)
        c.sendall(ANONYMOUS_HANDSHAKE)
        return c.recv(len(HANDSHAKE_ACCEPTED)) == HANDSHAKE_ACCEPTED
    return False
