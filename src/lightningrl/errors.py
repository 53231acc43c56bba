"""The error model: a failure is attributed, at a boundary, to whoever owns it.

A `UserError` is something the person at the keyboard can mend: it carries a hint, and the CLI exits with code 2.
`AgentError`, `GraderError` and `EngineError` say whose code failed. A failed rollout is a record, not a crash: the
runner turns these into `Attempt.error`; they are only raised when nothing can go on.
"""

import difflib
from collections.abc import Iterable


class LightningError(Exception):
    """Base of every error that LightningRL raises on purpose."""

    exit_code = 1
    """Of the command line."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UserError(LightningError):
    """Bad input: a recipe, a path, a name, a port."""

    exit_code = 2


class AgentError(UserError):
    """The user's agent raised, hung, or never called the model."""


class GraderError(UserError):
    """The user's reward function raised, or returned something that is not a finite number."""


class Stopped(LightningError):
    """A signal has ended it: Ctrl-C, SIGTERM, SIGHUP. The exit code is 128 + the number of the signal, as a shell has
    it.
    """

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class EngineError(LightningError):
    """The inference engine failed, or was asked for something it cannot do."""


class StoreError(LightningError):
    """The record store could not keep its promise."""


class StoreFailed(StoreError):
    """The database failed (a full disk, a locked file): whoever sent the record is not to blame, and may send it again."""


def meant(name: str, known: Iterable[str]) -> str:
    """A hint for a name that nobody knows: the one that was probably meant, or else all there are."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    alternatives = ", ".join(f"`{other}`" for other in known) or "none"
    return f"did you mean `{near[0]}`? known: {alternatives}" if near else f"known: {alternatives}"
