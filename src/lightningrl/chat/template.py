"""How does a model read a conversation? With the tokenizer and the chat template of its folder. No torch, no weights.

messages + tools → `opened` → `encode` → ids → engine → ids → `detokenizer` → text
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from jinja2 import Template
from tokenizers import Tokenizer, decoders

from lightningrl.chat.adaptation import adapted, spelled, turns_of
from lightningrl.chat.detokenizer import Detokenizer
from lightningrl.chat.encoder import LONG, Encoder
from lightningrl.chat.rendering import MARK, BadConversation, compiled
from lightningrl.chat.suffix import Suffixes
from lightningrl.chat.traits import Turn, study
from lightningrl.chat.turns import for_template
from lightningrl.errors import UserError
from lightningrl.messages import Message

__all__ = ["BadConversation", "ChatTemplate"]

T = TypeVar("T")

USER = Message(role="user", content="x")

SHORT = 64
"""Characters. Tokenising a shorter text costs about as much as looking up its ids."""


class ChatTemplate:
    """The tokenizer and chat template of one model."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, *, special: Mapping[str, str], eos_ids: Sequence[int] = ()
    ) -> None:
        """`special`: the tokens that a template may name, such as `bos_token`. `eos_ids`: tokens that end a completion,
        besides the one that ends a turn.
        """
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self.encode, self.encode_long = self._encoder.encode, self._encoder.encode_long
        """Text → ids."""
        self._looks_back = not isinstance(tokenizer.decoder, decoders.ByteLevel)  # that one decodes each byte alone
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._control_texts: dict[str, tuple[str, ...]] = {}
        """By their first character. Added tokens that are not special are text, such as the end of a tool call."""
        for text in (token.content for token in added.values() if token.special):
            self._control_texts[text[:1]] = (*self._control_texts.get(text[:1], ()), text)
        self._special = dict(special)
        self._source = template
        try:
            self._template = compiled(template)
            self._in_parts = not self._shows_text()
            self.traits = study(self._run, template)
            last = self._after_answer([])
            followed = self._after_answer([{"role": "user", "content": "x"}])
        except Exception as error:  # a template may raise anything
            message = f"the chat template cannot render a plain conversation: {error}"
            raise UserError(message, hint="fix chat_template.jinja") from error
        history_end = self._added_first(followed)
        self.turn_end_id = next((token_id for token_id in self.encode(last) if self.is_added(token_id)), None)
        """The token that ends the assistant's turn; None if the template has no such token."""
        if self.turn_end_id is None and history_end in eos_ids:
            self.turn_end_id = history_end  # the first token of the next turn ends the turn before, as in GLM
        self.turn_end = "" if self.turn_end_id is None else str(tokenizer.id_to_token(self.turn_end_id))
        ends = [] if self.turn_end_id is None else [self.turn_end_id]
        self.stop_token_ids = tuple(dict.fromkeys([*ends, *eos_ids]))
        """All tokens that end a completion."""
        known = [*self.stop_token_ids, *([] if history_end is None else [history_end])]
        self.suffixes = Suffixes(self)
        end = self.turn_end
        self._cuts = bool(end) and self.encode(f"a b {end} c") == [*self.encode("a b "), *self.encode(f"{end} c")]
        """Text before the end of a turn and text from there on may be tokenised apart."""
        self._ends = tuple({str(tokenizer.id_to_token(token_id)) for token_id in known})

    @classmethod
    def load(cls, folder: str | Path) -> "ChatTemplate":
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a Hugging Face folder."""
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            hint = "save the model's tokenizer there with `AutoTokenizer…save_pretrained`"
            raise UserError(f"`{folder}` has no tokenizer.json", hint=hint)
        config = _json(folder / "tokenizer_config.json")
        template = _template_text(folder, config)
        if not template:
            hint = "use an instruction-tuned model, or put a chat_template.jinja into the folder"
            raise UserError(f"`{folder}` has no chat template", hint=hint)
        tokenizer = _read(folder / "tokenizer.json", lambda path: Tokenizer.from_file(str(path)))
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: _token(config[name]) for name in names if config.get(name)}
        listed = _json(folder / "generation_config.json").get("eos_token_id") or []
        eos = [tokenizer.token_to_id(special["eos_token"])] if "eos_token" in special else []
        eos += listed if isinstance(listed, list) else [listed]
        return cls(tokenizer, template, special=special, eos_ids=[token_id for token_id in eos if token_id is not None])

    @property
    def thinking(self) -> Literal["none", "may", "begun"]:
        """Do answers begin with reasoning? `begun`: the prompt ends with its opening tag."""
        if self.traits.think is None or (self.traits.opening and not self.traits.opens_thought):
            return "none"
        return "begun" if self.traits.opens_thought else "may"

    def text(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), open_turn: bool = True
    ) -> str:
        """The conversation as the template renders it. With `open_turn` it ends where the assistant's turn begins."""
        return self._render(turns_of(messages, self.traits), tools, open_turn)

    def opened(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), begun: bool = False
    ) -> str:
        """The conversation up to where the model continues: in a new turn or, with `begun`, in the last message."""
        if not begun:
            return self.text(messages, tools=tools)
        last = messages[-1]
        marked = self.text([*messages[:-1], replace(last, content=last.content + MARK)], tools=tools, open_turn=False)
        before, found, _ = marked.rpartition(MARK)
        if not found:
            raise BadConversation("the model's chat template hides the last message, which the answer has to continue")
        return before

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), begun: bool = False
    ) -> list[int]:
        """The ids of `opened`."""
        text = self.opened(messages, tools=tools, begun=begun)
        cut = text.find(self.turn_end) if self._cuts else -1
        if cut < SHORT:
            return self.encode(text)
        return [*self._encoder.encode_start(text[:cut]), *self.encode(text[cut:])]

    def after(self, marked: str) -> tuple[str, str] | None:
        """Cut a rendering with a mark in an answer: the text from the mark to the end of that turn, and the text from
        this end on. None if the mark is not shown, or the turn does not end.
        """
        _, shown, rest = marked.rpartition(MARK)
        if not shown:
            return None
        cut = min((place for place in map(rest.find, self._ends) if place >= 0), default=-1)
        if rest.startswith(self._control_texts.get(rest[:1], ())):
            cut = 0  # a control token follows directly, so no text stands in between
        return None if cut < 0 else (rest[:cut], rest[cut:])

    def answer_ids(
        self, message: Message, *, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The ids that a model would have to sample to answer `messages` with `message`, end of turn included.

        Text and the arguments of tool calls come out byte for byte.
        """
        said = spelled(message, self.traits) if may_be_begun(messages) else self._said(message, tools)
        end = self.turn_end_id if self.turn_end_id is not None else next(iter(self.stop_token_ids), None)
        return self.encode(said) + ([] if end is None else [end])

    def decode(self, token_ids: Sequence[int], *, control: bool = False) -> str:
        """The text of ids; control tokens only with `control`. Other threads run while many ids are decoded."""
        if len(token_ids) > LONG:
            return self._tokenizer.decode_batch([token_ids], skip_special_tokens=not control)[0]
        return self._tokenizer.decode(token_ids, skip_special_tokens=not control)

    def token_text(self, token_id: int) -> str:
        """The text of one token, also of a control token."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def is_added(self, token_id: int) -> bool:
        """Added tokens are never merged with others, so the text before one and after it may be tokenised apart."""
        return token_id in self._added

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(partial(self._tokenizer.decode, skip_special_tokens=True), looks_back=self._looks_back)

    def _said(self, message: Message, tools: Sequence[Mapping[str, Any]]) -> str:
        """The text of an answer as the template writes it into a history, without the generation prompt before it and
        the end of turn behind it.
        """
        traits = self.traits
        content_mark, reasoning_mark = f"{MARK}-content-", f"{MARK}-reasoning-"
        if message.tool_calls and not traits.reads_calls:
            return self._with_thought("", message.reasoning).removeprefix(traits.opening) + spelled(message, traits)
        content = content_mark if message.content or not message.tool_calls else ""
        reasoning = reasoning_mark if message.reasoning else ""
        asked = turns_of([USER], traits)
        answer = for_template(adapted(replace(message, content=content, reasoning=reasoning), traits))
        prompt = self._render(asked, tools, True).removesuffix(traits.opening)
        try:
            whole = self._render([*asked, answer], tools, False, template=self._verbatim)
        except BadConversation:
            if not message.tool_calls:
                raise
            return spelled(message, traits)  # e.g. several calls where the template allows one
        if not whole.startswith(prompt):
            raise BadConversation("the model's chat template renders an answer differently from its generation prompt")
        said = whole.removeprefix(prompt)
        said = self._without_end(said) if message.tool_calls else _up_to(said, content)
        said = self._with_thought(said, reasoning).removeprefix(traits.opening)
        if content and content not in said and traits.tool_format.spelling == "hermes":
            said = f"{content}\n{said}"
        return said.replace(content_mark, message.content).replace(reasoning_mark, message.reasoning)

    def _with_thought(self, said: str, reasoning: str) -> str:
        """Put the reasoning in front of an answer if there is any, or if the prompt has opened it. Many templates leave
        out the reasoning of earlier turns.
        """
        if self.traits.think is None or not (reasoning or self.traits.opens_thought):
            return said
        begin, end = self.traits.think
        lead = said.lstrip()
        if lead.startswith(begin) and (not reasoning or reasoning in lead):
            if not self.traits.opens_thought:
                return said
            return self.traits.opening + lead[len(begin) :].lstrip("\n")
        opening = self.traits.opening if self.traits.opens_thought else f"{begin}\n"
        return f"{opening}{reasoning}\n{end}\n\n{said}"

    def _without_end(self, text: str) -> str:
        """Cut where the turn ends. Arguments may contain anything, so without a mark the last end counts."""
        start = text.rfind(f"{MARK}-")
        places = [text.find(end, start) if start >= 0 else text.rfind(end) for end in self._ends]
        shown = [place for place in places if place >= 0]
        return text[: min(shown)] if shown else text.rstrip("\n")

    @cached_property
    def _verbatim(self) -> Template:
        return compiled(self._source, verbatim=True)

    def _render(
        self,
        turns: list[Turn],
        tools: Sequence[Mapping[str, Any]],
        open_turn: bool,
        *,
        template: Template | None = None,
    ) -> str:
        try:
            return self._run(turns, tools, open_turn, template=template)
        except Exception as error:
            raise BadConversation(f"the model's chat template refuses these messages: {error}") from error

    def _run(
        self,
        turns: list[Turn],
        tools: Sequence[Mapping[str, Any]],
        open_turn: bool,
        *,
        template: Template | None = None,
    ) -> str:
        chosen = self._template if template is None else template
        if self._in_parts:
            turns = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        return chosen.render(
            messages=turns, tools=list(tools) or None, add_generation_prompt=open_turn, **self._special
        )

    def _shows_text(self) -> bool:
        """False if content has to come in parts, as in templates of models that also see images."""
        self._in_parts = False
        try:
            return MARK in self._run([{"role": "user", "content": MARK}], (), True)
        except Exception:  # noqa: BLE001 - a template may raise anything
            return False

    def _after_answer(self, tail: list[Turn]) -> str:
        turns: list[Turn] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}, *tail]
        return self._run(turns, (), False).rpartition(MARK)[2]

    def _added_first(self, text: str) -> int | None:
        """The token that `text` begins with, if it is an added token."""
        ids = self.encode(text)
        return ids[0] if ids and self.is_added(ids[0]) else None


def _up_to(said: str, mark: str) -> str:
    """An answer of text alone, without white space or remarks that the template puts around it."""
    before, found, after = said.partition(mark)
    return (before if before.strip() else "") + found if found else after


def may_be_begun(messages: Sequence[Message]) -> bool:
    """May the last message be the beginning of the answer? A message with a name is another agent's."""
    if not messages or messages[-1].role != "assistant":
        return False
    last = messages[-1]
    return not last.tool_calls and last.name is None and not last.ended


def _read(path: Path, parse: Callable[[Path], T]) -> T:
    try:
        return parse(path)
    except Exception as error:
        hint = "save the tokenizer again, or copy or download its folder again"
        raise UserError(f"`{path}` cannot be read: {error}", hint=hint) from error


def _json(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    return _read(path, lambda path: msgspec.json.decode(path.read_bytes(), type=dict)) if path.is_file() else {}


def _template_text(folder: Path, config: Mapping[str, Any]) -> str:
    source = folder / "chat_template.jinja"
    if source.is_file():
        return _read(source, lambda path: path.read_text(encoding="utf-8"))
    found = config.get("chat_template") or ""
    if isinstance(found, list):  # several by name
        return next((entry["template"] for entry in found if entry["name"] == "default"), "")
    return found


def _token(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else value["content"]
