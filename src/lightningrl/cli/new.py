"""`lightningrl new my-agent`: what does an agent of one's own begin with? With a copy of `recipes/from_scratch`, which
learns as it is.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lightningrl.cli.console import say
from lightningrl.cli.shipped import shipped
from lightningrl.errors import UserError

TEMPLATE = "from_scratch"
PARTS = ("agent.py", "tasks.py", "teacher.py", "recipe.toml", "gpu.toml", "README.md", "warmstart")
NAMED = 'name = "from-scratch'
"""How the name stands in its `.toml` files."""
MEANT: dict[str, str] = {
    "agent.py": "`run` does a task; `reward` says what the answer is worth",
    "tasks.py": "what it is asked: nothing may be in both splits; or a file, tasks.jsonl",
    "teacher.py": "plays a model that can do the task; then: lightningrl warmstart recipe.toml",
    "gpu.toml": "in place of a tiny model: one that reads any text, on a GPU",
}
"""What to change, and what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """A folder that can be trained."""

    name: str
    folder: str
    """As it was asked for."""
    files: list[str]
    """Relative to the folder."""
    next: list[str]
    """Commands that train it."""


def lay_out(folder: Path) -> LaidOut:
    """Copy the template into a new or empty folder, under the folder's name."""
    name = folder.resolve().name
    if not re.fullmatch(r"\w[\w.-]*", name):
        hint = "its runs are named after it: letters, digits, `_`, `-` and `.`, such as `my-agent`"
        raise UserError(f"an agent cannot be named `{name}`", hint=hint)
    template = shipped(TEMPLATE)
    files = [
        path for part in PARTS for path in sorted([template / part, *(template / part).rglob("*")]) if path.is_file()
    ]
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(
                f"`{folder}` is there already, and is not empty", hint="give another name; nothing was changed"
            )
        for path in files:
            copy = folder / path.relative_to(template)
            copy.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            copy.write_bytes(
                data.replace(NAMED.encode(), f'name = "{name}'.encode()) if path.suffix == ".toml" else data
            )
    except OSError as error:
        raise UserError(
            f"`{folder}` cannot be made: {error.strerror}", hint="give a folder that you may write to"
        ) from error
    enter = [] if folder.resolve() == Path.cwd() else [f"cd {shlex.quote(str(folder))}"]
    return LaidOut(
        name=name,
        folder=str(folder),
        files=[str(path.relative_to(template)) for path in files],
        next=[*enter, "lightningrl train recipe.toml"],
    )


def show(made: LaidOut, console: Console) -> None:
    """What to type next, and what to change first."""
    say(console, (made.name, "bold"), ": an agent, its tasks, a reward, and a tiny model that has bad habits")
    _row(console, "see it learn", " && ".join(made.next))
    say(console, ("\nthen make it yours", "bold"))
    for file, meant in MEANT.items():
        _row(console, file, meant)


def _row(console: Console, what: str, how: str) -> None:
    say(console, f"  {what:<16}{how}")
