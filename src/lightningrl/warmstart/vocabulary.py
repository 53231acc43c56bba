"""The tokenizer of a tiny model: one token for each frequent word, and one for each phrase that the format repeats.

An agent's conversation is mostly fixed text: the system prompt, the tool descriptions, `<tool_call>` and the JSON
around its arguments. Each is one token, so a tool call has about seven tokens. The model learns what to say, not how
to spell it.
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
"""Fixed text of the chat template."""
HEADS = 32
"""Up to this many system prompts with their tools become one token each. If there are more, they differ between
tasks, and the model has to read them.
"""
MOST_WORDS = 2000
"""Most words that become a token."""
OFTEN = 5
"""A word in this many demonstrations becomes a token. Rarer words are split: a rare token is never learnt."""
FEW = 100
"""With up to this many demonstrations, every word becomes a token."""
VOCABULARY = 8192
"""Upper limit of the vocabulary; these words do not fill it."""


def tokenizer_for(demonstrations: Sequence[Sequence[Answer]]) -> Any:
    """A `transformers` tokenizer that is lossless on any text."""
    seen = Counter(word for answers in demonstrations for word in set(_words(answers)))
    often = OFTEN if len(demonstrations) > FEW else 1
    words = sorted(word for word, count in seen.most_common(MOST_WORDS) if count >= often)
    tokenizer = build_tokenizer([*words, "system user assistant"], vocab_size=VOCABULARY, spaces="apart")
    every = [answer for answers in demonstrations for answer in answers]
    begun = {beginning(answer): answer for answer in every}
    heads = {head for answer in begun.values() if (head := _head(answer, tokenizer))} if len(begun) <= HEADS else ()
    calls = [call for answer in every for call in answer.message.tool_calls]
    phrases = {phrase for call in calls for phrase in _phrases(call)}
    add_phrases(tokenizer, [*FORM, *sorted(phrases), *sorted(heads)])
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
    """(system prompt, tools as JSON)"""
    first = answer.messages[0]
    return first.content if first.role == "system" else "", json.dumps(answer.tools)


def _head(answer: Answer, tokenizer: Any) -> str:
    """The rendered system prompt with tools, without its end token; "" if there is none."""
    first = [shown(message) for message in answer.messages[:1]]
    text: str = tokenizer.apply_chat_template(first, tools=list(answer.tools) or None, tokenize=False)
    return text.partition("<|im_end|>")[0] if text.startswith("<|im_start|>system") else ""


def _phrases(call: ToolCall) -> list[str]:
    """The fixed phrases in a tool call.

    For `{"fact": "boss of ann"}` it is the text before `boss`. Further phrases go from the end of one argument to the
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
