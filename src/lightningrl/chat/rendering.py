"""How is a chat template run? As `transformers` runs it, in a sandbox: templates come from model folders."""

import json
import secrets
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lightningrl.chat.messages import Arguments
from lightningrl.errors import UserError

MARK = secrets.token_hex(8)
"""Stands for text in a rendering, to be found again. Drawn anew by each process, so that no message can contain it."""

OF_ALL_DICTS = frozenset(dir(dict))
"""Attributes, which go before keys."""


class BadConversation(UserError):
    """The template refuses these messages, e.g. because roles do not alternate."""


def compiled(source: str, *, verbatim: bool = False) -> Template:
    """A template; `verbatim` writes the arguments of tool calls as the model wrote them, where others write the JSON
    that it means.
    """
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson_verbatim if verbatim else _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    template = environment.from_string(source)
    template.globals = dict(
        template.globals
    )  # each rendering copies it, and a chain of maps costs five times as much to copy
    return template


class _Sandbox(ImmutableSandboxedEnvironment):
    """Finds `message.role` in a dict without asking for an attribute first, which would raise: half the cost of a short
    conversation.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or attribute in OF_ALL_DICTS:
            return super().getattr(obj, attribute)
        return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks, in templates made for supervised training, what the assistant says:
    here just text.
    """

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
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _tojson_verbatim(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    texts: list[str] = []

    def hold(text: str) -> str:
        texts.append(text)
        return f"{MARK}-{len(texts) - 1}-"

    written = _tojson(_hollow(value, hold), ensure_ascii, indent, separators, sort_keys)
    for place, text in enumerate(texts):
        written = written.replace(f'"{MARK}-{place}-"', text)
    return written


def _hollow(value: Any, hold: Callable[[str], str]) -> Any:
    """`value` with what `hold` gives in place of all arguments in it, however deep."""
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
