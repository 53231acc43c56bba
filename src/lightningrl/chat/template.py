"""How does a model read a conversation? Its folder's tokenizer and chat template, run with `tokenizers` and `jinja2`:
no torch, no model.

messages + tools → `opened` → `encode` → ids → engine → ids → `detokenizer` → text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import msgspec
from jinja2 import Template
from tokenizers import Tokenizer, decoders

from lightningrl.chat.detokenizer import Detokenizer
from lightningrl.chat.encoder import LONG, Encoder
from lightningrl.chat.matching import ROLES, is_result
from lightningrl.chat.messages import folded, for_template, merged
from lightningrl.chat.rendering import MARK, BadConversation, compiled
from lightningrl.chat.suffix import Suffixes
from lightningrl.chat.traits import SHORT_ID, Turn, study
from lightningrl.errors import UserError
from lightningrl.messages import Message

__all__ = ["BadConversation", "ChatTemplate"]

USER = Message(role="user", content="x")

AGAIN = "save the tokenizer again, or copy or download its folder again"
SHORT = 64
"""Characters; tokenising less is nearly as cheap as looking it up."""


class ChatTemplate:
    """The tokenizer and chat template of one model."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, *, special: Mapping[str, str], eos_ids: Sequence[int] = ()
    ) -> None:
        """`special` are the names a template may use, such as `bos_token`; `eos_ids` end a completion besides the turn
        end.
        """
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self.encode, self.encode_long = self._encoder.encode, self._encoder.encode_long
        """Text → ids."""
        self._looks_back = not isinstance(
            tokenizer.decoder, decoders.ByteLevel
        )  # bytes are put behind each other, whatever they are
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._control_texts: dict[str, tuple[str, ...]] = {}
        for token in added.values():  # by their first character
            if token.special:  # others are text, such as what closes a tool call
                self._control_texts[token.content[:1]] = (
                    *self._control_texts.get(token.content[:1], ()),
                    token.content,
                )
        self._special = dict(special)
        self._source = template
        try:
            self._template = compiled(template)
            self._in_parts = not self._shows_text()
            self.traits = study(self._run, template)
            """The habits of the template."""
            last = self._after_answer([])
            followed = self._after_answer([{"role": "user", "content": "x"}])
        except Exception as error:  # a template may raise anything
            raise UserError(
                f"the chat template cannot render a plain conversation: {error}", hint="mend chat_template.jinja"
            ) from error
        history_end = self._added_first(followed)
        self.turn_end_id = next((token_id for token_id in self.encode(last) if self.is_added(token_id)), None)
        if self.turn_end_id is None and history_end in eos_ids:
            self.turn_end_id = history_end  # the next turn's first token ends the one before, as GLM has it
        """The token that ends an assistant's turn; None if the template has no such token."""
        self.turn_end = "" if self.turn_end_id is None else str(tokenizer.id_to_token(self.turn_end_id))
        ends = [] if self.turn_end_id is None else [self.turn_end_id]
        self.stop_token_ids = tuple(dict.fromkeys([*ends, *eos_ids]))
        """Every token that ends a completion."""
        known = [*self.stop_token_ids, *([] if history_end is None else [history_end])]
        self.suffixes = Suffixes(self)
        end = self.turn_end
        self._cuts = bool(end) and self.encode(f"a b {end} c") == [*self.encode("a b "), *self.encode(f"{end} c")]
        """A text may be tokenised up to the end of a turn, and from there on, apart."""
        self._ends = tuple({str(tokenizer.id_to_token(token_id)) for token_id in known})

    @classmethod
    def load(cls, folder: str | Path) -> "ChatTemplate":
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a Hugging Face folder."""
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise UserError(
                f"`{folder}` has no tokenizer.json",
                hint="save the model's tokenizer there with `AutoTokenizer…save_pretrained`",
            )
        config = _json(folder / "tokenizer_config.json")
        template = _template_text(folder, config)
        if not template:
            hint = "use an instruction-tuned model, or put a chat_template.jinja into the folder"
            raise UserError(f"`{folder}` has no chat template", hint=hint)
        tokenizer = _tokenizer(folder / "tokenizer.json")
        special = {
            name: _token(config[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if config.get(name)
        }
        listed = _json(folder / "generation_config.json").get("eos_token_id") or []
        eos = [tokenizer.token_to_id(special["eos_token"])] if "eos_token" in special else []
        eos += listed if isinstance(listed, list) else [listed]
        return cls(tokenizer, template, special=special, eos_ids=[token_id for token_id in eos if token_id is not None])

    @property
    def tool_format(self) -> str:
        """The spelling of tool calls, as `chat.tools` names it; `traits.tool_format` has its letters."""
        return self.traits.tool_format.spelling

    @property
    def thinking(self) -> Literal["none", "may", "begun"]:
        """Do answers begin with a thought? `begun`: the prompt has opened its tag already."""
        if self.traits.think is None or (self.traits.opening and not self.traits.opens_thought):
            return "none"
        return "begun" if self.traits.opens_thought else "may"

    def text(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), open_turn: bool = True
    ) -> str:
        """The conversation as the template renders it. With `open_turn` it ends where the assistant's turn begins."""
        return self._render(self._turns(messages), tools, open_turn)

    def opened(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), begun: bool = False
    ) -> str:
        """The conversation up to where the model is to speak: in a turn of its own or, if it is `begun`, in the middle
        of the last one.
        """
        if not begun:
            return self.text(messages, tools=tools)
        last = messages[-1]
        marked = self.text([*messages[:-1], replace(last, content=last.content + MARK)], tools=tools, open_turn=False)
        before, found, _ = marked.rpartition(MARK)
        if not found:
            raise BadConversation(
                "the model's chat template does not show the last message, which the answer is to go on with"
            )
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
        """Of a rendering with a mark in an answer: what stands between the mark and the end of that turn, and all from
        this end on.
        """
        _, shown, rest = marked.rpartition(MARK)
        if not shown:
            return None
        places = [place for end in self._ends if (place := rest.find(end)) >= 0]
        cut = min(places, default=-1)
        if rest.startswith(self._control_texts.get(rest[:1], ())):
            cut = 0  # whatever token it is that comes next: nothing stands in between
        return None if cut < 0 else (rest[:cut], rest[cut:])

    def answer_ids(
        self, message: Message, *, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """What a model that was asked `messages` would have had to sample to say `message`, the end of its turn
        included.

        Text and the arguments of tool calls come out byte for byte.
        """
        said = self._prefilled(message) if may_be_begun(messages) else self._said(message, tools)
        end = self.turn_end_id if self.turn_end_id is not None else next(iter(self.stop_token_ids), None)
        return self.encode(said) + ([] if end is None else [end])

    def decode(self, token_ids: Sequence[int], *, control: bool = False) -> str:
        """The text of ids, control tokens left out unless `control` asks for them. Other threads run while many ids are
        decoded.
        """
        if len(token_ids) > LONG:
            return self._tokenizer.decode_batch([token_ids], skip_special_tokens=not control)[0]
        return self._tokenizer.decode(token_ids, skip_special_tokens=not control)

    def token_text(self, token_id: int) -> str:
        """One token by itself, control tokens included."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def is_added(self, token_id: int) -> bool:
        """Added tokens are never merged with others, so the text before one and after it may be tokenised apart."""
        return token_id in self._added

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(partial(self._tokenizer.decode, skip_special_tokens=True), looks_back=self._looks_back)

    def _said(self, message: Message, tools: Sequence[Mapping[str, Any]]) -> str:
        """The answer as the template writes it into a history, without the end of the turn, given what the generation
        prompt has said.
        """
        marks = {f"{MARK}-content-": message.content, f"{MARK}-reasoning-": message.reasoning}
        content, reasoning = (mark if text else "" for mark, text in marks.items())
        if not message.tool_calls:
            content = next(iter(marks))
        if message.tool_calls and not self.traits.reads_calls:
            begun = self._with_thought("", message.reasoning).removeprefix(self.traits.opening)
            return begun + self._spelled(message, message.content)
        asked = self._turns([USER])
        answer = for_template(self._adapted(replace(message, content=content, reasoning=reasoning)))
        prompt = self._render(asked, tools, True).removesuffix(self.traits.opening)
        try:
            whole = self._render([*asked, answer], tools, False, template=self._verbatim)
        except BadConversation:
            if not message.tool_calls:
                raise
            return self._spelled(message, message.content)  # e.g. several calls where the template knows one at a time
        if not whole.startswith(prompt):
            raise BadConversation("the model's chat template renders an answer in another way than it asks for one")
        said = (
            self._without_end(whole.removeprefix(prompt))
            if message.tool_calls or not content
            else _up_to(whole.removeprefix(prompt), content)
        )
        said = self._with_thought(said, reasoning).removeprefix(self.traits.opening)
        if content and content not in said and self.traits.tool_format.spelling == "hermes":
            said = f"{content}\n{said}"
        for mark, text in marks.items():
            said = said.replace(mark, text)
        return said

    def _with_thought(self, said: str, reasoning: str) -> str:
        """An answer that begins with a thought where one was asked for or given; templates tend to leave out those of
        the past.
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

    def _spelled(self, message: Message, content: str) -> str:
        """Tool calls in letters of ours, for a template that shows none."""
        form = self.traits.tool_format
        between = f"{form.end}; {form.begin}" if form.between is None else form.between
        written = (
            form.begin
            + between.join(f"{call.name}{form.middle}{call.arguments or '{}'}" for call in message.tool_calls)
            + form.end
        )
        return f"{content}\n{written}" if content else written

    def _prefilled(self, message: Message) -> str:
        return self._spelled(message, message.content) if message.tool_calls else message.content

    def _without_end(self, text: str) -> str:
        """Cut where the turn ends. Arguments may contain anything, so without a mark the last end counts."""
        start = text.rfind(f"{MARK}-")
        places = [
            place for end in self._ends if (place := text.find(end, start) if start >= 0 else text.rfind(end)) >= 0
        ]
        return text[: min(places)] if places else text.rstrip("\n")

    @cached_property
    def _verbatim(self) -> Template:
        return compiled(self._source, verbatim=True)

    def _turns(self, messages: Sequence[Message]) -> list[Turn]:
        """The messages as dicts, with what this template refuses said in a way that it takes."""
        traits = self.traits
        if not traits.shows_results:
            messages = [self._spoken(message) for message in messages]
        if traits.system != "anywhere" and any(
            message.role in ("system", "developer") for message in messages[traits.system == "first" :]
        ):
            messages = folded([self._adapted(message) for message in messages], keep_first=traits.system == "first")
        if not traits.users_in_a_row:
            messages = merged(messages)
        return [for_template(self._adapted(message)) for message in messages]

    def _spoken(self, message: Message) -> Message:
        """Tool calls and results as text, for a template that knows no results."""
        if message.tool_calls:
            return replace(message, content=self._spelled(message, message.content), tool_calls=())
        if is_result(message):
            return Message(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
        return message

    def _adapted(self, message: Message) -> Message:
        if message.role in ROLES and not (message.role == "developer" and self.traits.developer):
            message = replace(message, role=ROLES[message.role])
        if self.traits.short_ids and (message.tool_calls or message.tool_call_id is not None):
            calls = tuple(replace(call, id=_short(call.id)) for call in message.tool_calls)
            answered = message.tool_call_id
            message = replace(message, tool_calls=calls, tool_call_id=None if answered is None else _short(answered))
        return message

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
        """False: content has to come in parts, as models that also see images have it."""
        self._in_parts = False
        try:
            return MARK in self._run([{"role": "user", "content": MARK}], (), True)
        except Exception:  # noqa: BLE001 - a template may raise anything
            return False

    def _after_answer(self, tail: list[Turn]) -> str:
        turns: list[Turn] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}, *tail]
        return self._run(turns, (), False).rpartition(MARK)[2]

    def _added_first(self, text: str) -> int | None:
        """The token that `text` begins with, if that is an added one."""
        ids = self.encode(text)
        return ids[0] if ids and self.is_added(ids[0]) else None


def _up_to(said: str, mark: str) -> str:
    """The rendering of an answer that is only text, without white space or remarks that the template puts around it."""
    before, found, after = said.partition(mark)
    return (before if before.strip() else "") + found if found else after


def may_be_begun(messages: Sequence[Message]) -> bool:
    """May the last message be the beginning of the answer? What another agent has said has a name."""
    if not messages or messages[-1].role != "assistant":
        return False
    last = messages[-1]
    return not last.tool_calls and last.name is None and not last.ended


def _short(call_id: str) -> str:
    return call_id if len(call_id) == SHORT_ID else blake2b(call_id.encode(), digest_size=8).hexdigest()[:SHORT_ID]


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except ValueError as error:
        raise UserError(f"`{path}` cannot be read: {error}", hint=AGAIN) from error


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise UserError(f"`{path}` cannot be read: {error}", hint=AGAIN) from error


def _template_text(folder: Path, config: Mapping[str, Any]) -> str:
    if (folder / "chat_template.jinja").is_file():
        try:
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"`{folder / 'chat_template.jinja'}` cannot be read: {error}", hint=AGAIN) from error
    found = config.get("chat_template") or ""
    if isinstance(found, list):  # several by name
        return next((entry["template"] for entry in found if entry["name"] == "default"), "")
    return found


def _token(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else value["content"]
