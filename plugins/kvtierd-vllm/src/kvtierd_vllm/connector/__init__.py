"""A KV connector for vLLM over the MemCache pool.

vLLM loads it by name: ``--kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_role": "kv_both",
"kv_connector_module_path": "kvtierd_vllm.connector", "kv_load_failure_policy": "recompute"}'``, with
``MMC_LOCAL_CONFIG_PATH`` and ``PYTHONHASHSEED`` in the environment. It needs vLLM's interpreter with
``memcache_hybrid`` in it, and nothing else of kvtierd.

One object holds one block of all layers. Every byte goes through registered *lanes* beside the KV cache: a MemCache
call that hangs can end a minute later, and by then it must not find a block that serves another request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .vllm_connector import KvtierConnector

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> Any:
    # Late, so that the parts without vLLM can be imported (and tested) without it.
    if name == "KvtierConnector":
        from .vllm_connector import KvtierConnector

        return KvtierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
