"""The error model: each error names the side that failed.

A `UserError` can be corrected by the user; it has a hint, and the command line exits with code 2. `AgentError`,
`GraderError` and `EngineError` name the code that failed. A failed rollout is a record, not a crash: the runner stores
its error in `Attempt.error`. These errors are raised only if the run cannot continue.
"""

import difflib
from collections.abc import Iterable


class LightningError(Exception):
    """Base class of the errors that LightningRL raises."""

    exit_code = 1
    """Exit code of the command line."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UserError(LightningError):
    """The input is wrong: a recipe, a path, a name, a port."""

    exit_code = 2


class Missing(UserError):
    """There is nothing of this name, or at this address."""


class AgentError(UserError):
    """The user's agent raised, timed out, or never called the model."""


class GraderError(UserError):
    """The user's reward function raised, or returned something that is not a finite number."""


class Stopped(LightningError):
    """A signal ended the command: SIGINT, SIGTERM or SIGHUP. The exit code is 128 + its number, as in a shell."""

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class EngineError(LightningError):
    """The inference engine failed, or does not support the request."""


class StoreError(LightningError):
    """The store could not read or write a record."""


class StoreFailed(StoreError):
    """The database failed, e.g. on a full disk. The caller may repeat the request."""


def meant(name: str, known: Iterable[str]) -> str:
    """The hint for an unknown name: the most similar known name, or all known names."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    alternatives = ", ".join(f"`{other}`" for other in known) or "none"
    return f"did you mean `{near[0]}`? known: {alternatives}" if near else f"known: {alternatives}"
