"""Why is an answer of ours in a request, and yet not spliced? The reasons that a fork or a partial bridge is given."""

from collections.abc import Sequence

from lightningrl.chat import reasons
from lightningrl.chat.matching import Step, gists, is_subsequence, repeats
from lightningrl.chat.recognition import Answers
from lightningrl.chat.served import Node, Served
from lightningrl.messages import Message


def departure(messages: Sequence[Message], *, start: int, asked: Node, answers: Answers) -> tuple[Served, str] | None:
    """The last answer of ours in `messages[start:]`, and why it is not spliced. `asked`: the request's conversation."""
    for index in range(len(messages) - 1, start - 1, -1):
        message = messages[index]
        served = answers.anywhere(message) if message.role == "assistant" else None
        if served is None:
            continue
        if not repeats(message, served.answer) and answers.text_behind(served, message) is None:
            return served, reasons.ANSWER_REWRITTEN
        if served.asked.root() is not asked.root():
            return served, reasons.TOOLS_CHANGED
        return served, _difference(served.asked.path(), gists(messages[:index]))
    return None


def replaced(node: Node, message: Message) -> tuple[Served, str] | None:
    """The answer given at `node` that the client has sent `message` in place of, and the reason to give."""
    if not node.answers:
        return None
    content = message.content.strip()
    for answer, served in reversed(node.answers):
        text = answer.content.strip()
        if text and not answer.tool_calls and content.startswith(text):
            return served, reasons.ANSWER_EXTENDED
    return node.answers[-1][1], reasons.ANSWER_REWRITTEN


def _difference(before: Sequence[Step], now: Sequence[Step]) -> str:
    """How the history `before` has become the history `now`."""
    if is_subsequence(now, before):
        return reasons.HISTORY_DROPPED
    return reasons.HISTORY_INSERTED if is_subsequence(before, now) else reasons.HISTORY_REWRITTEN
