"""SGLang's HTTP API as kvtierd uses it: one token to prove readiness, the tiers' parts of a prompt, flushing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvtierd.plan.engine import EngineContext, HttpCall, Tier, TierTokens

FLUSH_WAIT_SECONDS: Final = 5
# SGLang's own warm-up gives this address: the other half of a prefill/decode pair need not be there.
_NO_PARTNER: Final = "2.2.2.2"


def generation(context: EngineContext) -> HttpCall:
    """One token over the native API, which needs no model name."""
    body: dict[str, Any] = {
        "text": "kvtierd",
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
    }
    if context.role != "both":
        body |= {"bootstrap_host": _NO_PARTNER, "bootstrap_room": 0}
    return HttpCall(path="/generate", body=body)


def generated(body: bytes) -> str:
    """The text of an answer of /generate or of the OpenAI API.

    A token need not be a whole character: SGLang then gives an empty text, told here as U+FFFD.

    Raises:
        ValueError: There is no generated token in it.
    """
    answer = _object(body)
    if "text" in answer:
        text, count = answer["text"], _mapping(answer.get("meta_info")).get("completion_tokens")
    else:
        choices = answer.get("choices")
        choice = _mapping(choices[0]) if isinstance(choices, list) and choices else {}
        text = choice.get("text", _mapping(choice.get("message")).get("content"))
        count = _mapping(answer.get("usage")).get("completion_tokens")
    if isinstance(text, str) and text:
        return text
    if isinstance(count, int) and count > 0:
        return "\ufffd"
    raise ValueError(f"no generated token in the answer: {body[:120]!r}")


def tokens(body: bytes) -> TierTokens:
    """Which tier served the prompt.

    /generate always says it; the OpenAI API when the request has ``return_cached_tokens_details``. Without L3 the
    details have no ``storage``; when nothing was cached there are no details, and every tier served nothing.

    Raises:
        ValueError: The answer is not a JSON object.
    """
    answer = _object(body)
    if "meta_info" in answer:
        about = _mapping(answer["meta_info"])
        prompt, cached = _count(about.get("prompt_tokens")), _count(about.get("cached_tokens"))
        details = about.get("cached_tokens_details")
    else:
        usage = _mapping(answer.get("usage"))
        prompt = _count(usage.get("prompt_tokens"))
        cached = _count(_mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
        details = _mapping(answer.get("sglext")).get("cached_tokens_details")
    if isinstance(details, Mapping):
        l1, l2, l3 = (_count(details.get(name)) for name in ("device", "host", "storage"))
        if cached is None and l1 is not None:
            cached = l1 + (l2 or 0) + (l3 or 0)
    else:
        l1 = l2 = l3 = 0 if cached == 0 else None
    computed = prompt - cached if prompt is not None and cached is not None and cached <= prompt else None
    return TierTokens(prompt=prompt, l1=l1, l2=l2, l3=l3, computed=computed)


def flush(
    tiers: frozenset[Tier], *, has_l2: bool, has_l3: bool, bearer_file: str | None = None
) -> tuple[HttpCall, ...]:
    """The requests that empty these tiers. An L2 that is not there is empty. ``bearer_file`` is the admin key's.

    SGLang answers 400 when it cannot: requests run or wait (``timeout`` waits for them), or there is no storage.
    Emptying L3 is MemCache's ``remove_all``: it empties the whole pool, for all engines that share it.

    Raises:
        ValueError: L1 and L2 are emptied by one call; or there is no L3 to empty.
    """
    near = tiers & {"L1", "L2"}
    if has_l2 and len(near) == 1:
        (asked,) = near
        other = "L2" if asked == "L1" else "L1"
        raise ValueError(f"SGLang empties L1 and L2 together: it cannot flush {asked} without {other}")
    if "L3" in tiers and not has_l3:
        raise ValueError("this engine has no L3 to flush")
    flushes = "L1" in tiers  # with an L2, both are asked for here
    paths = [f"/flush_cache?timeout={FLUSH_WAIT_SECONDS}"] if flushes else []
    if "L3" in tiers:
        paths.append("/hicache/storage-backend/clear")
    calls = [HttpCall(path=path, bearer_file=bearer_file) for path in paths]
    return tuple(calls)


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise ValueError(f"not JSON: {body[:80]!r}") from error
    if not isinstance(answer, dict):
        raise ValueError(f"not a JSON object: {body[:80]!r}")
    return answer


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
