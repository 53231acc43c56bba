"""What does the gateway remember of an attempt between its calls? Its conversations, how many calls there were, and which prompts.

All of it follows from the store: a session that was dropped, or lost with the process, is built again from the attempt's calls.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from lightningrl.chat import ChatTemplate, ConversationTree
from lightningrl.errors import UserError
from lightningrl.gateway.dialects.base import Dialect, Refused
from lightningrl.store import Store
from lightningrl.types import Attempt, Call, Ints, Rollout, Sampling

KEPT = 1024
"""Idle sessions that are remembered; more would only save a read of the store."""


class Session:
    """One running attempt."""

    def __init__(self, rollout: Rollout, attempt: Attempt, template: ChatTemplate) -> None:
        unknown = sorted(set(rollout.sampling) - {field.name for field in fields(Sampling)})
        if unknown:
            raise UserError(f"unknown sampling field `{unknown[0]}` in rollout `{rollout.id}`", hint="see `lightningrl.types.Sampling`")
        self.laid_down: dict[str, Any] = dict(rollout.sampling)
        """Sampling fields that go over what the agent asks for."""
        for name in {"stop", "stop_token_ids"} & set(self.laid_down):
            self.laid_down[name] = tuple(self.laid_down[name])  # JSON has no tuples
        self.seed: int | None = self.laid_down.pop("seed", None)
        """Where the chance of this rollout comes from, also if the agent asks for a seed: a group that draws alike has nothing to compare."""
        self.rollout = rollout
        self.attempt = attempt
        self.tree = ConversationTree(template)
        self.active = 0
        """Requests under way."""
        self._calls = 0
        self._seen: Counter[bytes] = Counter()

    def next_index(self) -> int:
        """The order of arrival of a new call."""
        self._calls += 1
        return self._calls - 1

    def draw(self, prompt_ids: Ints, *, run_seed: int) -> bytes:
        """Sixteen bytes of chance for the next answer to this prompt: they follow from the rollout's seed (or the run's, and its name), the
        prompt and how often the prompt was seen before in this attempt, so neither timing nor a second attempt changes them.
        """
        prompt = prompt_ids.tobytes()
        digest = hashlib.blake2b(prompt, digest_size=16).digest()
        self._seen[digest] += 1
        source = f"{run_seed}\n{self.rollout.id}" if self.seed is None else str(self.seed)
        return hashlib.blake2b(f"{source}\n{self._seen[digest]}\n".encode() + prompt, digest_size=16).digest()

    def recall(self, call: Call, dialect: Dialect) -> None:
        """Take in a call that an earlier session served."""
        self._calls = max(self._calls, call.index + 1)
        self._seen[hashlib.blake2b(call.prompt_ids.tobytes(), digest_size=16).digest()] += 1
        if call.capture == "incomplete":
            return
        request = dialect.parse(call.request)
        self.tree.add(
            call.id,
            key=self.tree.key(request.messages, tools=request.tools),
            tools=request.tools,
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


class Sessions:
    """Tokens → sessions of running attempts."""

    def __init__(self, store: Store, template: ChatTemplate, dialects: Sequence[Dialect]) -> None:
        self._store = store
        self._template = template
        self._dialects: Mapping[str, Dialect] = {dialect.name: dialect for dialect in dialects}
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    async def open(self, token: str | None) -> Session:
        """The session behind a token. Raises `Refused` (401) for a token that is nobody's, or whose attempt has ended."""
        found = await self._store.attempt_by_token(token) if token else None
        if found is None:
            hint = "give the agent the API key (or base URL) of its attempt"
            raise Refused(401, "no such token", code="invalid_api_key", hint=hint)
        rollout, attempt = found
        if attempt.status != "running":
            self._sessions.pop(attempt.id, None)
            raise ended()
        self._forget()  # before this session is touched: it is not busy yet
        session = self._sessions.get(attempt.id)
        if session is None:
            session = self._sessions.setdefault(attempt.id, await self._build(rollout, attempt))
        self._sessions.move_to_end(attempt.id)
        return session

    async def _build(self, rollout: Rollout, attempt: Attempt) -> Session:
        session = Session(rollout, attempt, self._template)
        for call in await self._store.calls([attempt.id]):
            session.recall(call, self._dialects[call.dialect])
        return session

    def _forget(self) -> None:
        if len(self._sessions) <= KEPT:
            return
        idle = next((key for key, session in self._sessions.items() if not session.active), None)
        if idle is not None:
            del self._sessions[idle]


def ended() -> Refused:
    return Refused(401, "the attempt of this token has ended", code="attempt_ended", hint="an agent may not go on after its attempt")
