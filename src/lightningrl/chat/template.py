"""How does a model read a conversation? Its folder's tokenizer and chat template, run with `tokenizers` and `jinja2`: no torch, no model.

messages + tools → `text` → `encode` → ids → engine → ids → `detokenizer` → text.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from lightningrl.chat.messages import Message, for_template
from lightningrl.errors import UserError

UNFINISHED = "\ufffd"
"""What a decoder makes of bytes that are not a character (yet)."""

PROBE = "probe-5f3a"


class BadConversation(UserError):
    """The template refuses these messages, e.g. because roles do not alternate."""


class ChatTemplate:
    """The tokenizer and chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, template: str, *, special: Mapping[str, str], eos_ids: Sequence[int] = ()) -> None:
        """`special` are the names a template may use, such as `bos_token`; `eos_ids` end a completion besides the turn end."""
        self._tokenizer = tokenizer
        self._special = dict(special)
        try:
            self._template = _environment().from_string(template)
            tail = self._tail()
        except TemplateError as error:
            raise UserError(f"the chat template cannot render a plain conversation: {error}", hint="mend chat_template.jinja") from error
        ids = self.encode(tail)
        self.turn_end_id = ids[0] if ids and self._is_added(ids[0]) else None
        """The token that ends an assistant's turn; None if the template has no such token."""
        self.turn_end = "" if self.turn_end_id is None else str(tokenizer.id_to_token(self.turn_end_id))
        ends = [] if self.turn_end_id is None else [self.turn_end_id]
        self.stop_token_ids = tuple(dict.fromkeys([*ends, *eos_ids]))
        """Every token that ends a completion."""

    @classmethod
    def load(cls, folder: str | Path) -> "ChatTemplate":
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a Hugging Face folder."""
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise UserError(f"`{folder}` has no tokenizer.json", hint="save the model's tokenizer there with `AutoTokenizer…save_pretrained`")
        config = _json(folder / "tokenizer_config.json")
        template = _template_text(folder, config)
        if not template:
            hint = "use an instruction-tuned model, or put a chat_template.jinja into the folder"
            raise UserError(f"`{folder}` has no chat template", hint=hint)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        special = {name: _token(config[name]) for name in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(name)}
        listed = _json(folder / "generation_config.json").get("eos_token_id") or []
        eos = [tokenizer.token_to_id(special["eos_token"])] if "eos_token" in special else []
        eos += listed if isinstance(listed, list) else [listed]
        return cls(tokenizer, template, special=special, eos_ids=[token_id for token_id in eos if token_id is not None])

    def text(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), open_turn: bool = True) -> str:
        """The conversation as the model reads it; with `open_turn` it ends where the assistant is to speak."""
        try:
            return self._template.render(
                messages=[for_template(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=open_turn,
                **self._special,
            )
        except Exception as error:
            raise BadConversation(f"the model's chat template refuses these messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, control tokens left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """One token by itself, control tokens included."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self.encode(self.text(messages, tools=tools))

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self)

    def _tail(self) -> str:
        """What the template puts after an answer."""
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}]
        return self._template.render(messages=turns, tools=None, add_generation_prompt=False, **self._special).rpartition(PROBE)[2]

    def _is_added(self, token_id: int) -> bool:
        """Added tokens are cut out before anything is merged, so text may be tokenised up to them and after them apart."""
        return token_id in self._tokenizer.get_added_tokens_decoder()


class Detokenizer:
    """Ids in, text out, never half a character. The pieces joined are `decode` of all ids.

    (Except for bytes that are no text, where tokenizers with byte fallback spell a whole run anew once it has turned out invalid.)
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._ids: list[int] = []
        self._known = 0
        """Ids before this one are out; the window begins where the piece before them did, for decoders that look back."""
        self._start = 0
        self._out = 0
        """Characters of the window that are out."""

    def feed(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        text = self._template.decode(self._ids[self._start :])
        whole = text.rstrip(UNFINISHED)
        piece = whole[self._out :]
        self._out += len(piece)
        if len(whole) == len(text) and piece:
            self._start, self._known = self._known, len(self._ids)
            self._out = len(self._template.decode(self._ids[self._start : self._known]))
        return piece

    def flush(self) -> str:
        """What is left at the end: characters that were never finished."""
        piece = self._template.decode(self._ids[self._start :])[self._out :]
        self._out += len(piece)
        return piece


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks, in templates made for supervised training, what the assistant says: here just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 wants it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """As `transformers` sets it up. Templates come from model folders: they run in a sandbox."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UserError(f"`{path}` cannot be read: {error}", hint="save the tokenizer again") from error


def _template_text(folder: Path, config: Mapping[str, Any]) -> str:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    found = config.get("chat_template") or ""
    if isinstance(found, list):  # several by name
        return next((entry["template"] for entry in found if entry["name"] == "default"), "")
    return found


def _token(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else value["content"]
