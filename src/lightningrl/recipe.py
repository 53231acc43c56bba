"""Read a recipe: TOML, then overrides such as `trainer.learning_rate=1e-4`. Mistakes are explained."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

import tomli_w
from pydantic import ValidationError

from lightningrl.config import Config, LearnerConfig, Section
from lightningrl.errors import UserError, meant


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and apply overrides (`a.b=value`, value in TOML). Raises `UserError` for the first mistake."""
    path = path / "recipe.toml" if path.is_dir() else path
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = "no recipe at" if isinstance(error, FileNotFoundError) else "cannot read the recipe"
        raise UserError(f"{reason} `{path}`", hint="give the path of a recipe.toml, or its folder") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"`{path}` is not valid TOML: {error}", hint="fix the line that it names") from error
    config = make_config(tree, overrides, folder=path.parent, where=str(path))
    # only `lightningrl run` without a recipe has neither
    for key, value in (("agent.reward", config.agent.reward), ("tasks.source", config.tasks.source)):
        if not value:
            meaning = _place(key.split("."))[2]
            raise UserError(f"`{key}` is missing in `{path}`", hint=f"`{key}`: {meaning}")
    return config


def make_config(tree: dict[str, Any], overrides: Sequence[str], *, folder: Path, where: str) -> Config:
    """Settings from a tree and overrides. `folder`: base of a relative `root`. `where`: name of the tree in errors."""
    for override in overrides:
        _lay_over(tree, override)
    tree["root"] = str((folder / tree.get("root", ".")).resolve())
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, where=where) from error


def dump_config(config: Config) -> str:
    """The resolved settings as TOML, which `load_config` can read."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _lay_over(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"override `{override}` has no `=`", hint="write it as `trainer.learning_rate=1e-4`")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *parents, last = key.strip().split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise UserError(
                f"`{name}` in override `{override}` is a value, not a section", hint="see `lightningrl train --dry-run`"
            )
    tree[last] = value


def _explain(error: ValidationError, *, where: str) -> UserError:
    """The error for one wrong setting, with what was probably meant. An unknown key comes first: its correct spelling
    is then missing, too.
    """
    first = min(error.errors(), key=lambda line: line["type"] != "extra_forbidden")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValidationError):
        return _explain(cause, where=where)
    loc, kind, meaning = _place(first["loc"])
    key, given = ".".join(loc), first["input"]
    hint = f"`{key}`: {meaning}" if meaning else "`lightningrl settings` explains every key"
    match first["type"]:
        case "extra_forbidden":
            return UserError(f"unknown key `{key}` in `{where}`", hint=meant(loc[-1], _keys(first["loc"][:-1])))
        case "missing" if isinstance(first["loc"][-1], str):
            return UserError(f"`{key}` is missing in `{where}`", hint=hint)
        case "literal_error" if get_origin(kind) is Literal:
            return UserError(f"`{key}` in `{where}` cannot be `{given}`", hint=meant(str(given), get_args(kind)))
        case "value_error":
            return UserError(f"`{key}` in `{where}`: {cause}", hint=hint)
        case "model_type" | "dict_type":
            return UserError(f"`{key}` in `{where}` should be a section, not `{given}`", hint=hint)
        case _:
            given = f" is `{given}`" if isinstance(given, str | int | float) else ""
            told = [line["msg"].partition(", unable")[0] for line in error.errors() if _place(line["loc"])[0] == loc]
            should = " or ".join(told).replace(" or Input should be", " or").replace("Input", "it")
            return UserError(f"`{key}` in `{where}`{given}: {should}", hint=hint)


def _place(loc: Sequence[str | int]) -> tuple[list[str], Any, str]:
    """Key, type and documentation of the setting at `loc`, which may contain the names of union members."""
    key, meaning = list[str](), ""
    kind: Any = Config
    for part in loc:
        if isinstance(kind, type) and issubclass(cast(Any, kind), Section):
            field = kind.model_fields.get(str(part))
            kind, meaning = (field.annotation, " ".join((field.description or "").split())) if field else (Any, "")
        elif get_origin(kind) in (list, dict):
            kind = LearnerConfig if key == ["policies"] else get_args(kind)[-1]
        else:
            break
        key.append(str(part))
    return key, kind, meaning


def _keys(loc: Sequence[str | int]) -> list[str]:
    """Keys that the section at `loc` may have."""
    section = _place(loc)[1]
    return [*section.model_fields, *(["preset"] if section is LearnerConfig else [])]
