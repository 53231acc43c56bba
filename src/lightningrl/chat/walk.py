"""Where in the conversation tree do the messages of a request lead?

Usually the model answers in a new turn. `prefilled` is for the other case: the last message is the assistant's, and the
model continues it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightningrl.chat.departure import replaced
from lightningrl.chat.matching import step
from lightningrl.chat.prompt import Place
from lightningrl.chat.recognition import Answers
from lightningrl.chat.served import Served
from lightningrl.chat.template import may_be_begun
from lightningrl.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An answer of ours in the messages of a request. Its ids are spliced."""

    served: Served
    index: int
    """Of the message."""
    behind: str
    """Text that the client has put behind the answer, in the same turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """The path of a request's messages through the tree."""

    place: Place
    """Where it ends."""
    match: Match | None
    """The last of our answers on the path; None: there is none."""
    replaced: tuple[Served, str] | None
    """An answer that the client has replaced since that match, and the reason to give."""
    reasoning: bool | None = None
    """As `Prompt.reasoning`."""


def begins_an_answer(messages: Sequence[Message], answers: Answers) -> bool:
    """Does the model continue the last message? Not an answer that has ended, wherever in this attempt it was given."""
    if not may_be_begun(messages):
        return False
    known = answers.with_content(messages[-1])
    return known is None or not answers.ended(known)


def prefilled(walk: Walk, last: Message, *, index: int, answers: Answers, think: tuple[str, str] | None) -> Walk:
    """Take the last step of a walk: to a message of the assistant that `begins_an_answer`.

    The message is one of our answers (cut off, so the model continues it; or ended, so it does not), or the beginning
    of an answer, which the client has written itself or built upon an answer of ours.
    """
    node = walk.place.node
    if served := answers.repeated(node, last):
        walk = replace(walk, match=Match(served=served, index=index, behind=""), replaced=None)
        if answers.ended(served):
            return replace(walk, place=replace(walk.place, asked=served.after, node=served.after))
        within = bool(served.answer.reasoning) and not served.answer.content
        return replace(walk, place=replace(walk.place, node=served.after, begun=last), reasoning=within)
    within = think is not None and last.content.rfind(think[0]) > last.content.rfind(think[1])
    walk = replace(walk, place=replace(walk.place, node=node.to(step([last])), begun=last), reasoning=within)
    if extended := answers.extended(node, last):
        return replace(walk, match=Match(served=extended[0], index=index, behind=extended[1]), replaced=None)
    return replace(walk, replaced=replaced(node, last) or walk.replaced)
