"""`lightningrl settings`: all settings with defaults and meanings, as the page docs/settings.md."""

from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lightningrl.config import Config

HEAD = """# Settings

All keys of a `recipe.toml`. Override them on the command line:
`lightningrl train recipe.toml trainer.learning_rate=1e-4`.
The sections `model`, `algorithm`, `loss` and `trainer` may also be in `[policies.NAME]`, for that policy alone.
[algorithms.md](algorithms.md) explains the algorithms, and how to combine them.
This page is generated: `lightningrl settings > docs/settings.md`.
"""


def settings_page() -> str:
    """The page, in Markdown."""
    return HEAD + "".join(_tables(Config, prefix=""))


def _tables(section: type[BaseModel], *, prefix: str) -> Iterator[str]:
    """A table for this section, then tables for the sections inside it."""
    leaves = {name: field for name, field in section.model_fields.items() if _section(field) is None}
    yield f"\n## {prefix.rstrip('.') or 'At the top'}\n\n| key | default | meaning |\n|---|---|---|\n"
    for name, field in leaves.items():
        meaning = " ".join((field.description or "").replace("|", "¦").split())
        yield f"| `{prefix}{name}` | {_default(field)} | {meaning} |\n"
    for name, field in section.model_fields.items():
        inner = _section(field)
        if inner is not None:
            yield from _tables(inner, prefix=f"{prefix}{name}.")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The section behind a field, or behind each entry of a list; None for a plain setting."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is None or str(value) in ("", "{}") else f"`{value}`"
