"""Which call does a request continue, and with which ids? The cases that real agents bring up, one by one."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from lightningrl.chat import ChatTemplate, ConversationTree, reasons, tree
from lightningrl.chat.template import BadConversation
from lightningrl.messages import Message, ToolCall
from tests.chat.zookeeper import NAMES, Attempt, attempt, chat_template, tokenizer

USER = Message(role="user", content="say a word")
MORE = Message(role="user", content="another one")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
def talk() -> Attempt:
    return attempt("chatml")


def assistant(content: str) -> Message:
    return Message(role="assistant", content=content)


def letters(template: ChatTemplate, text: str) -> list[int]:
    """The ids of a text spelled letter by letter, which no tokenizer would choose."""
    return [token for letter in text for token in template.encode(letter)]


def test_the_example_of_the_module_is_real(talk: Attempt) -> None:
    def spelled(ids: list[int]) -> str:
        texts = (talk.template.token_text(token_id) for token_id in ids)
        return " ".join(text.replace("\n", "\\n").replace(" ", "_") for text in texts)

    page = str(tree.__doc__)
    sampled = [*letters(talk.template, "blue"), talk.template.stop_token_ids[0]]
    first, answer, _ = talk.answer([USER], sampled)
    assert f"prompt     {spelled(first.ids.tolist())}\n" in page and f"{len(first.ids)} ids\n" in page
    assert f"sampled    {spelled(sampled)} " in page and f" {' '.join(map(str, sampled))}\n" in page
    assert f"as {' '.join(map(str, talk.template.encode('blue')))}:\n" in page
    second = talk.prompt([USER, answer, MORE])
    assert f"suffix     {spelled(second.ids[second.shared :].tolist())}\n" in page
    assert (second.capture, second.parent_call_id, second.shared) == ("bridged", "c1", 26)
    forked = talk.prompt([USER, assistant("red"), MORE])
    assert (forked.capture, forked.parent_call_id, forked.shared) == ("forked", "c1", 21)
    assert forked.reason == reasons.ANSWER_REWRITTEN


def test_the_longest_conversation_is_continued(talk: Attempt) -> None:
    _, one, _ = talk.says([USER], "red")
    _, two, _ = talk.says([USER, one, MORE], "blue")
    assert talk.prompt([USER, one, MORE, two, MORE]).parent_call_id == "c2"
    assert talk.prompt([USER, one, USER]).parent_call_id == "c1"
    other = [USER, one, MORE, assistant("green"), MORE]  # the messages after c1 are rendered as they came
    assert talk.prompt(other).parent_call_id == "c1"


def test_a_conversation_of_its_own_is_a_fresh_root(talk: Attempt) -> None:
    talk.says([USER], "red")
    for messages in ([USER], [MORE], [MORE, assistant("an example"), USER]):
        assert talk.prompt(messages).capture == "rendered"


def test_sub_agents_that_take_turns_keep_their_histories_apart(talk: Attempt) -> None:
    histories = [[Message(role="system", content=f"you are {name}"), USER] for name in ("A", "B")]
    parents: list[list[str | None]] = [[], []]
    for turn in range(3):
        for place, history in enumerate(histories):
            prompt, answer, _ = talk.says(history, f"word {turn}")  # both answers are the same
            parents[place].append(prompt.parent_call_id)
            history += [answer, MORE]
    assert parents == [[None, "c1", "c3"], [None, "c2", "c4"]]


@pytest.mark.parametrize("named", ["c1", "c2", "c3"])
def test_of_equal_answers_the_one_that_the_client_names_is_continued(talk: Attempt, named: str) -> None:
    spellings = [
        talk.template.encode("word"),
        letters(talk.template, "word"),
        [*talk.template.encode("wor"), *letters(talk.template, "d")],
    ]
    message = [talk.answer([USER], ids)[1] for ids in spellings][-1]
    assert talk.prompt([USER, replace(message, reply_id=named), MORE]).parent_call_id == named


def test_of_equal_answers_the_one_with_the_same_tool_call_id_is_continued(talk: Attempt) -> None:
    wish = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    answers = [talk.says([USER], wish, tools=[TOOL])[1] for _ in range(3)]
    for place, answer in enumerate(answers, start=1):
        result = Message(role="tool", content="1", tool_call_id=answer.tool_calls[0].id)
        assert talk.prompt([USER, answer, result], tools=[TOOL]).parent_call_id == f"c{place}"


def test_of_equal_answers_the_one_with_the_same_thoughts_is_continued() -> None:
    talk = attempt("qwen3")
    answers = [talk.says([USER], f"<think>\n{thought}\n</think>\n\nword")[1] for thought in ("b", "a", "c")]
    assert {answer.content for answer in answers} == {"word"}
    assert [talk.prompt([USER, answer, MORE]).parent_call_id for answer in answers] == ["c1", "c2", "c3"]


def test_equal_answers_with_different_ids_are_told_apart_the_same_way_every_time(talk: Attempt) -> None:
    spellings = [talk.template.encode("word"), letters(talk.template, "word")]
    chosen = set()
    for order in (spellings, spellings[::-1]):
        stage = attempt("chatml")
        message = [stage.answer([USER], ids)[1] for ids in order][-1]
        chosen.add(stage.prompt([USER, message, MORE]).ids.tobytes())
    assert len(chosen) == 1


@pytest.mark.parametrize("name", ["chatml", "qwen3", "glm", "mistral"])
def test_results_of_parallel_calls_may_come_in_any_order(name: str) -> None:
    talk = attempt(name)
    message = Message(
        role="assistant",
        content="",
        tool_calls=tuple(ToolCall(id="", name="look", arguments=f'{{"at": {i}}}') for i in range(3)),
    )
    ids = talk.template.answer_ids(message, messages=[USER], tools=[TOOL])
    if name == "glm":
        ids = [
            *ids[:-1],
            *talk.template.encode("<|observation|>"),
        ]  # the token that models with this template sample before results
    _, asked, _ = talk.answer([USER], ids, tools=[TOOL])
    results = [
        Message(role="tool", content=f"result {call.arguments}", tool_call_id=call.id) for call in asked.tool_calls
    ]
    assert len(results) == 3
    shuffled = [results[1], results[2], results[0]]
    prompt, answer, _ = talk.says([USER, asked, *shuffled], "done", tools=[TOOL])
    assert prompt.capture == "bridged"
    turned = replace(asked, tool_calls=asked.tool_calls[::-1])
    for again in ([USER, asked, *results, answer, MORE], [USER, turned, *results[::-1], answer, MORE]):
        assert talk.prompt(again, tools=[TOOL]).parent_call_id == "c2"
    other = [replace(results[0], content="else"), *results[1:]]
    assert talk.prompt([USER, asked, *other, answer, MORE], tools=[TOOL]).parent_call_id == "c1"


def test_a_fork_is_gone_on_with_like_any_other_call(talk: Attempt) -> None:
    """Even if it shares less with its parent than the parent shares with its own parent."""
    system = Message(role="system", content="be brief")
    messages = [system, USER]
    for turn in range(3):
        _, answer, _ = talk.answer(messages, letters(talk.template, f"word {turn}"))
        messages += [answer, replace(MORE, content=f"more {turn}")]
    window = [system, *messages[3:]]
    prompt, answer, _ = talk.answer(window, letters(talk.template, "blue"))
    assert (prompt.capture, prompt.reason, prompt.parent_call_id) == ("forked", reasons.HISTORY_DROPPED, "c3")
    assert 0 < prompt.shared < len(talk.calls["c1"][0].ids)
    after = talk.prompt([*window, answer, USER])
    assert (after.capture, after.parent_call_id) == ("bridged", "c4")


def test_tools_that_stand_in_the_last_question_stand_in_the_suffix() -> None:
    talk = attempt("mistral")
    _, answer, _ = talk.says([USER], "red", tools=[TOOL])
    other = {**TOOL, "function": {**TOOL["function"], "name": "other"}}
    for tools in ([TOOL], [TOOL]):  # tried out first, then remembered
        assert "[AVAILABLE_TOOLS]" in talk.suffix(talk.prompt([USER, answer, MORE], tools=tools))
    stage = Attempt(talk.template, ConversationTree(talk.template))
    _, answer, _ = stage.says([USER], "red", tools=[other])
    assert '"other"' in stage.suffix(stage.prompt([USER, answer, MORE], tools=[other]))


def test_tools_may_be_written_in_another_order_of_keys(talk: Attempt) -> None:
    _, answer, _ = talk.says([USER], "red", tools=[TOOL])
    turned = {"function": dict(reversed(TOOL["function"].items())), "type": "function"}
    assert talk.prompt([USER, answer, MORE], tools=[turned]).parent_call_id == "c1"


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_end_of_turn_is_put_into_the_prompt(name: str) -> None:
    """For answers cut off between tokens, in the middle of a character, and before the first token."""
    talk = attempt(name)
    think = "hm</think>" if talk.template.traits.opens_thought else ""
    for ids in (talk.template.encode("wor"), talk.template.encode("🦊")[:2], []):
        cut = [*talk.template.encode(think), *ids]
        _, answer, call_id = talk.answer([USER, assistant("x"), MORE], cut)
        prompt = talk.prompt([USER, assistant("x"), MORE, answer, USER])
        if name in ("endless", "remark", "echo"):
            assert prompt.capture == "forked"
            continue
        assert (prompt.capture, prompt.parent_call_id) == ("bridged", call_id)
        follows = talk.suffix(prompt)
        assert follows.startswith("<|end|>" if name == "terminator" else talk.template.turn_end)
        assert talk.template.text([USER, assistant("x"), MORE, answer, USER]).endswith(follows)


def test_the_text_before_a_stop_string_is_the_answer_and_its_ids_stay_as_they_were_sampled(talk: Attempt) -> None:
    ids = talk.template.encode("red STOP green")
    _, answer, _ = talk.answer([USER], ids, stop=["STOP"])
    assert answer.content == "red "
    prompt = talk.prompt([USER, answer, MORE])
    assert prompt.capture == "bridged"
    assert talk.suffix(prompt).startswith("<|im_end|>\n<|im_start|>user\n")


def test_an_answer_that_was_cut_off_goes_on_in_its_own_turn(talk: Attempt) -> None:
    ids = letters(talk.template, "the wor")
    _, answer, _ = talk.answer([USER], ids)
    prompt, rest, _ = talk.says([USER, answer], "d is blue")
    assert (prompt.capture, prompt.parent_call_id, talk.suffix(prompt)) == ("bridged", "c1", "")
    whole = assistant(answer.content + rest.content)
    for parts in ([whole], [answer, rest]):  # a client may keep it as one message or as two
        assert talk.prompt([USER, *parts, MORE]).parent_call_id == "c2"


def test_an_answer_that_has_ended_is_followed_by_a_new_turn(talk: Attempt) -> None:
    _, answer, _ = talk.says([USER], "red")
    prompt = talk.prompt([USER, answer])
    assert (prompt.capture, talk.suffix(prompt)) == ("bridged", "\n<|im_start|>assistant\n")


def test_a_client_may_go_on_with_an_answer_where_a_stop_string_has_ended_it(talk: Attempt) -> None:
    """Some agents write the results of tools into the answer."""
    _, answer, _ = talk.answer([USER], letters(talk.template, "Action: look\nObservation:"), stop=["\nObservation:"])
    assert answer.content == "Action: look"
    prompt, _, _ = talk.says([USER, assistant("Action: look\nObservation: it is blue\n")], "Answer: blue")
    assert (prompt.capture, talk.suffix(prompt)) == ("bridged", " it is blue\n")
    whole = assistant("Action: look\nObservation: it is blue\nAnswer: blue")
    assert talk.prompt([USER, whole, MORE]).parent_call_id == "c2"
    assert talk.prompt([USER, assistant("Action: look\nResult: blue\n")]).reason == reasons.ANSWER_EXTENDED


def test_one_answer_may_be_gone_on_with_many_times_and_what_was_sampled_stays(talk: Attempt) -> None:
    """Some agents keep thoughts, actions and results in one growing message."""
    said = ""
    for turn in range(4):
        messages = [USER, assistant(said)] if said else [USER]
        prompt, answer, _ = talk.answer(
            messages, letters(talk.template, f"Action: {turn}\nObservation:"), stop=["\nObservation:"]
        )
        assert (prompt.capture, prompt.parent_call_id) == (("bridged", f"c{turn}") if turn else ("rendered", None))
        said += f"{answer.content}\nObservation: word {turn}\n"
    assert talk.prompt([USER, assistant(said), MORE]).parent_call_id == "c4"
    begun = assistant(said[: said.index("Action: 1")])
    assert talk.prompt([USER, begun, assistant(said), MORE]).parent_call_id == "c1"  # the beginning is in there twice


def test_an_answer_with_the_stop_string_and_more_behind_it_stays_as_it_was_sampled_when_others_follow(
    talk: Attempt,
) -> None:
    """Code agents and text-ReAct agents do so."""
    messages, turns = [USER], 4
    for turn in range(turns):
        prompt, answer, _ = talk.answer(
            messages, letters(talk.template, f"<code>\nlook({turn})\n</code>"), stop=["</code>"]
        )
        assert (prompt.capture, prompt.parent_call_id) == (("bridged", f"c{turn}") if turn else ("rendered", None))
        result = replace(MORE, content=f"Observation: {turn}")
        messages += [assistant(f"{answer.content}</code>\nCalling tools:\n[{turn}]"), result]
    suffix = talk.suffix(talk.prompt(messages))
    asks = f"<|im_start|>user\nObservation: {turns - 1}<|im_end|>\n<|im_start|>assistant\n"
    assert suffix == f"\nCalling tools:\n[3]<|im_end|>\n{asks}"
    cleared = [*messages[:2], replace(MORE, content="[cleared]"), *messages[3:]]
    prompt = talk.prompt(cleared)
    assert (prompt.capture, prompt.parent_call_id, prompt.reason) == ("partly", "c1", reasons.HISTORY_REWRITTEN)
    assert talk.prompt(messages[2:]).reason == reasons.HISTORY_DROPPED


@pytest.mark.parametrize("name", ["qwen3", "thinker"])
def test_thoughts_before_an_answer_that_a_client_goes_on_with_stay(name: str) -> None:
    talk = attempt(name)
    opening = "" if talk.template.traits.opens_thought else "<think>"
    ids = letters(talk.template, f"{opening}red is red</think>\n\nred\nObservation:")
    _, answer, _ = talk.answer([USER], ids, stop=["Observation:"])
    assert (answer.reasoning, answer.content) == ("red is red", "red\n")
    extended = assistant("red\nObservation: blue")
    for sent in (extended, replace(extended, reasoning="red is red")):
        assert talk.prompt([USER, sent, MORE]).capture == "bridged"
    assert talk.prompt([USER, replace(extended, reasoning="red is blue"), MORE]).capture == "forked"
    assert talk.prompt([USER, assistant("red is red</think>\n\nblue\nObservation:"), MORE]).capture == "forked"


@pytest.mark.parametrize(("text", "stop"), [("b", "Ob:"), ("a b", " b b b:")])
def test_where_the_answer_repeats_the_stop_string_nothing_else_is_taken_for_it(
    talk: Attempt, text: str, stop: str
) -> None:
    talk.answer([USER], talk.template.encode(text + stop), stop=[stop])
    assert talk.prompt([USER, assistant(f"{text}{stop} red"), MORE]).capture == "bridged"
    assert talk.prompt([USER, assistant("b: red"), MORE]).capture == "forked"


def test_tool_results_that_are_cleared_leave_what_came_before_them_spliced_and_say_so(talk: Attempt) -> None:
    messages = [USER]
    for turn in range(3):
        _, asked, _ = talk.says(messages, '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', tools=[TOOL])
        messages += [asked, Message(role="tool", content=f"{turn}" * 40, tool_call_id=asked.tool_calls[0].id)]
    assert talk.prompt(messages, tools=[TOOL]).capture == "bridged"
    cleared = [
        replace(message, content="[cleared]") if place in (2, 4) else message for place, message in enumerate(messages)
    ]
    prompt, answer, _ = talk.says(cleared, "done", tools=[TOOL])
    assert (prompt.capture, prompt.parent_call_id, prompt.reason) == ("partly", "c1", reasons.HISTORY_REWRITTEN)
    after = talk.prompt([*cleared, answer, MORE], tools=[TOOL])
    assert (after.capture, after.parent_call_id) == ("bridged", "c4")  # it continues the cleared history


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_that_the_client_has_begun_is_left_open(name: str) -> None:
    talk = attempt(name)
    begun = assistant("so the word is ")
    prompt = talk.prompt([USER, begun])
    text = talk.template.opened([USER, begun], begun=True)
    assert (prompt.capture, talk.template.decode(prompt.ids.tolist(), control=True)) == ("rendered", text)
    assert text.endswith("so the word is ")
    talk.says([USER, begun], "blue")
    again = talk.prompt([USER, assistant("so the word is blue"), MORE])
    assert again.parent_call_id == "c1"
    assert again.capture == ("forked" if name in ("terminator", "endless", "remark", "echo") else "bridged")


def test_what_another_agent_has_said_is_not_gone_on_with(talk: Attempt) -> None:
    """One agent may hand its conversation over to another agent, which answers in a new turn."""
    _, answer, _ = talk.says([Message(role="system", content="you are A"), USER], "the word is blue")
    named = replace(assistant("the word is red"), name="someone")
    for last in (answer, named):
        prompt = talk.prompt([Message(role="system", content="you are B"), USER, last])
        assert talk.template.decode(prompt.ids.tolist(), control=True).endswith(
            f"{last.content}<|im_end|>\n<|im_start|>assistant\n"
        )


def test_a_turn_begun_after_an_answer_of_ours_is_spliced(talk: Attempt) -> None:
    _, answer, _ = talk.answer([USER], letters(talk.template, "red"))
    prompt = talk.prompt([USER, answer, MORE, assistant("blue as ")])
    assert (prompt.capture, prompt.parent_call_id) == ("bridged", "c1")
    assert talk.suffix(prompt) == "<|im_end|>\n<|im_start|>user\nanother one<|im_end|>\n<|im_start|>assistant\nblue as "


def test_an_end_that_the_tokenizer_joins_with_its_surroundings_is_not_spliced() -> None:
    """If the end of a turn is no token of its own, its ids cannot be known."""
    opening = "{% if add_generation_prompt %}assistant: {% endif %}"
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}x{% endfor %}" + opening
    found = tokenizer()
    template = ChatTemplate(found, source, special={}, eos_ids=found.encode("x").ids)
    talk = Attempt(template, ConversationTree(template))
    _, answer, _ = talk.says([USER], "red")
    assert talk.prompt([USER, answer, MORE]).reason == reasons.END_JOINED


@pytest.mark.parametrize("text", ['"}}\n</tool_call>', '"}', "}"])
def test_a_token_of_text_that_closes_a_tool_call_is_not_taken_for_the_end_of_its_turn(text: str) -> None:
    own = Tokenizer.from_str(tokenizer().to_str())
    own.add_tokens([AddedToken(text, special=False, normalized=False)])
    template = ChatTemplate(own, chat_template("chatml")._source, special={}, eos_ids=own.encode("<|im_end|>").ids)
    talk = Attempt(template, ConversationTree(template))
    wish = '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'
    _, answer, _ = talk.says([USER], wish, tools=[TOOL])
    result = Message(role="tool", content="1", tool_call_id=answer.tool_calls[0].id)
    assert talk.prompt([USER, answer, result], tools=[TOOL]).capture == "bridged"


def test_the_history_of_a_request_that_goes_on_is_not_rendered() -> None:
    """Otherwise this template would refuse the long conversation."""
    source = (
        chat_template("chatml")._source
    ) + "{% if messages | length > 20 %}{{ raise_exception('too long') }}{% endif %}"
    template = ChatTemplate(tokenizer(), source, special={})
    talk = Attempt(template, ConversationTree(template))
    messages = [USER]
    for turn in range(30):
        prompt, answer, _ = talk.answer(messages, template.encode(f"word {turn}"))
        assert prompt.capture == ("bridged" if turn else "rendered")
        messages += [answer, MORE]
    with pytest.raises(BadConversation, match="too long"):
        template.text(messages)


def test_memory_grows_with_what_is_said_not_with_what_is_read(talk: Attempt) -> None:
    def held(turns: int) -> int:
        tree, messages = ConversationTree(talk.template), [USER]
        ids = np.array(talk.template.encode("red green blue " * 8), np.int32)
        tracemalloc.start()
        for turn in range(turns):
            prompt = tree.prompt(messages)
            answer = assistant(f"{turn}")
            tree.add(f"c{turn}", key=prompt.key, prompt_ids=prompt.ids, completion_ids=ids, answer=answer)
            messages = [*messages, answer, replace(MORE, content=f"more {turn}")]
            del prompt
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size

    held(8)  # allocates all that is kept for the process
    few, many = held(60), held(240)
    assert many < 5 * few  # it would be 16 times as much if every call kept all its ids
    assert many < 240 * 6000


def test_a_tree_can_be_built_again_from_what_was_served(talk: Attempt) -> None:
    _, one, _ = talk.says([USER], "red")
    _, two, _ = talk.says([USER, one, MORE], "blue")
    asked = {"c1": [USER], "c2": [USER, one, MORE]}
    tree = ConversationTree(talk.template)
    for call_id, (prompt, ids, answer) in talk.calls.items():
        key = tree.key(asked[call_id])
        tree.add(call_id, key=key, prompt_ids=prompt.ids, completion_ids=np.array(ids, np.int32), answer=answer)
    messages = [USER, one, MORE, two, USER]
    assert tree.prompt(messages).ids.tolist() == talk.prompt(messages).ids.tolist()
    assert tree.prompt(messages).parent_call_id == "c2"
