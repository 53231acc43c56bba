"""The rollouts of one task side by side: what they share, where they part, and what each branch earned.

Calls of a rollout are taken in order of arrival, whichever agent made them. Two rollouts walk together as long as
their calls are the same: same agent and policy, same new messages (tool results among them), same answer. Ids of tool
calls and white space at the ends make no difference. A rollout never comes back to a branch that it has left.

    rollout   asks   answers          node         members   reward
    a         who?   eva, then done   who? → eva   a b       (1 + 0) / 2
    b         who?   eva, then wait     → done     a         1
    c         who?   tom                → wait     b         0
                                      who? → tom   c         0

A branch that plays a call back is a member there, too, but the call was sampled once. So it counts once in the mean,
with the mean of what followed from it: of its trunk and all branches that repeat it, where siblings at one place have
equal weights. That is the value `Q` of `credit = "fork"`. If b were a branch of a at its second call, and c as above:

    who? → eva   (1 + 0) / 2, sampled once by a, and played back by b
      → done     1            siblings: the answers of a and b to the same prompt
      → wait     0
"""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from lightningrl.data.forest import Lesson
from lightningrl.errors import Missing
from lightningrl.look.branches import trunk_name
from lightningrl.look.conversation import Said, conversation, plain
from lightningrl.look.families import Families, families_of
from lightningrl.look.opened import Opened
from lightningrl.look.rollout import chosen, final_rewards, group_mean
from lightningrl.look.step import TRAINED
from lightningrl.messages import Message
from lightningrl.types import Attempt, Call, Rollout, RolloutStatus, Task

Lessons: TypeAlias = Mapping[str, Mapping[str, Lesson]]
"""Rollout id → call id → lesson."""
NONE = Families()
"""For rollouts of which none is a branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rollout of the group. Numbers are of its accepted attempt, or else of its latest."""

    id: str
    status: RolloutStatus
    reward: float | None
    """Final reward; None: it has none (yet)."""
    calls: int
    tokens: int
    """Sampled ones."""
    seconds: float | None
    """None: the attempt has not ended."""
    advantage: float | None
    """Mean over its trained tokens; None: it teaches nothing, or that is not known."""
    trunk: str | None
    """The rollout that it is a branch of; None: it is no branch."""
    place: int | None
    """Number of the branching call in the trunk, from 1; None: as above, or it is not known."""


@dataclass(slots=True, kw_only=True)
class Node:
    """A call that some of the rollouts made alike."""

    id: str
    """The path of numbers from a root, e.g. `0.2`."""
    parent: str | None
    depth: int
    """Number of calls before it."""
    agent: str
    policy: str
    messages: tuple[Message, ...]
    """New since the call that it continues; at the beginning, those after the trunk."""
    answer: Message | None
    """None: the answer broke off, or cannot be read."""
    reward: float | None = None
    """Mean over the members that sampled it, of what followed from it; None: nothing has a reward."""
    advantages: dict[str, float] = field(default_factory=dict[str, float])
    """Rollout id → advantage of this call, where it is trained."""
    calls: dict[str, int] = field(default_factory=dict[str, int])
    """Rollout id → number of this call in it, for each member."""
    played_back: dict[str, str] = field(default_factory=dict[str, str])
    """Rollout id → the rollout that sampled the call, for the members that are branches and played it back."""
    siblings: list[str] = field(default_factory=list[str])
    """Members whose answer here is one of several to the same prompt: a trunk where it was branched, and its branches.
    """

    def as_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("id", "parent", "depth", "agent", "policy")},
            "messages": [plain(message) for message in self.messages],
            "answer": None if self.answer is None else plain(self.answer),
            "members": list(self.calls),
            **{name: getattr(self, name) for name in ("reward", "advantages", "calls", "siblings")},
            "played_back": list(self.played_back),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """All rollouts of one task in one step, or in one evaluation."""

    group: str
    step: int | None
    """Optimizer step, from 1; None: not of a training step."""
    task: Task
    members: tuple[Member, ...]
    """In queue order."""
    trunk: tuple[Message, ...]
    """The messages with which the first calls of all of them begin."""
    nodes: tuple[Node, ...]
    """Parents before their children."""

    @property
    def mean(self) -> float | None:
        """Of the final rewards, as `group_mean`; None: there is none."""
        rewards = {member.id: member.reward for member in self.members}
        return group_mean(rewards, branches={member.id for member in self.members if member.trunk is not None})

    @property
    def std(self) -> float | None:
        """Standard deviation of the final rewards without branches, unbiased; None: there are fewer than two."""
        own = [member.reward for member in self.members if member.reward is not None and member.trunk is None]
        return statistics.stdev(own) if len(own) > 1 else None

    def as_json(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "step": self.step,
            "task": asdict(self.task),
            "mean": self.mean,
            "std": self.std,
            "members": [asdict(member) for member in self.members],
            "trunk": [plain(message) for message in self.trunk],
            "nodes": [node.as_json() for node in self.nodes],
        }


async def look_at_group(run: Opened, group_id: str) -> GroupView:
    """Raises `Missing` if the run has no such group."""
    rollouts = await run.records.rollouts(group_ids=[group_id])
    if not rollouts:
        raise Missing(
            f"the run has no group `{group_id}`",
            hint="each rollout names its group: `lightningrl show RUN_DIR ROLLOUT`",
        )
    rewards = await final_rewards(run.records, rollouts)
    attempts: dict[str, list[Attempt]] = {}
    for attempt in await run.records.attempts([rollout.id for rollout in rollouts]):
        attempts.setdefault(attempt.rollout_id, []).append(attempt)
    shown = {rollout.id: chosen(rollout, attempts.get(rollout.id, ()), None) for rollout in rollouts}
    calls: dict[str, list[Call]] = {rollout.id: [] for rollout in rollouts}
    of = {attempt.id: rollout_id for rollout_id, attempt in shown.items() if attempt is not None}
    for call in await run.records.calls(list(of)):
        calls[of[call.attempt_id]].append(call)
    step, lessons = await _lessons(run, rollouts[0])
    families = families_of(rollouts, calls)
    trunk, nodes = branches(calls, rewards=rewards, lessons=lessons, families=families)
    return GroupView(
        group=group_id,
        step=step,
        task=rollouts[0].task,
        members=tuple(
            _member(
                rollout,
                shown[rollout.id],
                calls[rollout.id],
                rewards[rollout.id],
                lessons.get(rollout.id, {}),
                place=families.place(rollout.id),
            )
            for rollout in rollouts
        ),
        trunk=trunk,
        nodes=nodes,
    )


def branches(
    calls: Mapping[str, Sequence[Call]],
    *,
    rewards: Mapping[str, float | None],
    lessons: Lessons,
    families: Families = NONE,
) -> tuple[tuple[Message, ...], tuple[Node, ...]]:
    """(trunk, nodes) of the calls of each rollout."""
    said = {rollout_id: conversation(own) for rollout_id, own in calls.items() if own}
    trunk = _trunk([own[0].messages for own in said.values()])
    nodes: dict[tuple[str | None, Hashable], Node] = {}
    children: dict[str | None, int] = {}
    for rollout_id, turns in said.items():
        parent: Node | None = None
        numbers = {call.id: call.index + 1 for call in calls[rollout_id]}
        for call, turn in zip(calls[rollout_id], turns, strict=True):
            above = None if parent is None else parent.id
            key = (above, _call_key(call, turn, continues=numbers.get(call.parent_call_id or "")))
            if key not in nodes:
                place = children[above] = children.get(above, -1) + 1
                nodes[key] = _node(call, turn, parent=parent, place=place, trunk=len(trunk))
            parent = nodes[key]
            parent.calls[rollout_id] = call.index + 1
            sampler = families.samplers.get(call.replays or "")
            if sampler is not None:
                parent.played_back[rollout_id] = sampler
            if call.id in families.answers:
                parent.siblings.append(rollout_id)
            advantage = _advantage(lessons.get(rollout_id, {}).get(call.id))
            if advantage is not None:
                parent.advantages[rollout_id] = advantage
    for node in nodes.values():
        node.reward = families.mean(node.calls, node.played_back, rewards)
    return trunk, tuple(nodes.values())


def _node(call: Call, turn: Said, *, parent: Node | None, place: int, trunk: int) -> Node:
    return Node(
        id=str(place) if parent is None else f"{parent.id}.{place}",
        parent=None if parent is None else parent.id,
        depth=0 if parent is None else parent.depth + 1,
        agent=call.agent,
        policy=call.policy,
        messages=turn.messages[trunk if parent is None else 0 :],
        answer=turn.answer,
    )


async def _lessons(run: Opened, rollout: Rollout) -> tuple[int | None, Lessons]:
    """(optimizer step from 1, what the rollouts of the step taught)"""
    named = TRAINED.match(rollout.id)
    if named is None:
        return None, {}
    number = int(named["step"])
    if run.config is None:
        return number + 1, {}
    step, _ = await run.step(run.config, number)
    return number + 1, step.lessons


def _member(
    rollout: Rollout,
    attempt: Attempt | None,
    calls: Sequence[Call],
    reward: float | None,
    lessons: Mapping[str, Lesson],
    *,
    place: int | None,
) -> Member:
    trained = [lesson for lesson in lessons.values() if lesson.weights.any()]
    tokens = sum(len(lesson.advantages) for lesson in trained)
    total = sum(float(lesson.advantages.sum()) for lesson in trained)
    return Member(
        id=rollout.id,
        status=rollout.status,
        reward=reward,
        calls=len(calls),
        tokens=sum(len(call.completion_ids) for call in calls if call.replays is None),
        seconds=round(attempt.ended_at - attempt.started_at, 3) if attempt and attempt.ended_at else None,
        advantage=total / tokens if tokens else None,
        trunk=None if rollout.branch is None else trunk_name(rollout.branch.attempt_id),
        place=place,
    )


def _advantage(lesson: Lesson | None) -> float | None:
    return float(lesson.advantages[0]) if lesson is not None and lesson.weights.any() else None


def _trunk(beginnings: Sequence[tuple[Message, ...]]) -> tuple[Message, ...]:
    """The messages that all begin with."""
    length = 0
    for same in zip(*beginnings, strict=False):
        if len({_key(message) for message in same}) > 1:
            break
        length += 1
    return beginnings[0][:length] if beginnings else ()


def _call_key(call: Call, said: Said, *, continues: int | None) -> Hashable:
    """Equal for calls that are the same, if the calls before them are."""
    messages = tuple(_key(message) for message in said.messages)
    answer = call.completion_ids.tobytes() if said.answer is None else _key(said.answer)
    return call.agent, call.policy, continues, said.earlier, messages, answer


def _key(message: Message) -> Hashable:
    """Equal for messages that say the same. Ids of tool calls differ from rollout to rollout."""
    asked = tuple((call.name, call.arguments) for call in message.tool_calls)
    return message.role, message.content.strip(), message.reasoning.strip(), asked, message.name
