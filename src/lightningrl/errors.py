"""The error model: a failure is attributed, at a boundary, to whoever owns it.

A `UserError` is something the person at the keyboard can mend: it carries a hint, and the CLI exits with code 2.
`AgentError`, `GraderError` and `EngineError` say whose code failed. A failed rollout is a record, not a crash: the runner
turns these into `Attempt.error`; they are only raised when nothing can go on.
"""

import difflib
from collections.abc import Iterable


class LightningError(Exception):
    """Base of every error that LightningRL raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UserError(LightningError):
    """Bad input: a recipe, a path, a name, a port."""


class AgentError(UserError):
    """The user's agent raised, hung, or never called the model."""


class GraderError(UserError):
    """The user's reward function raised, or returned something that is not a finite number."""


class Stopped(LightningError):
    """The person at the keyboard pressed Ctrl-C. The CLI exits with code 130."""


class EngineError(LightningError):
    """The inference engine failed, or was asked for something it cannot do."""


class StoreError(LightningError):
    """The record store could not keep its promise."""


def meant(name: str, known: Iterable[str]) -> str:
    """A hint for a name that nobody knows: the one that was probably meant, or else all there are."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    alternatives = ", ".join(f"`{other}`" for other in known) or "none"
    return f"did you mean `{near[0]}`? known: {alternatives}" if near else f"known: {alternatives}"
