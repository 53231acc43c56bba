"""`lightningrl settings`: every setting of a recipe, with its default and what it means, as the page docs/settings.md."""

from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lightningrl.config import Config

HEAD = """# Settings

Every key that a `recipe.toml` may have. An override on the command line lays over it: `lightningrl train recipe.toml trainer.learning_rate=1e-4`.
`model`, `algorithm`, `loss` and `trainer` may stand in a `[policies.NAME]` as well, and then hold for that policy.
What the algorithms are, and which goes with which: [algorithms.md](algorithms.md). This page is generated: `lightningrl settings > docs/settings.md`.
"""


def settings_page() -> str:
    """The page, in Markdown."""
    return HEAD + "".join(_tables(Config, prefix=""))


def _tables(section: type[BaseModel], *, prefix: str) -> Iterator[str]:
    """One table for a section, then those of its sections."""
    leaves = {name: field for name, field in section.model_fields.items() if _section(field) is None}
    yield f"\n## {prefix.rstrip('.') or 'At the top'}\n\n| key | default | meaning |\n|---|---|---|\n"
    for name, field in leaves.items():
        yield f"| `{prefix}{name}` | {_default(field)} | {' '.join((field.description or '').replace('|', '¦').split())} |\n"
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
