"""A run's settings as they may be shown: without keys, passwords and tokens. And those that differ from the defaults.

Settings name the environment variables of keys, not the keys. But a URL may have a password, a command may have a
header, and the agent's environment may have anything.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from lightningrl.config import Config

HIDDEN = "•••"
SECRET = (
    r"(?:(?:api|access|private)[_-]?key|key|token|secret|passw(?:or)?d|passphrase|credentials?|cookie"
    r"|auth(?:orization)?|sig(?:nature)?|(?<![a-z0-9])pat)(?:[_-]value)?"
)
"""Words that name a secret."""
NAMED = re.compile(rf"(?:^|[^a-z0-9]){SECRET}$", re.IGNORECASE)
"""A key, a flag or a header with a secret as its value: `api_key`, `--hf-token`. Not `key_env` or `tokenizer`."""
IN_TEXT = (
    (re.compile(r"(?<=://)[^/?#\s@:]*:(?!\d+/)[^?#\s]*@"), None),  # user:password; the user stays
    (re.compile(r"(?<=http://)[^/?#\s]+@|(?<=https://)[^/?#\s]+@"), f"{HIDDEN}@"),  # a token in place of a user
    (re.compile(r"(?<=\s)(-u|--user)[\s=]+[^\s:]+:\S+"), rf"\1 {HIDDEN}"),  # the login of curl
    (re.compile(rf"([\w-]*{SECRET}[\"']?\s*[=:]\s*)([\"']).*?\2", re.IGNORECASE), rf"\1\2{HIDDEN}\2"),
    (
        re.compile(rf"([\w-]*{SECRET}[\"']?\s*[=:]\s*[\"']?)(?:(?:bearer|basic|token)\s+)?[^\s&\"',;]+", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\b(bearer|basic)\s+[^\s\"',;]+", re.IGNORECASE), rf"\1 {HIDDEN}"),
    (
        re.compile(r"\b(?:sk|pk|rk|hf|ghp|gho|ghs|glpat|xox[a-z]|lrl|npm|pypi|AKIA|AIza|eyJ)[-_A-Za-z0-9][-\w.]{10,}"),
        HIDDEN,
    ),
)
"""Secrets inside a text: URLs, `name=value`, headers, and the forms of well-known tokens."""


def redacted(config: Config) -> dict[str, Any]:
    """The settings as plain nested values; secrets are replaced by `•••`."""
    return _Redaction(config).tree(config.model_dump(mode="json"))


def changed_settings(config: Config) -> dict[str, Any]:
    """`a.b` → value of each setting that differs from its default, as `redacted` shows it."""
    shown = dict(_leaves(redacted(config), ()))
    given = dict(_leaves(config.model_dump(mode="json"), ()))
    usual = dict(_leaves(_defaults(Config), ()))
    return {
        ".".join(path): shown[path]
        for path, value in given.items()
        if path[0] != "root" and (path not in usual or usual[path] != value) and value not in (None, {}, [])
    }


class _Redaction:
    def __init__(self, config: Config) -> None:
        values = (os.environ.get(name, "") for name in config.secrets())
        self._known = [value for value in values if value]

    def tree(self, value: Any, *, name: str = "", parent: str = "") -> Any:
        """The value of the setting `name` in the section `parent`, without its secrets."""
        if isinstance(value, Mapping):
            return {key: self.tree(inner, name=str(key), parent=name) for key, inner in value.items()}
        if isinstance(value, list):
            return list(self._items(value))
        if not isinstance(value, str) or not value:
            return value
        return HIDDEN if NAMED.search(name) or parent == "env" else self.text(value)

    def text(self, text: str) -> str:
        for value in self._known:
            text = text.replace(value, HIDDEN)
        for pattern, instead in IN_TEXT:
            text = pattern.sub(instead or _without_password, text)
        return text

    def _items(self, values: Sequence[Any]) -> Iterator[Any]:
        """The items of a list, e.g. a command: what follows a flag with a secret's name is hidden."""
        before = ""
        for value in values:
            login = before in ("-u", "--user") and isinstance(value, str) and ":" in value
            yield HIDDEN if login or (before.startswith("-") and NAMED.search(before)) else self.tree(value)
            before = value if isinstance(value, str) else ""


def _without_password(found: re.Match[str]) -> str:
    return f"{found[0].partition(':')[0]}:{HIDDEN}@"


def _defaults(section: type[BaseModel]) -> dict[str, Any]:
    """The default of each setting; required ones have none, but the settings of a required section may have."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if not field.is_required():
            found[name] = to_jsonable_python(field.get_default(call_default_factory=True))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found[name] = _defaults(field.annotation)
    return found


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of all values that are not sections."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value
