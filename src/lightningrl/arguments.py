"""The arguments of a tool call: JSON text, byte for byte as the model wrote it ⇄ an object."""

from collections.abc import Mapping
from typing import Any

import msgspec

INVALID = "INVALID_JSON"
"""The key that Anthropic recommends for arguments that are no JSON object, on a wire that carries objects alone."""


def arguments_key(arguments: str) -> str:
    """Equal for arguments that mean the same: white space and the order of keys make no difference."""
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="sorted").decode()
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return arguments.strip()


def malformed(arguments: str) -> bool:
    """Whether the text is no JSON object. Blank text is an empty object."""
    return _decoded(arguments) is None


def to_object(arguments: str) -> dict[str, Any]:
    """Text that is no JSON object becomes {"INVALID_JSON": text}."""
    value = _decoded(arguments)
    return {INVALID: arguments} if value is None else value


def from_object(value: Any) -> str:
    """The inverse of `to_object`; None is an empty object, and a string is text already."""
    if isinstance(value, Mapping) and set(value) == {INVALID}:
        value = value[INVALID]
    return value if isinstance(value, str) else msgspec.json.encode({} if value is None else value).decode()


def _decoded(arguments: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(arguments.strip() or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
