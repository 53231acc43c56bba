"""Are the sampled ids kept through every turn, and is a conversation forked whenever it is not provably the same?"""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightningrl.chat import AnswerStream, ChatTemplate, ConversationTree, Message, Prompt, ToolCall

USER = Message(role="user", content="say a word")
MORE = Message(role="user", content="another one")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="session")
def template(model_folder: Path) -> ChatTemplate:
    return ChatTemplate.load(model_folder)


@dataclass
class Talk:
    """An attempt: asks the tree for prompts and answers them with given ids."""

    template: ChatTemplate
    tree: ConversationTree
    served: int = 0

    def answer(self, messages: list[Message], ids: list[int], tools: tuple[dict[str, Any], ...] = ()) -> tuple[Prompt, Message, str]:
        prompt = self.tree.prompt(messages, tools=tools)
        stream = AnswerStream(self.template, stop=(), parse_tools=bool(tools), seed=str(self.served).encode())
        stream.feed(ids)
        message = stream.finish().message
        self.served += 1
        call_id = f"c{self.served}"
        completion = np.array(ids, np.int32)
        self.tree.add(call_id, key=prompt.key, tools=tools, prompt_ids=prompt.ids, completion_ids=completion, answer=message)
        return prompt, message, call_id


@pytest.fixture
def talk(template: ChatTemplate) -> Talk:
    return Talk(template, ConversationTree(template))


def test_whatever_was_sampled_stays_in_the_prompt_of_the_next_turn(template: ChatTemplate) -> None:
    chance = random.Random(0)
    canonical = 0
    for _ in range(100):
        talk, messages, exact = Talk(template, ConversationTree(template)), [USER], None
        for _ in range(4):
            ids = [chance.randrange(3, 290) for _ in range(chance.randint(0, 8))]
            if chance.random() < 0.5:
                ids.append(template.turn_end_id or 0)
            prompt, message, _ = talk.answer(messages, ids)
            assert exact is None or prompt.ids[: len(exact)].tolist() == exact
            assert prompt.capture == ("rendered" if exact is None else "bridged")
            canonical += template.encode(template.decode(ids)) == [i for i in ids if i != template.turn_end_id]
            exact = [*prompt.ids.tolist(), *ids]
            messages = [*messages, message, MORE]
            # a bridged prompt reads as the rendered one would, but for control tokens that were sampled in the middle
            assert template.decode(talk.tree.prompt(messages).ids.tolist()) == template.decode(template.render(messages))
    assert canonical < 300  # of 400: the test would show nothing if the sampled ids were the tokenizer's own


def test_a_missing_end_of_turn_is_put_into_the_prompt(talk: Talk, template: ChatTemplate) -> None:
    whole, cut = template.encode("word"), template.encode("wor")
    _, message, _ = talk.answer([USER], cut)
    prompt = talk.tree.prompt([USER, message, MORE])
    assert prompt.ids.tolist() == template.render([USER, message, MORE])
    _, message, _ = talk.answer([MORE], [*whole, template.turn_end_id or 0])
    assert talk.tree.prompt([MORE, message, MORE]).ids.tolist() == template.render([MORE, message, MORE])


def test_the_longest_conversation_is_continued(talk: Talk, template: ChatTemplate) -> None:
    _, one, _ = talk.answer([USER], template.encode("red"))
    _, two, _ = talk.answer([USER, one, MORE], template.encode("blue"))
    assert talk.tree.prompt([USER, one, MORE, two, MORE]).parent_call_id == "c2"
    assert talk.tree.prompt([USER, one, USER]).parent_call_id == "c1"
    other = Message(role="assistant", content="green")
    assert talk.tree.prompt([USER, one, MORE, other, MORE]).parent_call_id == "c1"  # what follows is rendered as it came


def test_clients_may_reformat_what_means_the_same(talk: Talk, template: ChatTemplate) -> None:
    said = 'so <tool_call>{"name": "f", "arguments": {"a": true, "b": [null, "ü"]}}</tool_call>'
    _, message, _ = talk.answer([USER], template.encode(said), tools=(TOOL,))
    [call] = message.tool_calls
    result = Message(role="tool", content="1", tool_call_id=call.id)
    reordered = replace(message, tool_calls=(replace(call, arguments='{"b":[null,"\\u00fc"],"a":true}'),))
    for echoed in (message, replace(message, content=""), replace(message, content=" so "), reordered):
        prompt = talk.tree.prompt([USER, echoed, result], tools=(TOOL,))
        assert (prompt.capture, prompt.parent_call_id) == ("bridged", "c1")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("answer", "the answer in the history is not the one that was given"),
        ("history", "the history before the answer has changed"),
        ("system", "the history before the answer has changed"),
        ("tools", "the tools have changed"),
        ("arguments", "the answer in the history is not the one that was given"),
        ("id", "the answer in the history is not the one that was given"),
    ],
)
def test_what_means_something_else_is_forked_with_the_reason(talk: Talk, template: ChatTemplate, change: str, reason: str) -> None:
    said = 'so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    _, message, _ = talk.answer([USER], template.encode(said), tools=(TOOL,))
    [call] = message.tool_calls
    tools: tuple[dict[str, Any], ...] = (TOOL,)
    messages = [USER, message, Message(role="tool", content="1", tool_call_id=call.id)]
    match change:
        case "answer":
            messages[1] = replace(message, content="else")
        case "history":
            messages[0] = MORE
        case "system":
            messages.insert(0, Message(role="system", content="new"))
        case "tools":
            tools = ()
        case "arguments":
            messages[1] = replace(message, tool_calls=(replace(call, arguments='{"a": 2}'),))
        case "id":
            messages[1] = replace(message, tool_calls=(ToolCall(id="other", name="f", arguments=call.arguments),))
    prompt = talk.tree.prompt(messages, tools=tools)
    assert (prompt.capture, prompt.reason, prompt.parent_call_id) == ("forked", reason, "c1")
    assert prompt.ids.tolist() == template.render(messages, tools=tools)


def test_a_conversation_of_its_own_is_a_fresh_root(talk: Talk, template: ChatTemplate) -> None:
    talk.answer([USER], template.encode("red"))
    for messages in ([USER], [MORE], [MORE, Message(role="assistant", content="an example"), USER]):
        prompt = talk.tree.prompt(messages)
        assert (prompt.capture, prompt.reason, prompt.parent_call_id) == ("rendered", None, None)


def test_equal_answers_with_different_ids_are_told_apart_the_same_way_every_time(template: ChatTemplate) -> None:
    short, spelled = template.encode("word"), [token for letter in "word" for token in template.encode(letter)]
    assert short != spelled
    chosen = set()
    for order in ((short, spelled), (spelled, short)):
        talk = Talk(template, ConversationTree(template))
        for ids in order:
            _, message, _ = talk.answer([USER], ids)
        chosen.add(talk.tree.prompt([USER, message, MORE]).ids.tobytes())
    assert len(chosen) == 1


STRIPS_THOUGHTS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SAYS_MORE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% if m.role == 'assistant' %} and that was all{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ENDLESS = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


@pytest.mark.parametrize(
    ("text", "said", "capture", "reason"),
    [
        (STRIPS_THOUGHTS, "<think>hm</think>red", "forked", "the template renders the history differently once it goes on"),
        (STRIPS_THOUGHTS, "red", "bridged", None),
        (SAYS_MORE, "red", "forked", "the template does not end the turn right after the answer"),
        (ENDLESS, "red", "forked", "the template has no token that ends a turn"),
    ],
)
def test_templates_that_rewrite_history_are_not_bridged(model_folder: Path, text: str, said: str, capture: str, reason: str | None) -> None:
    tokenizer = ChatTemplate.load(model_folder)
    template = ChatTemplate(tokenizer._tokenizer, text, special={})
    talk = Talk(template, ConversationTree(template))
    _, message, _ = talk.answer([USER], template.encode(said))
    prompt = talk.tree.prompt([USER, message, MORE])
    assert (prompt.capture, prompt.reason) == (capture, reason)
    if capture == "forked":
        assert prompt.ids.tolist() == template.render([USER, message, MORE])


def test_an_answer_that_ended_with_a_foreign_token_is_not_bridged(model_folder: Path, talk: Talk) -> None:
    plain = ChatTemplate.load(model_folder)
    foreign = plain.encode("<|endoftext|>")
    template = ChatTemplate(plain._tokenizer, STRIPS_THOUGHTS, special={}, eos_ids=foreign)
    talk = Talk(template, ConversationTree(template))
    _, message, _ = talk.answer([USER], [*template.encode("red"), *foreign])
    assert talk.tree.prompt([USER, message, MORE]).reason == "the answer ended with another token than the template's"
