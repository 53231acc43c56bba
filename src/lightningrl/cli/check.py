"""The result of one check before a run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str
    ok: bool | None
    """None: missing or unknown, but optional."""
    found: str
    hint: str = ""
    """What to do about it; empty if nothing."""
