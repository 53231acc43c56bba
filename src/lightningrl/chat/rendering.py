"""How is a chat template run? As `transformers` runs it, in a sandbox, since templates come from model folders."""

import json
import secrets
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lightningrl.chat.turns import Arguments
from lightningrl.errors import UserError

MARK = secrets.token_hex(8)
"""Stands for text in a rendering, to find the place again. Random in each process, so that no message contains it."""

OF_ALL_DICTS = frozenset(dir(dict))
"""Attributes of a dict; they win over keys."""


class BadConversation(UserError):
    """The template refuses these messages, e.g. because roles do not alternate."""


def compiled(source: str, *, verbatim: bool = False) -> Template:
    """Compile a template. With `verbatim`, it writes the arguments of tool calls byte for byte as the model wrote them;
    else as JSON with the same meaning.
    """
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = partial(_tojson, verbatim=verbatim)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # each rendering copies it; copying a ChainMap costs five times as much
    return template


class _Sandbox(ImmutableSandboxedEnvironment):
    """Looks up `message.role` as a key, not as an attribute first: that would raise, and double the time."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or attribute in OF_ALL_DICTS:
            return super().getattr(obj, attribute)
        return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)


class _Generation(Extension):
    """Renders `{% generation %}…{% endgeneration %}`, which marks assistant text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012 - required by jinja2

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
    *,
    verbatim: bool,
) -> str:
    texts: list[str] = []

    def hold(text: str) -> str:
        texts.append(text)
        return f"{MARK}-{len(texts) - 1}-"

    shown = _hollow(value, hold) if verbatim else value
    written = json.dumps(shown, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    for place, text in enumerate(texts):
        written = written.replace(f'"{MARK}-{place}-"', text)
    return written


def _hollow(value: Any, hold: Callable[[str], str]) -> Any:
    """`value` with all arguments in it, however deep, replaced by what `hold` returns."""
    if isinstance(value, Arguments):
        return hold(value.text)
    if isinstance(value, dict):
        return {key: _hollow(item, hold) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hollow(item, hold) for item in value]
    return value


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
