"""What does the gateway remember of an attempt between its calls? Its conversations, how many calls there were, and
which prompts.

All of it follows from the store: a session that was dropped, or lost with the process, is built again from the
attempt's calls.
"""

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from lightningrl.chat import ChatTemplate, ConversationTree
from lightningrl.dialects.base import Dialect, Past, Refused
from lightningrl.errors import UserError
from lightningrl.gateway.identity import Caller, is_local
from lightningrl.gateway.retries import Unread
from lightningrl.store import Store
from lightningrl.types import Attempt, Call, Ints, Rollout, Sampling

KEPT_TOKENS = 8_000_000
"""Token ids that idle sessions remember: 32 MB. What is forgotten costs a read of the store."""
KEPT = 4096
"""Idle sessions."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Where the chance of one answer comes from."""

    chance: bytes
    """Sixteen bytes."""
    prompt: bytes
    """A digest of what was read."""
    occurrence: int
    """How often it had been read in this attempt, this time included."""


class Session:
    """One running attempt."""

    def __init__(
        self, rollout: Rollout, attempt: Attempt, template: ChatTemplate, *, history: Literal["exact", "template"]
    ) -> None:
        unknown = sorted(set(rollout.sampling) - {field.name for field in fields(Sampling)})
        if unknown:
            raise UserError(
                f"unknown sampling field `{unknown[0]}` in rollout `{rollout.id}`",
                hint="see `lightningrl.types.Sampling`",
            )
        self.laid_down: dict[str, Any] = dict(rollout.sampling)
        """Sampling fields that go over what the agent asks for."""
        for name in {"stop", "stop_token_ids"} & set(self.laid_down):
            self.laid_down[name] = tuple(self.laid_down[name])  # JSON has no tuples
        self.seed: int | None = self.laid_down.pop("seed", None)
        """Where the chance of this rollout comes from, also if the agent asks for a seed: a group that draws alike has
        nothing to compare.
        """
        self.rollout = rollout
        self.attempt = attempt
        self.tree = ConversationTree(template, history=history)
        self.past = Past()
        self.unread = Unread()
        self.active = 0
        """Requests under way."""
        self.tokens = 0
        """Token ids remembered, roughly."""
        self._calls = 0
        self._seen: Counter[bytes] = Counter()
        self._returned: dict[bytes, list[int]] = {}

    def next_index(self) -> int:
        """The order of arrival of a new call."""
        self._calls += 1
        return self._calls - 1

    def draw(self, prompt_ids: Ints, *, run_seed: int) -> Draw:
        """Chance for the next answer to this prompt: it follows from the rollout's seed (or the run's, and its name),
        the prompt and how often the prompt was seen before in this attempt, so neither timing nor a second attempt
        changes it.
        """
        prompt = hashlib.blake2b(prompt_ids.tobytes(), digest_size=16).digest()
        occurrence = self._occurrence(prompt)
        source = f"{run_seed}\n{self.rollout.id}" if self.seed is None else str(self.seed)
        return Draw(
            hashlib.blake2b(f"{source}\n{occurrence}\n".encode() + prompt, digest_size=16).digest(), prompt, occurrence
        )

    def give_back(self, draw: Draw) -> None:
        """Nobody has read the answer: who asks again gets the same chance, as if the first time had not been."""
        self._returned.setdefault(draw.prompt, []).append(draw.occurrence)

    def recall(self, call: Call, dialect: Dialect | None) -> None:
        """Take in a call that an earlier session served; `dialect` is None for one that is not spoken any more."""
        self._calls = max(self._calls, call.index + 1)
        if call.finish_reason != "cancelled":  # that chance was given back
            self._seen[hashlib.blake2b(call.prompt_ids.tobytes(), digest_size=16).digest()] += 1
        if call.capture in ("incomplete", "upstream") or dialect is None:
            return
        request = dialect.parse(call.request, self.past)
        dialect.remember(self.past, request, call.response)
        self.tokens += len(call.completion_ids)
        if request.prompts:
            self.tree.add_raw(call.id, prompt_ids=call.prompt_ids, completion_ids=call.completion_ids)
            return
        self.tree.add(
            call.id,
            key=self.tree.key(request.messages, tools=request.tools),
            prompt_ids=call.prompt_ids,
            completion_ids=call.completion_ids,
            answer=dialect.answer(call.response),
        )

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def _occurrence(self, prompt: bytes) -> int:
        if returned := self._returned.get(prompt):
            earliest = min(returned)
            returned.remove(earliest)
            return earliest
        self._seen[prompt] += 1
        return self._seen[prompt]


class Visitors(Protocol):
    """Takes in callers of this machine who have no token of their own (`lightningrl run`)."""

    async def token(self, session: str | None) -> str:
        """The token of the attempt that a client's own session belongs to; None: it names none."""
        ...


class Sessions:
    """Tokens → sessions of running attempts."""

    def __init__(
        self,
        store: Store,
        template: ChatTemplate,
        dialects: Sequence[Dialect],
        *,
        history: Literal["exact", "template"],
        visitors: Visitors | None,
    ) -> None:
        self._store = store
        self._template = template
        self._dialects: Mapping[str, Dialect] = {dialect.name: dialect for dialect in dialects}
        self._history: Literal["exact", "template"] = history
        self._visitors = visitors
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._rounds: deque[str] = deque()
        """Attempts in the order in which they are looked at: do they still run?"""

    async def admit(self, caller: Caller) -> tuple[Rollout, Attempt]:
        """The running attempt of a caller. Raises `Refused` (401) for an unknown token, and for one whose attempt has
        ended.
        """
        found = await self.whose(caller)
        if found is None:
            hint = "give the agent the API key (or base URL) of its attempt"
            if self._visitors is not None:
                hint = "only programs of this machine may leave out the key, and no web pages: take it from `OPENAI_API_KEY`"
            raise Refused(401, "no such token", code="invalid_api_key", hint=hint)
        if found[1].status != "running":
            self._drop(found[1].id)
            raise ended()
        return found

    async def open(self, caller: Caller) -> Session:
        """The session of a caller's attempt. Raises `Refused`, as `admit` does."""
        rollout, attempt = await self.admit(caller)
        session = self._sessions.get(attempt.id)
        if session is None:
            self._forget()
            await self._look_round()
            session = self._sessions.setdefault(attempt.id, await self._build(rollout, attempt))
            self._rounds.append(attempt.id)
        self._sessions.move_to_end(attempt.id)
        return session

    async def whose(self, caller: Caller) -> tuple[Rollout, Attempt] | None:
        """The attempt of a token, also one that has ended, or of a visitor from this machine; None for anybody else."""
        found = await self._store.attempt_by_token(caller.token) if caller.token else None
        if found is None and self._visitors is not None and is_local(caller):
            found = await self._store.attempt_by_token(await self._visitors.token(caller.session))
        return found

    def attempts(self) -> list[Attempt]:
        """Those that are remembered."""
        return [session.attempt for session in self._sessions.values()]

    def asked_for(self, tool_call_id: str) -> str | None:
        """The attempt in which a model has asked for this tool call, of those that are remembered; None if there are
        several: rollouts of the same seed get the same ids.
        """
        found = [attempt_id for attempt_id, session in self._sessions.items() if session.tree.asked_for(tool_call_id)]
        return found[0] if len(found) == 1 else None

    async def _build(self, rollout: Rollout, attempt: Attempt) -> Session:
        session = Session(rollout, attempt, self._template, history=self._history)
        for call in await self._store.calls([attempt.id]):
            session.recall(call, self._dialects.get(call.dialect))
        return session

    def _forget(self) -> None:
        """Drop the sessions that have been idle longest, while there are too many or they remember too much."""
        total = sum(session.tokens for session in self._sessions.values()) if len(self._sessions) % 64 == 63 else 0
        idle = (
            [key for key, session in self._sessions.items() if not session.active]
            if total > KEPT_TOKENS or len(self._sessions) >= KEPT
            else []
        )
        for key in idle[: max(1, len(idle) // 4)]:
            self._drop(key)

    async def _look_round(self) -> None:
        """Drop sessions whose attempts have ended. With two looks for each that begins, half of all sessions run at
        least.
        """
        for attempt_id in [self._rounds.popleft() for _ in range(min(2, len(self._rounds)))]:
            session = self._sessions.get(attempt_id)
            if session is None:
                continue
            found = await self._store.attempt_by_token(session.attempt.token)
            if found is None or found[1].status != "running":
                self._drop(attempt_id)
            if attempt_id in self._sessions:
                self._rounds.append(attempt_id)

    def _drop(self, attempt_id: str) -> None:
        session = self._sessions.get(attempt_id)
        if session is not None and not session.active:
            del self._sessions[attempt_id]


def ended() -> Refused:
    return Refused(
        401,
        "the attempt of this token has ended",
        code="attempt_ended",
        hint="an agent may not go on after its attempt",
    )
