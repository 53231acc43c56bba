"""What has been asked and answered so far? Conversations as a tree: a node for each, an edge for each message, answers
of ours beside them.

Nothing is held twice: a node has one message, and an answer only the ids that no earlier answer has.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from lightningrl.chat.matching import Step
from lightningrl.messages import Message
from lightningrl.types import Ints


class Node:
    """A conversation: the one before it, and one message more."""

    __slots__ = ("answers", "before", "children", "step")

    def __init__(self, before: "Node | None" = None, step: Step = None) -> None:
        self.before: Final = before
        self.step: Final = step
        self.children: dict[Step, Node] = {}
        self.answers: list[tuple[Message, Served]] = []
        """Each with the message that comes back if a client keeps it."""

    def to(self, step: Step) -> "Node":
        """The conversation that goes on with a message that is not ours."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """A call whose answer the agent has."""

    call_id: str
    root: Node
    """The empty conversation with the tools of this call."""
    asked: Node
    after: Node
    """The conversation before the answer, and after it."""
    answer: Message
    base: "Served | None"
    """The call whose ids those of this one begin with; None: there is none."""
    shared: int
    """How many."""
    delta: Ints
    """The other ids, those of the answer last."""
    sampled: int
    """Length of the answer [C]."""
    open_text: str | None
    """The text of an answer whose turn has not ended, a stop string that was left out included: a message that begins
    with it goes on with that turn. (Without thoughts, and without white space in front.) None: its turn has ended, it
    has tool calls, or no text.
    """

    def ids(self) -> Ints:
        """[P + C] what the engine read and sampled."""
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
        """[C]"""
        return self.delta[len(self.delta) - self.sampled :]

    def last(self) -> int | None:
        """The token that was sampled last; None if there was none."""
        return int(self.delta[-1]) if self.sampled else None
