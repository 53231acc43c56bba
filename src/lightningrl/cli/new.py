"""`lightningrl new my-agent`: copies `recipes/from_scratch`, which learns as it is, into a new folder."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lightningrl.cli.console import say
from lightningrl.errors import UserError

TEMPLATE = "from_scratch"
PARTS = ("agent.py", "tasks.py", "teacher.py", "recipe.toml", "gpu.toml", "README.md", "warmstart")
NAMED = 'name = "from-scratch'
"""The beginning of the line with the name in its `.toml` files."""
MEANT: dict[str, str] = {
    "agent.py": "`run` does a task; `reward` scores the answer",
    "tasks.py": "makes training and held-out tasks (none in both); or use a file, tasks.jsonl",
    "teacher.py": "answers in place of the model; then: lightningrl warmstart recipe.toml",
    "gpu.toml": "settings for a pretrained model, generated with vLLM on a GPU",
}
"""File to change → its purpose."""


def shipped(recipe: str) -> Path:
    """The folder of a recipe: beside the package in a wheel, two folders up in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside, checkout = package / "recipes", package.parent.parent / "recipes"
    return (inside if inside.exists() else checkout) / recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """A new folder with an agent that can be trained."""

    name: str
    folder: str
    """The path as given."""
    files: list[str]
    """Paths relative to the folder."""
    next: list[str]
    """Commands that train the agent."""


def lay_out(folder: Path) -> LaidOut:
    """Copy the template into a new or empty folder, under the folder's name."""
    name = folder.resolve().name
    if not re.fullmatch(r"\w[\w.-]*", name):
        hint = "use letters, digits, `_`, `-` and `.`, as in `my-agent`; runs get this name"
        raise UserError(f"an agent cannot be named `{name}`", hint=hint)
    template = shipped(TEMPLATE)
    files = [
        path for part in PARTS for path in sorted([template / part, *(template / part).rglob("*")]) if path.is_file()
    ]
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"`{folder}` exists and is not empty", hint="give another name; nothing was changed")
        for path in files:
            copy = folder / path.relative_to(template)
            copy.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            if path.suffix == ".toml":
                data = data.replace(NAMED.encode(), f'name = "{name}'.encode())
            copy.write_bytes(data)
    except OSError as error:
        hint = "give a folder that you may write to"
        raise UserError(f"cannot make the folder `{folder}`: {error.strerror}", hint=hint) from error
    enter = [] if folder.resolve() == Path.cwd() else [f"cd {shlex.quote(str(folder))}"]
    return LaidOut(
        name=name,
        folder=str(folder),
        files=[str(path.relative_to(template)) for path in files],
        next=[*enter, "lightningrl train recipe.toml"],
    )


def show(made: LaidOut, console: Console) -> None:
    """Print the next command, and the files to change."""
    say(console, (made.name, "bold"), ": an agent, its tasks, a reward, and a tiny model with bad habits to unlearn")
    _row(console, "watch it learn", " && ".join(made.next))
    say(console, ("\nThen change these files", "bold"))
    for file, meant in MEANT.items():
        _row(console, file, meant)


def _row(console: Console, what: str, how: str) -> None:
    say(console, f"  {what:<16}{how}")
