"""The tool that all agents of the matrix share. It prints its arguments, and only it knows the code."""

import json
import os
import sys

QUESTION = "What will the weather be like?"
AGAIN = "Say that again, please."


def forecast(city: str, days: int, metric: bool, note: str | None) -> str:
    """Forecast the weather of a city.

    Args:
        city: Where.
        days: How far ahead.
        metric: Whether in degrees Celsius.
        note: Anything else that matters.
    """
    _line("TOOL", [city, days, metric, note])
    return f"{city}: {os.environ['MATRIX_CODE']}/{days}"


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days", "metric", "note"],
    "additionalProperties": False,
}


def answer(text: str | None) -> None:
    """Print an answer of the agent on a line of its own."""
    _line("ANSWER", text)


def _line(word: str, what: object) -> None:
    """Print a line in one write: tools may run at the same time."""
    sys.stdout.flush()
    os.write(1, f"\n{word} {json.dumps(what)}\n".encode())
