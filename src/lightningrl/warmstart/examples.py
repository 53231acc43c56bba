"""Demonstrations → token ids, exactly as the gateway would have served them: same templates, history and ids."""

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
    """[demonstrations][answers]. A `UserError` names one that is too long, or that the template cannot express."""
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
            hint = "check that the model's chat template knows tools and system prompts, or use another model"
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
        hint = "raise `engine.max_length`, or use shorter demonstrations"
        said = f"demonstration {number} has `{length}` tokens, and `engine.max_length` is `{max_length}`"
        raise UserError(said, hint=hint)
    text = answer.message.content
    if text.strip() and text.strip() not in template.decode(ids):
        hint = "leave out `warmstart.base` and `warmstart.tokenizer`: the default tokenizer can write any text"
        raise UserError(f"the tokenizer cannot write the text of demonstration {number}: `{text[:80]}`", hint=hint)
