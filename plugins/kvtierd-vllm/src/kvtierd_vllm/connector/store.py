"""The MemCache client as the connector uses it, and the one implementation over ``memcache_hybrid``.

Only calls that release the interpreter lock are used: ``get`` does not, and would freeze the engine when the
MetaService hangs. Measured on memcache_hybrid 1.3.0: a get answers -3007 for a key that is gone and -3012 when the size
differs from the stored one (nothing is written then).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, Protocol

KEY_GONE: Final = -3007
SIZE_DIFFERS: Final = -3012


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Memory that a call reads or writes: alive, and nobody else's, until the call has returned."""

    address: int
    size_bytes: int


class BlockStore(Protocol):
    """Batch calls on the pool. Every method may block for a minute: run it in a thread, under a guard."""

    def open(self) -> int:
        """Joins the pool; 0 on success. May never return while the MetaService is down."""
        ...

    def register(self, span: Span) -> int:
        """Tells the client of a buffer that later calls use; 0 on success."""
        ...

    def exists(self, keys: Sequence[str]) -> list[int]:
        """Per key 1 (there), 0 (not there) or a negative code."""
        ...

    def put(self, keys: Sequence[str], spans: Sequence[Span]) -> list[int]:
        """Per key 0 or a code. A key that exists keeps its old value, and the code is 0."""
        ...

    def get(self, keys: Sequence[str], spans: Sequence[Span]) -> list[int]:
        """Fills the spans; per key 0 or a code. The size must be the stored one."""
        ...

    def remove(self, keys: Sequence[str]) -> list[int]:
        """Per key 0 or a code."""
        ...

    def close(self) -> int:
        """Leaves the pool. Takes about 2.5 s, longer while the MetaService is down."""
        ...


class MemcacheStore:
    """``memcache_hybrid.DistributedObjectStore``. One per process: the native library keeps a single client.

    Args:
        lookups_only: Join without a rank and without memory; only ``exists`` works then.
    """

    def __init__(self, *, lookups_only: bool) -> None:
        self._lookups_only = lookups_only
        self._store: Any = None

    def open(self) -> int:
        """See :class:`BlockStore`. ``MMC_LOCAL_CONFIG_PATH`` is read when the library is first imported."""
        from memcache_hybrid import DistributedObjectStore

        if self._store is None:
            self._store = DistributedObjectStore()
        return int(self._store.init(0, not self._lookups_only))

    def register(self, span: Span) -> int:
        """See :class:`BlockStore`."""
        return int(self._store.register_buffer(span.address, span.size_bytes))

    def exists(self, keys: Sequence[str]) -> list[int]:
        """See :class:`BlockStore`."""
        return list(self._store.batch_is_exist(list(keys)))

    def put(self, keys: Sequence[str], spans: Sequence[Span]) -> list[int]:
        """See :class:`BlockStore`."""
        addresses, sizes = [s.address for s in spans], [s.size_bytes for s in spans]
        return list(self._store.batch_put_from(list(keys), addresses, sizes))

    def get(self, keys: Sequence[str], spans: Sequence[Span]) -> list[int]:
        """See :class:`BlockStore`."""
        addresses, sizes = [s.address for s in spans], [s.size_bytes for s in spans]
        return list(self._store.batch_get_into(list(keys), addresses, sizes))

    def remove(self, keys: Sequence[str]) -> list[int]:
        """See :class:`BlockStore`."""
        return list(self._store.remove_batch(list(keys)))

    def close(self) -> int:
        """See :class:`BlockStore`."""
        return int(self._store.close()) if self._store is not None else 0
