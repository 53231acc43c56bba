"""What does the engine read for a request, and how did these ids come about?"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightningrl.chat.served import Node, Served
from lightningrl.messages import Message
from lightningrl.types import Ints

PromptCapture: TypeAlias = Literal["rendered", "bridged", "partly", "forked"]
"""The values of `types.Capture` that a prompt can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in the conversation tree the answer to a request belongs."""

    asked: Node
    """The conversation before the answer."""
    node: Node
    """The same conversation, with the beginning of the answer if the client has sent one."""
    begun: Message | None
    """The beginning of the answer that the client has sent; None: it has sent none."""
    base: Served | None
    """The call that the prompt shares its first ids with; None: no such call is known."""
    shared: int | None
    """Number of ids shared with `base`; None: not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The ids that the engine reads, and how they came about.

    The prompt of a second turn, where call c1 read `[1 2 3]` and sampled `[7 8 9]`:

        ids [1 2 3 7 8 9 | 4 5]   capture `bridged`   parent_call_id `c1`   shared 6
    """

    ids: Ints
    """[P]"""
    capture: PromptCapture
    reason: str | None
    """Why it is forked, or bridged only partly: one of `reasons`. None for other prompts."""
    parent_call_id: str | None
    """The call that it continues (bridged, partly) or departs from (forked)."""
    shared: int
    """Number of first ids that the parent has read or sampled; 0 without a parent."""
    reasoning: bool | None
    """Does the prompt end within reasoning? None: as the template's generation prompt does. For `AnswerStream`."""
    key: Place | None
    """For `ConversationTree.add`. None for a raw prompt, which has no messages."""
