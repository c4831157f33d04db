"""Speaking with an engine as its plan says: one bounded request at a time, errors that name the engine."""

from __future__ import annotations

from kvtierd.errors import UnitError
from kvtierd.http_get import HttpError, http_get
from kvtierd.plan.model import EngineTalk, HttpCall, UnitSpec

MOST_ANSWER_BYTES = 1024 * 1024


async def ask(spec: UnitSpec, call: HttpCall, *, timeout_seconds: float) -> bytes:
    """The body of the engine's answer.

    Raises:
        UnitError: ``engine.no-http`` when it serves none, ``engine.no-answer``, or ``engine.refused`` with its status.
    """
    talk = spec.talk or EngineTalk()
    if talk.base_url is None:
        raise UnitError(f"{spec.id} serves no HTTP", code="engine.no-http")
    try:
        answer = await http_get(
            talk.base_url + call.path,
            timeout_seconds=timeout_seconds,
            most_body_bytes=MOST_ANSWER_BYTES,
            method=call.method,
            json_body=call.body,
        )
    except HttpError as error:
        raise UnitError(f"{spec.id}: {error.message}", why=error.why, code="engine.no-answer") from error
    if answer.status not in call.ok:
        shown = answer.body[:200].decode(errors="replace")
        raise UnitError(
            f"{spec.id} answered {call.method} {call.path} with {answer.status}",
            why=shown,
            code="engine.refused",
        )
    return answer.body
