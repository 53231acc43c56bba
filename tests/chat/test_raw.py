"""Do raw prompts (completions) keep the exact ids of earlier prompts and completions?"""

import numpy as np
import pytest

from lightningrl.chat import ConversationTree, reasons
from tests.chat.zookeeper import chat_template

TEMPLATE = chat_template("chatml")


def ids_of(text: str) -> np.ndarray:
    """Ids letter by letter, which no tokenizer would choose."""
    return np.array([token for letter in text for token in TEMPLATE.encode(letter)], np.int32)


@pytest.fixture
def tree() -> ConversationTree:
    tree = ConversationTree(TEMPLATE)
    prompt = tree.prompt_raw("Q: say a word\nA:")
    assert (prompt.capture, prompt.ids.tolist()) == ("rendered", TEMPLATE.encode("Q: say a word\nA:"))
    tree.add_raw("c1", prompt_ids=prompt.ids, completion_ids=ids_of(" blue\n"))
    return tree


def test_a_prompt_that_begins_with_an_earlier_one_and_its_answer_is_bridged(tree: ConversationTree) -> None:
    exact = [*TEMPLATE.encode("Q: say a word\nA:"), *ids_of(" blue\n").tolist()]
    prompt = tree.prompt_raw("Q: say a word\nA: blue\nQ: another one\nA:")
    assert (prompt.capture, prompt.parent_call_id, prompt.shared) == ("bridged", "c1", len(exact))
    assert prompt.ids.tolist() == [*exact, *TEMPLATE.encode("Q: another one\nA:")]
    tree.add_raw("c2", prompt_ids=prompt.ids, completion_ids=ids_of(" red"))
    after = tree.prompt_raw("Q: say a word\nA: blue\nQ: another one\nA: red.")
    assert (after.parent_call_id, after.ids.tolist()) == (
        "c2",
        [*prompt.ids.tolist(), *ids_of(" red").tolist(), *TEMPLATE.encode(".")],
    )


def test_ids_are_taken_as_they_are(tree: ConversationTree) -> None:
    exact = (*TEMPLATE.encode("Q: say a word\nA:"), *ids_of(" blue\n").tolist())
    prompt = tree.prompt_raw((*exact, 5, 6))
    assert (prompt.capture, prompt.parent_call_id, prompt.ids.tolist()) == ("bridged", "c1", [*exact, 5, 6])
    canonical = tuple(TEMPLATE.encode("Q: say a word\nA: blue\nQ:"))
    assert tree.prompt_raw(canonical).capture == "rendered"  # other ids of the same text
    assert tree.prompt_raw(canonical).ids.tolist() == list(canonical)


@pytest.mark.parametrize(
    "text", ["Q: say a word\nA:", "Q: say a word\nA: red", "Q: say a word\nA: blue and", "Q: say", ""]
)
def test_another_prompt_is_a_fresh_root(tree: ConversationTree, text: str) -> None:
    assert tree.prompt_raw(text).capture == "rendered"


def test_a_token_that_ended_the_answer_must_come_back(tree: ConversationTree) -> None:
    """Clients that write control tokens themselves send it. Others leave it out."""
    prompt = tree.prompt_raw("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    end = np.array([TEMPLATE.turn_end_id], np.int32)
    tree.add_raw("c2", prompt_ids=prompt.ids, completion_ids=np.concatenate((ids_of("blue"), end)))
    text = TEMPLATE.decode(prompt.ids.tolist(), control=True)
    bridged = tree.prompt_raw(f"{text}blue<|im_end|>\n<|im_start|>user\nmore")
    assert (bridged.capture, bridged.parent_call_id) == ("bridged", "c2")
    forked = tree.prompt_raw(f"{text}blue and more")
    assert (forked.capture, forked.reason, forked.parent_call_id) == ("forked", reasons.RAW_END_LEFT_OUT, "c2")
    assert forked.shared == len(prompt.ids)
    assert forked.ids.tolist() == TEMPLATE.encode(f"{text}blue and more")
