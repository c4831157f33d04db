"""What comes up while a plan or a launch is made: notes and reasons against it, in the order found."""

from __future__ import annotations

import dataclasses

from kvtierd.plan.model import Note, Refusal


@dataclasses.dataclass(slots=True)
class Remarks:
    """Collects notes and refusals."""

    notes: list[Note] = dataclasses.field(default_factory=list)
    refusals: list[Refusal] = dataclasses.field(default_factory=list)

    def note(self, code: str, message: str) -> None:
        """Something the operator should know."""
        self.notes.append(Note(code=code, message=message))

    def refuse(self, code: str, message: str, hint: str = "") -> None:
        """A reason not to start."""
        self.refusals.append(Refusal(code=code, message=message, hint=hint))
