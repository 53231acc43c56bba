"""Which tokens does a tiny model need? A token for every frequent word, and one for every phrase that the agent's own
form repeats.

An agent's conversation is mostly form: the system prompt, the description of the tools, `<tool_call>` and what
surrounds its arguments. As one token each they cost nothing, and a call of a tool is some seven tokens long: the model
learns what to say, not how to spell it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightningrl.gateway.scripted import shown
from lightningrl.messages import Message, ToolCall
from lightningrl.models.tiny import BEGIN, WORD, add_phrases, build_tokenizer
from lightningrl.warmstart.demonstrations import Answer

FORM = (
    BEGIN,
    "<|im_start|>user\n",
    "<|im_start|>user\n<tool_response>\n",
    "\n</tool_response>",
    '"}}\n</tool_call>',
    "}}\n</tool_call>",
)
"""What the chat template puts around every conversation."""
HEADS = 32
"""System prompts with their tools that become a token each. Where there are more, they differ from task to task, and
have to be read.
"""
MOST_WORDS = 2000
OFTEN = 5
"""Demonstrations that a word must be in to be a token. Rarer ones are read and written in pieces: a token that is
hardly ever seen is never learnt."""
FEW = 100
"""Up to so many demonstrations every word counts."""
VOCABULARY = 8192
"""Far more than these words can fill: the tokenizer ends where they do."""


def tokenizer_for(demonstrations: Sequence[Sequence[Answer]]) -> Any:
    """A `transformers` tokenizer. Lossless on any text."""
    seen = Counter(word for answers in demonstrations for word in set(_words(answers)))
    often = OFTEN if len(demonstrations) > FEW else 1
    words = sorted(word for word, count in seen.most_common(MOST_WORDS) if count >= often)
    tokenizer = build_tokenizer([*words, "system user assistant"], vocab_size=VOCABULARY, spaces="apart")
    begun = {beginning(answer): answer for answers in demonstrations for answer in answers}
    heads = {head for answer in begun.values() if (head := _head(answer, tokenizer))} if len(begun) <= HEADS else ()
    calls = {
        phrase
        for answers in demonstrations
        for answer in answers
        for call in answer.message.tool_calls
        for phrase in _phrases(call)
    }
    add_phrases(tokenizer, [*FORM, *sorted(calls), *sorted(heads)])
    return tokenizer


def _words(answers: Iterable[Answer]) -> Iterator[str]:
    for answer in answers:
        for message in (*answer.messages, answer.message):
            yield from WORD.findall(_text(message))


def _text(message: Message) -> str:
    return " ".join(
        [message.content, message.reasoning, *(f"{call.name} {call.arguments}" for call in message.tool_calls)]
    )


def beginning(answer: Answer) -> tuple[str, str]:
    """System prompt and tools."""
    first = answer.messages[0]
    return first.content if first.role == "system" else "", json.dumps(answer.tools)


def _head(answer: Answer, tokenizer: Any) -> str:
    """What stands before the first user's turn, without the end of its own; "" if nothing does."""
    first = [shown(message) for message in answer.messages[:1]]
    text: str = tokenizer.apply_chat_template(first, tools=list(answer.tools) or None, tokenize=False)
    return text.partition("<|im_end|>")[0] if text.startswith("<|im_start|>system") else ""


def _phrases(call: ToolCall) -> list[str]:
    """Of `{"fact": "boss of ann"}`: what stands before `boss`. Of further arguments: from the end of one to the
    beginning of the next.
    """
    arguments = _object(call.arguments)
    begun = f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": '
    if not arguments:
        return [f"{begun}{call.arguments}}}\n</tool_call>"]
    keys = [re.search(rf'[{{,]\s*{re.escape(json.dumps(key))}:\s*"?', call.arguments) for key in arguments]
    found = [key.group() for key in keys if key]
    return [begun + found[0], *found[1:], *(f'"{key}' for key in found[1:])] if found else []


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
