"""The class that vLLM loads: it hands vLLM's calls on to the parts and keeps no logic of its own.

Written for and tested with vLLM 0.32.0 on CPU. Loads are asynchronous in vLLM's sense: a request waits for its blocks
outside the running batch, failed blocks are never computed on, and a tier that hangs holds up no other request.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from .guard import TierGuard
from .keys import KeyMaker, ModelIdentity
from .kv_memory import KvMemory
from .lookups import Lookups
from .membership import Membership
from .options import CONF_VARIABLE, Options
from .planning import Planner, ScheduledRequest, StepPlan
from .signals import kept_handlers
from .store import BlockStore, MemcacheStore, Span
from .transfers import Transfers

_log = logging.getLogger(__name__)
# vLLM gives its workers 4 s before it kills them; MemCache's close takes 2.5 s.
_LEAVE_SECONDS: Final = 3.0
_PROBE_KEY: Final = "kvtierd-probe"


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers for one step."""

    plan: StepPlan


class _Tier:
    """This process' client of the pool, with everything that keeps it from doing harm."""

    def __init__(self, name: str, options: Options, *, lookups_only: bool) -> None:
        self.store: BlockStore = MemcacheStore(lookups_only=lookups_only)
        self.guard = TierGuard(
            name,
            limit_seconds=options.call_limit_seconds,
            probe=self._probe,
            probe_seconds=options.probe_seconds,
        )
        self._name = name
        self._options = options
        self._membership: Membership | None = None

    def join(self, spans: tuple[Span, ...] = ()) -> None:
        """Begins to join the pool."""
        self._membership = Membership(
            self._name,
            self.store,
            spans,
            deadline_seconds=self._options.init_deadline_seconds,
            around_open=kept_handlers,
        )
        self._membership.start()

    def joined(self) -> bool:
        """Whether calls make sense."""
        return self._membership is not None and self._membership.state == "joined"

    def leave(self) -> None:
        """Leaves the pool within a few seconds.

        A client that is closed under a call of its own can crash: with a call stuck there is no goodbye.
        """
        self.guard.shut()
        if self._membership is None:
            return
        settling = threading.Event()
        for _ in range(20):
            if not self.guard.in_flight:
                break
            settling.wait(0.025)
        else:
            _log.warning("kvtierd: left without closing: a MemCache call has not returned")
            return
        if not self._membership.leave(_LEAVE_SECONDS):
            _log.warning("kvtierd: MemCache close has not returned for %.0f s", _LEAVE_SECONDS)

    def _probe(self) -> None:
        (code,) = self.store.exists([_PROBE_KEY])
        if code < 0:
            raise RuntimeError(f"exist answered {code}")


class KvtierConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the package's text for how vLLM is told to use it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _log_as_vllm_does()
        _refuse_what_cannot_work(vllm_config, kv_cache_config)
        self._options = Options.read(self._kv_transfer_config.kv_connector_extra_config or {})
        self._block_tokens = int(vllm_config.cache_config.block_size)
        parallel = vllm_config.parallel_config
        self._ranks = int(parallel.tensor_parallel_size)
        self._invalid: set[int] = set()
        worker = role == KVConnectorRole.WORKER
        self._tier = _Tier("worker" if worker else "scheduler", self._options, lookups_only=not worker)
        self._transfers: Transfers | None = None
        if worker:
            self._rank = int(parallel.rank) % self._ranks
            return
        self._keys = KeyMaker(
            self._options.namespace, _identity(vllm_config, kv_cache_config), self._block_tokens
        )
        self._planner = Planner(
            self._keys.key,
            self._block_tokens,
            loads=bool(self._kv_transfer_config.is_kv_consumer),
            saves=bool(self._kv_transfer_config.is_kv_producer),
        )
        self._lookups = Lookups(
            self._tier.store, self._tier.guard, self._tier.joined, self._planner, ranks=self._ranks
        )
        if not os.environ.get("PYTHONHASHSEED", "").isdigit():
            _log.warning(
                "kvtierd: PYTHONHASHSEED is not a number: no other engine finds these blocks, nor does this one later"
            )
        _log.info("kvtierd: keys begin with %s", self._keys.prefix)
        self._tier.join()

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a future miss, nothing worse."""
        return False

    def shutdown(self) -> None:
        """Leaves the pool, in a few seconds at the most."""
        self._tier.leave()

    # --- scheduler ---------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens the pool has behind the computed ones. None: not known yet."""
        self._planner.track(request.request_id, request.block_hashes)
        if request.skip_reading_prefix_cache:  # for prompt_logprobs, everything has to be computed
            return 0, False
        blocks = self._lookups.loadable_blocks(request.request_id, request.num_tokens, num_computed_tokens)
        if blocks is None:
            return None, False
        return blocks * self._block_tokens, blocks > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The blocks for the tokens that were offered."""
        if num_external_tokens > 0:
            (block_ids,) = blocks.get_block_ids()
            self._planner.allocated(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The plan for one step."""
        return StepMetadata(self._planner.step(_scheduled(scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        """Learns which loads have ended, and how."""
        for request_id in connector_output.finished_recving or ():
            self._planner.loaded(request_id, connector_output.invalid_block_ids or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The blocks can go at once: what is being saved is in a lane."""
        self._lookups.forget(request.request_id)
        self._planner.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Makes the pool's blocks unknown to this engine, until it ends.

        This is asked for when the weights have changed under the model's name: then other engines must not find what
        is saved from now on, and this one not what was saved before. The old objects age out of the pool.
        """
        self._keys.renew(secrets.token_hex(4))
        self._lookups.forget_all()
        self._planner.forget_stored()
        _log.info("kvtierd: cache reset, keys begin with %s", self._keys.prefix)
        return True

    # --- worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learns where the KV cache is, makes the lanes and joins the pool."""
        memory = KvMemory(kv_caches, self._kv_cache_config.num_blocks, self._options.lane_bytes)
        self._transfers = Transfers(
            self._tier.store,
            self._tier.guard,
            self._tier.joined,
            memory,
            memory.load_lanes,
            memory.save_lanes,
            rank=self._rank,
            ranks=self._ranks,
        )
        self._transfers.start()
        _log.info(
            "kvtierd: blocks of %d tokens are %d bytes, lanes take %d bytes",
            self._block_tokens, memory.block_bytes, memory.span.size_bytes,
        )  # fmt: skip
        self._tier.join((memory.span,))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins this step's loads."""
        if self._transfers is not None:
            for job in self._get_connector_metadata().plan.loads:
                self._transfers.submit_load(job)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Copies what the step has completed; the pool gets it in the background."""
        blocks = self._get_connector_metadata().plan.saves
        if blocks and self._transfers is not None:
            dropped = self._transfers.save(blocks)
            if dropped:
                _log.debug("kvtierd: %d of %d blocks are not saved", dropped, len(blocks))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose loads have ended, well or not."""
        if self._transfers is None:
            return None, None
        finished = self._transfers.finished_loads()
        for load in finished:
            self._invalid.update(load.failed_block_ids)
        return None, {load.request_id for load in finished} or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The failed blocks of the loads that ``get_finished`` named last."""
        invalid, self._invalid = self._invalid, set()
        return invalid


def _scheduled(output: Any) -> Iterator[ScheduledRequest]:
    """The requests of one step, in vLLM's form."""
    tokens = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield ScheduledRequest(
            new.req_id, new.block_ids[0], True, new.num_computed_tokens, tokens[new.req_id]
        )
    cached = output.scheduled_cached_reqs
    for request_id, added, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        replaces = request_id in cached.resumed_req_ids
        yield ScheduledRequest(request_id, added[0] if added else (), replaces, computed, tokens[request_id])


def _identity(vllm_config: Any, kv_cache_config: Any) -> ModelIdentity:
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    layers = len(kv_cache_config.kv_cache_groups[0].layer_names)
    return ModelIdentity(
        model=str(model.model),
        dtype=str(model.dtype),
        layers=layers,
        kv_heads=int(model.get_num_kv_heads(parallel)),
        head_size=int(model.get_head_size()),
        tensor_parallel_size=int(parallel.tensor_parallel_size),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        kv_bytes=layers * int(spec.page_size_bytes),
        extra=(f"revision={model.revision}", f"quantization={model.quantization}", f"kv={cache.cache_dtype}"),
    )


def _refuse_what_cannot_work(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ValueError for settings under which the connector would be useless or wrong."""
    if not os.environ.get(CONF_VARIABLE):
        raise ValueError(
            f"KvtierConnector needs {CONF_VARIABLE} in the environment: the path of mmc-local.conf"
        )
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ValueError(
            'KvtierConnector needs "kv_load_failure_policy": "recompute": with "fail", a lost cache fails requests'
        )
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ValueError(f"KvtierConnector does not support {name} {getattr(parallel, name)}, only 1")
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if kinds != ["FullAttentionSpec"]:
        raise ValueError(
            f"KvtierConnector supports one group of full attention layers, this model has {kinds}"
        )
    if groups[0].kv_cache_spec.block_size != vllm_config.cache_config.block_size:
        raise ValueError("KvtierConnector needs blocks of one size for hashing and for storing")


def _log_as_vllm_does() -> None:
    """Sends this package's log lines where vLLM's go, in the same form."""
    ours, theirs = logging.getLogger("kvtierd_vllm"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.getEffectiveLevel())
