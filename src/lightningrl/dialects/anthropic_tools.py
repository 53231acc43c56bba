"""Which schemas have the tools that Anthropic defines? Agents send them by their type alone."""

from collections.abc import Mapping, Sequence
from typing import Any

_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}
_RANGE = {"type": "array", "items": _NUMBER}
_EDITS = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _NUMBER,
    "insert_text": _TEXT,
    "view_range": _RANGE,
}
BUILT_IN: Mapping[str, tuple[str, Mapping[str, Any], Sequence[str]]] = {
    "bash": ("run a command in a bash shell", {"command": _TEXT, "restart": {"type": "boolean"}}, ()),
    "text_editor": ("view, create and edit text files", {"command": _TEXT, **_EDITS}, ("command", "path")),
    "memory": (
        "keep notes in files under /memories",
        {"command": _TEXT, "old_path": _TEXT, "new_path": _TEXT, **_EDITS},
        ("command",),
    ),
}
"""Tools that agents send without a schema (type `bash_20250124`, …): (description, properties, required)."""
