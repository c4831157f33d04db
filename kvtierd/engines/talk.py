"""Speaking with an engine as its plan says: one bounded request at a time, errors that name the engine."""

from __future__ import annotations

from kvtierd.errors import UnitError
from kvtierd.http_get import HttpError, http_get
from kvtierd.plan.model import EngineTalk, HttpCall, UnitSpec
from kvtierd.secret_files import MASK, read_secret

MOST_ANSWER_BYTES = 1024 * 1024


class EngineRefusedError(UnitError):
    """The engine answered with a status that does not mean success; ``why`` is the beginning of its answer."""

    code = "engine.refused"

    def __init__(self, message: str, *, status: int, why: str = "", hint: str = "") -> None:
        super().__init__(message, why=why, hint=hint)
        self.status = status


async def ask(spec: UnitSpec, call: HttpCall, *, timeout_seconds: float) -> bytes:
    """The body of the engine's answer.

    Raises:
        UnitError: ``engine.no-http`` when it serves none, ``engine.no-answer``, ``engine.no-key`` when the call needs a
            key and its file cannot be used, or EngineRefusedError (``engine.refused``) with its status.
    """
    talk = spec.talk or EngineTalk()
    if talk.base_url is None:
        raise UnitError(f"{spec.id} serves no HTTP", code="engine.no-http")
    key = None if call.bearer_file is None else _key(spec, call.bearer_file)
    try:
        answer = await http_get(
            talk.base_url + call.path,
            timeout_seconds=timeout_seconds,
            most_body_bytes=MOST_ANSWER_BYTES,
            method=call.method,
            json_body=call.body,
            bearer=key,
        )
    except HttpError as error:
        raise UnitError(f"{spec.id}: {error.message}", why=error.why, code="engine.no-answer") from error
    if answer.status not in call.ok:
        body = answer.body if key is None else answer.body.replace(key.encode(), MASK.encode())
        raise EngineRefusedError(
            f"{spec.id} answered {call.method} {call.path} with {answer.status}",
            status=answer.status,
            why=body[:200].decode(errors="replace"),
            hint=f"the key in {call.bearer_file} is not the one it was started with: restart it"
            if key is not None and answer.status in {401, 403}
            else "",
        )
    return answer.body


def _key(spec: UnitSpec, path: str) -> str:
    try:
        return read_secret(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UnitError(
            f"{spec.id} needs a key that cannot be read from {path}",
            why=why or "",
            hint="kvtierctl reload writes a new one; then restart the engine",
            code="engine.no-key",
        ) from None
