"""The chat templates in `zoo/`, a tokenizer with all their control tokens, and an `Attempt` to talk to them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from lightningrl.chat import AnswerStream, ChatTemplate, ConversationTree, Prompt
from lightningrl.messages import Message

ZOO = Path(__file__).parent / "zoo"
ENDS = {
    "chatml": ["<|im_end|>"],
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "thinker": ["<|eot_id|>"],
    "llama3": ["<|eot_id|>", "<|endoftext|>"],
    "mistral": ["</s>"],
    "gemma": ["<end_of_turn>"],
    "terminator": ["<|return|>"],
    "glm": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "phi": ["<|end|>", "<|endoftext|>"],
    "endless": ["<|endoftext|>"],
    "remark": ["<|im_end|>"],
    "counter": ["<|im_end|>"],
    "echo": ["<|im_end|>"],
}
"""The tokens that end an answer, by template."""
NAMES = sorted(ENDS)

CONTROL = re.findall(
    r"\S+",
    """<|im_start|> <|im_end|> <|endoftext|> <|begin_of_text|> <|eot_id|> <|start_header_id|> <|end_header_id|> <s> </s>
    [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] <bos>
    <start_of_turn> <end_of_turn> <|return|> <|end|> <|start|> <|message|> <|user|> <|assistant|> <|observation|>
    <|system|> [gMASK]""",
)
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEXTS = [
    "say a word and another one",
    "the word is blue",
    "red green blue yellow",
    '{"name": "look", "arguments": {"at": 1, "ok": true}}',
]


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE with merges, so that most texts have many spellings in ids."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=340, show_progress=False, initial_alphabet=alphabet)
    )
    made.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return made


@cache
def chat_template(name: str) -> ChatTemplate:
    found = tokenizer()
    vocabulary = found.get_vocab()
    ends = [vocabulary[text] for text in ENDS[name]]
    bos = {"mistral": "<s>", "gemma": "<bos>"}.get(name, "<|begin_of_text|>")
    special = {"bos_token": bos, "eos_token": "<|endoftext|>" if name == "phi" else ENDS[name][0]}
    return ChatTemplate(found, (ZOO / f"{name}.jinja").read_text(), special=special, eos_ids=ends)


PLAIN = [token_id for text, token_id in tokenizer().get_vocab().items() if text not in CONTROL]
"""Ids that a model may sample within an answer."""


@dataclass
class Attempt:
    """Gets prompts from a tree, and answers them with given ids."""

    template: ChatTemplate
    tree: ConversationTree
    calls: dict[str, tuple[Prompt, list[int], Message]] = field(default_factory=dict)

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()) -> Prompt:
        """The prompt, after checks that every prompt must pass."""
        prompt = self.tree.prompt(messages, tools=tools)
        if prompt.capture in ("bridged", "partly"):
            parent, sampled, _ = self.calls[str(prompt.parent_call_id)]
            exact = [*parent.ids.tolist(), *sampled]
            assert prompt.ids[: len(exact)].tolist() == exact
            assert prompt.shared == len(exact)
            assert (prompt.reason is not None) == (prompt.capture == "partly")
        else:
            begun = prompt.key is not None and prompt.key.begun is not None
            assert prompt.ids.tolist() == self.template.render(messages, tools=tools, begun=begun)
            assert (prompt.reason is not None) == (prompt.parent_call_id is not None) == (prompt.capture == "forked")
        return prompt

    def suffix(self, prompt: Prompt) -> str:
        """The text of a bridged prompt after its parent's ids, control tokens included."""
        return self.template.decode(prompt.ids[prompt.shared :].tolist(), control=True)

    def answer(
        self,
        messages: Sequence[Message],
        ids: Sequence[int],
        *,
        tools: Sequence[dict[str, Any]] = (),
        stop: Sequence[str] = (),
    ) -> tuple[Prompt, Message, str]:
        prompt = self.prompt(messages, tools=tools)
        call_id = f"c{len(self.calls) + 1}"
        stream = AnswerStream(
            self.template, stop=stop, tools=bool(tools), reasoning=prompt.reasoning, seed=call_id.encode()
        )
        stream.feed(ids)
        message = stream.finish().message
        self.calls[call_id] = (prompt, list(ids), message)
        completion = np.array(ids, np.int32)
        self.tree.add(call_id, key=prompt.key, prompt_ids=prompt.ids, completion_ids=completion, answer=message)
        return prompt, message, call_id

    def says(
        self, messages: Sequence[Message], text: str, *, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[Prompt, Message, str]:
        """An answer in the tokenizer's own spelling, with its end of turn."""
        return self.answer(messages, [*self.template.encode(text), self.template.stop_token_ids[0]], tools=tools)


def attempt(name: str, *, history: str = "exact") -> Attempt:
    template = chat_template(name)
    return Attempt(template, ConversationTree(template, history=history))  # type: ignore[arg-type]
