"""Settings from Python as overrides of a recipe: `{"loop.group_size": 8}` → `loop.group_size=8`, the value in TOML."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightningrl.errors import UserError


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """One `KEY=VALUE` for each setting. Sections may be nested. Raises `UserError` for a value that TOML lacks."""
    return [f"{key}={_toml(key, value)}" for key, value in _flat("", settings)]


def _flat(prefix: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value


def _toml(key: str, value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "nan" if math.isnan(value) else repr(value)
        case str() | Path():
            return json.dumps(str(value))  # a string of JSON is one of TOML
        case list() | tuple():
            return f"[{', '.join(_toml(key, one) for one in value)}]"
        case Mapping():
            return f"{{{', '.join(f'{json.dumps(name)} = {_toml(key, one)}' for name, one in value.items())}}}"
        case _:
            raise UserError(
                f"`{key}` cannot be `{value!r}`",
                hint="give a number, a text, true or false, a list or a mapping; leave it out for the default",
            )
