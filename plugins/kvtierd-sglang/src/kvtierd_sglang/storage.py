"""L3: the JSON for SGLang's ``npu_memcache`` storage, the MetaService's JSON file, and L3 put on or off at run time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.sglang import (
    SglangMetaConf,
    SglangStorageConf,
    render_sglang_meta,
    render_sglang_storage,
)
from kvtierd.mmc_conf.versions import KNOWN_VERSIONS, MmcVersion, resolve_version
from kvtierd.plan.engine import EngineContext
from kvtierd.plan.hardware import uses_hcom
from kvtierd.plan.model import SECRET_MARK, FileSpec, HttpCall, Note, Refusal

BACKEND: Final = "npu_memcache"
BACKEND_PATH: Final = "/hicache/storage-backend"
META_FILE: Final = "metaservice_config.json"
KEY_FILE: Final = "admin-key.yaml"  # SGLang insists on the ending
PREFETCH_THRESHOLD_TOKENS: Final = 1
"""Prompts from this length on are looked up in L3; SGLang's own default is 256 and leaves short prefixes out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rendered:
    """Text for one consumer, or why there is none."""

    text: str | None
    notes: tuple[Note, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def memcache_version(context: EngineContext) -> tuple[MmcVersion, tuple[Note, ...]]:
    """The MemCache release in the engine's interpreter; the newest known one, and a note, when that is unknown."""
    found = context.inventory.install_in(context.python)
    installed = found.memcache_version if found else None
    newest = KNOWN_VERSIONS[-1]
    if installed is None:
        where = "in the image" if context.runner == "docker" else f"in {context.python}"
        text = f"the version of MemCache {where} is not known; its JSON is written for {newest}"
        return newest, (Note(code="engine.memcache-version", message=text),)
    try:
        return resolve_version(installed), ()
    except ConfError as error:
        text = f"{error.message}; SGLang's JSON is written for {newest}"
        return newest, (Note(code="engine.memcache-version", message=text),)


def storage_json(context: EngineContext, extra: Mapping[str, Any]) -> Rendered:
    """The value of ``--hicache-storage-backend-extra-config``.

    Every rank of the engine is one MemCache rank. With a pool holder of its own (placement standalone) it brings no
    memory; ``max_dram_size`` must be the largest of all ranks on every rank all the same.

    Args:
        context: The engine, with the pool of its node.
        extra: The operator's own keys: SGLang's (prefetch_threshold, ...) or further ones of LocalConfig.
    """
    version, notes = memcache_version(context)
    own = dict(extra)
    threshold = own.pop("prefetch_threshold", PREFETCH_THRESHOLD_TOKENS)
    if context.local_conf.extra.get("ock.mmc.tls.enable") == "true":
        return Rendered(
            None,
            notes,
            (
                Refusal(
                    code="engine.memcache-tls",
                    message="[meta] tls = true: SGLang takes MemCache's configuration as JSON, and TLS in it is not proved",
                    hint='write [meta] endpoint = "relay": then traffic between nodes is encrypted by the endpoints',
                ),
            ),
        )
    try:
        base = SglangStorageConf.from_local(context.local_conf)
        fields = base.model_dump(exclude={"extra"})
        if not uses_hcom(context.local_conf.protocol):
            fields["hcom_url"] = None
        conf = SglangStorageConf(**(fields | {"prefetch_threshold": threshold, "extra": own}))
        return Rendered(render_sglang_storage(conf, version, a3=context.series == "A3"), notes)
    except ConfError as error:
        return Rendered(None, notes, (_refusal(error.stable_code, error.message, error.hint),))
    except ValueError as error:  # pydantic: a value of the wrong type
        first = str(error).splitlines()
        hint = "numbers without quotes, sizes as text"
        return Rendered(None, notes, (_refusal("conf.wrong-type", "; ".join(first[1:3]).strip(), hint),))


def _refusal(code: str, message: str, hint: str) -> Refusal:
    return Refusal(code=code, message=f"args: hicache-storage-backend-extra-config: {message}", hint=hint)


def metaservice_file(context: EngineContext) -> tuple[FileSpec | None, tuple[Refusal, ...]]:
    """SGLang's own file for a MetaService: what kvtierd's says, with the addresses that engines use.

    kvtierd runs the MetaService itself; the file is for the operator's tools and agrees with it.
    """
    version, _ = memcache_version(context)
    conf = SglangMetaConf.from_meta(context.meta_conf).model_copy(
        update={
            "meta_service_url": context.meta_service_url,
            "config_store_url": context.config_store_url,
        }
    )
    try:
        # Only tools read it, so an address beyond loopback is no exposure.
        text = render_sglang_meta(conf, version, allow_exposed=True)
    except ConfError as error:
        return None, (
            Refusal(code=error.stable_code, message=f"{META_FILE}: {error.message}", hint=error.hint),
        )
    return FileSpec(path=f"{context.work_dir}/{META_FILE}", content=text), ()


def key_file(context: EngineContext) -> FileSpec:
    """The file that gives SGLang its admin key, by ``--config``: a flag would show it to every user of the host."""
    return FileSpec(
        path=f"{context.work_dir}/{KEY_FILE}", mode="0600", content=f"admin-api-key: {SECRET_MARK}\n"
    )


def attach_call(key_path: str, backend: str, extra_config: str | None) -> HttpCall:
    """Attaches L3 to a running engine. Attached already, SGLang takes it as a change of nothing.

    Args:
        key_path: where the admin key is.
        backend: the storage backend's name.
        extra_config: the JSON text of its options, as in ``--hicache-storage-backend-extra-config``.
    """
    body = {"hicache_storage_backend": backend}
    if extra_config is not None:
        body["hicache_storage_backend_extra_config_json"] = extra_config
    return HttpCall(method="PUT", path=BACKEND_PATH, body=body, bearer_file=key_path, needs_idle=True)


def detach_call(key_path: str) -> HttpCall:
    """Detaches L3 from a running engine. Detached already, SGLang answers the same."""
    return HttpCall(method="DELETE", path=BACKEND_PATH, bearer_file=key_path, needs_idle=True)
