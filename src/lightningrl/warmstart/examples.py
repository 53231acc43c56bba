"""How does a demonstration read to the model? As the gateway would have served it: the same templates, the same
continued history, the same ids.
"""

from collections.abc import Sequence

import numpy as np

from lightningrl.chat import ChatTemplate, ConversationTree
from lightningrl.chat.template import BadConversation
from lightningrl.errors import UserError
from lightningrl.trainer.imitation import Example
from lightningrl.warmstart.demonstrations import Answer


def examples_of(
    demonstrations: Sequence[Sequence[Answer]], template: ChatTemplate, *, max_length: int
) -> list[list[Example]]:
    """[demonstrations][answers]. Raises `UserError` for one that the tokenizer or the template cannot express, or that
    is too long.
    """
    return [
        _examples(answers, template, number=number, max_length=max_length)
        for number, answers in enumerate(demonstrations, start=1)
    ]


def _examples(answers: Sequence[Answer], template: ChatTemplate, *, number: int, max_length: int) -> list[Example]:
    tree = ConversationTree(template)
    made: list[Example] = []
    for place, answer in enumerate(answers):
        try:
            prompt = tree.prompt(answer.messages, tools=answer.tools)
            ids = template.answer_ids(answer.message, messages=answer.messages, tools=answer.tools)
        except BadConversation as error:
            hint = "does the model's chat template know tools and system prompts? Other models do"
            raise UserError(f"demonstration {number} does not fit the chat template: {error}", hint=hint) from error
        _check(answer, ids, template, number=number, length=len(prompt.ids) + len(ids), max_length=max_length)
        tree.add(
            str(place),
            key=prompt.key,
            prompt_ids=prompt.ids,
            completion_ids=np.array(ids, np.int32),
            answer=answer.message,
        )
        made.append(Example(prompt_ids=prompt.ids.tolist(), completion_ids=ids))
    return made


def _check(
    answer: Answer, ids: Sequence[int], template: ChatTemplate, *, number: int, length: int, max_length: int
) -> None:
    if length > max_length:
        hint = "raise `engine.max_length`, or take shorter demonstrations"
        raise UserError(
            f"demonstration {number} has `{length}` tokens, and `engine.max_length` is `{max_length}`", hint=hint
        )
    said = answer.message.content
    if said.strip() and said.strip() not in template.decode(ids):
        hint = "a tiny model's own tokenizer (leave out `warmstart.base` and `warmstart.tokenizer`) can write any text"
        raise UserError(f"the tokenizer cannot write what demonstration {number} says: `{said[:80]}`", hint=hint)
