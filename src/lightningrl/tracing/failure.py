"""Has a tool failed? Only if the wire format, the telemetry or the result itself says so; nothing is guessed.

A result says so in two ways: it is a JSON object with a truthy `error` or `isError`, or its text begins like an
exception (`Traceback …`, `ValueError: …`, `sqlite3.OperationalError(…)`, `Error: …`, `Error executing tool …`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

TRACEBACK = "Traceback (most recent call last)"
NAMED = re.compile(r"\s*(?:Error:?\s+)?(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception))\s*(?:[:(]|\Z)")
"""An exception as Python and JavaScript print it; LangGraph prefixes it with `Error: `."""
ERROR = re.compile(r"\s*error\s*(?::|executing|invoking|calling|running|while|\Z)", re.IGNORECASE)
APOLOGY = re.compile(r"\s*(?:an error occurred|i encountered an error|tool execution failed)\b", re.IGNORECASE)
"""The phrases of the OpenAI Agents SDK and CrewAI."""
LAST = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::|$)", re.MULTILINE)
KEPT = 2000
"""Characters of an error that a span keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A tool's failure."""

    message: str
    exception: str | None = None
    """The type of the exception; None for a failure that was reported, not raised."""


def failure_of(output: str, *, declared: bool = False) -> Failure | None:
    """None: no failure. `declared`: the wire format marks the result as an error, whatever its text is."""
    if exception := _raised(output):
        return Failure(message=output.strip()[:KEPT], exception=exception)
    reported = _reported(output)
    if reported is not None:
        return Failure(message=reported[:KEPT], exception=_raised(reported))
    if declared or ERROR.match(output) or APOLOGY.match(output):
        return Failure(message=output.strip()[:KEPT] or "error")
    return None


def _raised(text: str) -> str | None:
    if text.lstrip().startswith(TRACEBACK):
        *_, last = ["Exception", *(found["type"] for found in LAST.finditer(text))]
        return last
    found = NAMED.match(text)
    return found["type"] if found else None


def _reported(output: str) -> str | None:
    if not output.lstrip().startswith("{"):
        return None
    try:
        value: Any = msgspec.json.decode(output)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, Mapping):
        return None
    if error := value.get("error"):
        message = error.get("message") if isinstance(error, Mapping) else error
        return message if isinstance(message, str) else output.strip()
    return output.strip() if value.get("isError") or value.get("is_error") else None
