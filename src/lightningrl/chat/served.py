"""The conversations of one attempt as a tree: a node for each conversation, an edge for each message.

    (empty) ──user: say a word──▶ node A ──answer of c1──▶ node B ──user: another one──▶ node C
                                  answers: [c1]

Nothing is held twice: a node holds one message, and a call holds only the ids that its base does not have.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from lightningrl.chat.matching import Step
from lightningrl.messages import Message
from lightningrl.types import Ints


class Node:
    """A conversation: the one before it, and one more message."""

    __slots__ = ("answers", "before", "children", "step")

    def __init__(self, before: "Node | None" = None, step: Step = None) -> None:
        self.before: Final = before
        self.step: Final = step
        self.children: dict[Step, Node] = {}
        self.answers: list[tuple[Message, Served]] = []
        """The answers given here, each with the message that comes back if the client keeps it."""

    def to(self, step: Step) -> "Node":
        """The conversation with one more message of the client."""
        found = self.children.get(step)
        if found is None:
            found = self.children[step] = Node(self, step)
        return found

    def path(self) -> list[Step]:
        """All messages, the first one first."""
        taken: list[Step] = []
        node = self
        while node.before is not None:
            taken.append(node.step)
            node = node.before
        return taken[::-1]

    def root(self) -> "Node":
        """The empty conversation. There is one for each set of tools."""
        node = self
        while node.before is not None:
            node = node.before
        return node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """A call whose answer the agent has received."""

    call_id: str
    asked: Node
    """The conversation before the answer."""
    after: Node
    """The conversation with the answer."""
    answer: Message
    base: "Served | None"
    """The call that this one shares its first ids with; None: it shares none."""
    shared: int
    """Number of ids shared with `base`."""
    delta: Ints
    """The other ids, those of the completion last."""
    sampled: int
    """Length of the completion [C]."""
    open_text: str | None
    """Text of an answer whose turn has not ended, with the stop string that ended it. A message that begins with this
    text continues that turn. Without reasoning, and without white space in front. None: the turn has ended, or the
    answer has tool calls, or it has no text.
    """

    def ids(self) -> Ints:
        """[P + C] the ids that the engine read and sampled."""
        parts: list[Ints] = []
        served, length = self, self.shared + len(self.delta)
        while True:
            if length > served.shared:
                parts.append(served.delta[: length - served.shared])
            length = min(length, served.shared)
            if served.base is None or not length:
                return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)
            served = served.base

    def completion(self) -> Ints:
        """[C] the ids that were sampled."""
        return self.delta[len(self.delta) - self.sampled :]

    def last(self) -> int | None:
        """The id that was sampled last; None if none was sampled."""
        return int(self.delta[-1]) if self.sampled else None
