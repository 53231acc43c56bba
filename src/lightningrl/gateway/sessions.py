"""What does the gateway remember of an attempt between its calls? Its conversations, and which prompts occurred.

All of it follows from the store: a session that was dropped, or lost with the process, is rebuilt from the attempt's
calls.
"""

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from lightningrl.chat import ChatTemplate, ConversationTree
from lightningrl.chat.prompt import Place
from lightningrl.dialects.base import ChatRequest, Dialect, Past, Refused
from lightningrl.errors import UserError
from lightningrl.gateway.answering import Unread
from lightningrl.gateway.identity import Caller, is_local
from lightningrl.gateway.limits import Limits, Spent
from lightningrl.gateway.playback import Playback, trunk_of
from lightningrl.gateway.refusals import attempt_ended, other_gateway
from lightningrl.gateway.visitors import Visitors
from lightningrl.messages import Message
from lightningrl.store import Records, Store
from lightningrl.types import Attempt, Call, Ints, Rollout, Sampling

KEPT_TOKENS = 8_000_000
"""Token ids that idle sessions may keep in memory: 32 MB. A dropped session costs a read of the store."""
KEPT = 4096
"""Sessions that are kept in memory, if some of them are idle."""
LOST = 128
"""Answers to one prompt that may have been in the making when a process died: OpenAI's limit of `n`."""


@dataclass(frozen=True, slots=True)
class Randomness:
    """The random bits of one answer: its sampling seed and its tool call ids follow from them."""

    bits: bytes
    """Sixteen bytes."""
    prompt: bytes
    """Digest of the prompt ids."""
    occurrence: int
    """1 for the first answer to this prompt in the attempt, 2 for the second, and so on."""

    @property
    def seed(self) -> int:
        """The sampling seed, in the range that every random generator takes."""
        return int.from_bytes(self.bits[:8], "little") % 2**63


class Session:
    """What is remembered of one running attempt."""

    def __init__(
        self,
        rollout: Rollout,
        attempt: Attempt,
        template: ChatTemplate,
        *,
        history: Literal["exact", "template"],
        run_seed: int,
        limits: Limits,
        playback: Playback | None = None,
    ) -> None:
        unknown = sorted(set(rollout.sampling) - {field.name for field in fields(Sampling)})
        if unknown:
            message = f"unknown sampling field `{unknown[0]}` in rollout `{rollout.id}`"
            raise UserError(message, hint="see `lightningrl.types.Sampling`")
        self.laid_down: dict[str, Any] = dict(rollout.sampling)
        """Sampling fields of the rollout. They override the agent's."""
        for name in {"stop", "stop_token_ids"} & set(self.laid_down):
            self.laid_down[name] = tuple(self.laid_down[name])  # JSON has no tuples
        self.seed: int | None = self.laid_down.pop("seed", None)
        """Sampling seed. It overrides the agent's: identical samples teach nothing."""
        self._source = f"{run_seed}\n{rollout.id}" if self.seed is None else str(self.seed)
        self.rollout = rollout
        self.attempt = attempt
        self.tree = ConversationTree(template, history=history)
        self.past = Past()
        self.unread = Unread()
        self.spent = Spent(limits)
        self.playback = playback
        """The record that requests are answered from; None: all are sampled."""
        self.answered: set[str] = set()
        """The names of requests (`identity.REQUEST`) whose answers are recorded."""
        self.active = 0
        """Requests that are being answered."""
        self.tokens = 0
        """Token ids in memory, roughly."""
        self._calls = 0
        self._seen: Counter[bytes] = Counter()
        """Digest of a prompt → its highest occurrence."""
        self._returned: dict[bytes, list[int]] = {}
        """Digest of a prompt → lower occurrences whose randomness is free."""

    def next_index(self) -> int:
        """The index of a new call: calls are numbered as they arrive."""
        self._calls += 1
        return self._calls - 1

    def randomness(self, prompt_ids: Ints) -> Randomness:
        """Random bits for the next answer to this prompt.

        They follow from the rollout's seed (without one: the run's seed and the rollout's name), the prompt, and how
        often the prompt occurred in this attempt. Neither timing nor a second attempt changes them.
        """
        prompt = _digest(prompt_ids)
        return self._random(prompt, self._occurrence(prompt))

    def give_back(self, randomness: Randomness) -> None:
        """The answer reached no client. The next answer to the same prompt gets the same randomness."""
        self._returned.setdefault(randomness.prompt, []).append(randomness.occurrence)

    def remember(
        self, call: Call, dialect: Dialect, request: ChatRequest, *, key: Place | None, answer: Message
    ) -> None:
        """Add a complete call to the conversations: later calls may continue it."""
        self.given(call)
        dialect.remember(self.past, request, call.response)
        self.tokens += len(call.completion_ids)
        ids, sampled = call.prompt_ids, call.completion_ids
        if request.prompts:
            self.tree.add_raw(call.id, prompt_ids=ids, completion_ids=sampled)
        else:
            self.tree.add(call.id, key=key, prompt_ids=ids, completion_ids=sampled, answer=answer)

    def given(self, call: Call) -> None:
        """A complete call is recorded: its request gets the same answer if it comes again."""
        if call.request_id:
            self.answered.add(call.request_id)

    def recall(self, call: Call, dialect: Dialect | None) -> None:
        """Take in a call that an earlier session answered. `dialect` is None if its dialect is not served any more."""
        self._calls = max(self._calls, call.index + 1)
        self.spent.recall(call)
        if self.playback is not None:
            self.playback.recall(call)
        if call.finish_reason != "cancelled":  # a cancelled call gave its randomness back
            self._take(_digest(call.prompt_ids), call.sampling.seed)  # also a call that was played back
        if call.capture != "incomplete":
            self.given(call)
        if call.capture in ("incomplete", "upstream") or dialect is None:
            return
        request = dialect.parse(call.request, self.past)
        key = None if request.prompts else self.tree.key(request.messages, tools=request.tools)
        answer = dialect.answer(call.response)
        if call.replays is not None:  # its client knows it by the id that it had
            answer = replace(answer, reply_id=dialect.reply(request, call.response).id)
        self.remember(call, dialect, request, key=key, answer=answer)

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def _random(self, prompt: bytes, occurrence: int) -> Randomness:
        bits = hashlib.blake2b(f"{self._source}\n{occurrence}\n".encode() + prompt, digest_size=16).digest()
        return Randomness(bits, prompt, occurrence)

    def _take(self, prompt: bytes, seed: int | None) -> None:
        """Note the randomness of a recorded call. Its occurrence follows from its sampling seed: earlier ones may have
        been lost with the process, and are free. A seed that the agent chose stands for the next occurrence.
        """
        free, following = self._returned.setdefault(prompt, []), self._seen[prompt] + 1
        candidates = (*free, *range(following, following + LOST))
        found = next((number for number in candidates if self._random(prompt, number).seed == seed), following)
        if found in free:
            free.remove(found)
        else:
            free.extend(range(following, found))
            self._seen[prompt] = found

    def _occurrence(self, prompt: bytes) -> int:
        if returned := self._returned.get(prompt):
            earliest = min(returned)
            returned.remove(earliest)
            return earliest
        self._seen[prompt] += 1
        return self._seen[prompt]


class Sessions:
    """Tokens → sessions of running attempts."""

    def __init__(
        self,
        store: Store,
        template: ChatTemplate,
        dialects: Sequence[Dialect],
        *,
        history: Literal["exact", "template"],
        seed: int,
        name: str,
        limits: Limits,
        visitors: Visitors | None,
        recordings: Records | None = None,
        cassette: Sequence[Call] = (),
    ) -> None:
        """`seed`: the run's. `name`: this server's. Attempts of another server are refused. `limits`: of an attempt.

        `recordings`: has the attempts that branches repeat; None: `store`. `cassette`: recorded calls that answer
        all other attempts together; empty: these are sampled.
        """
        self._store = store
        self._recordings: Records = recordings or store
        self._template = template
        self._dialects: Mapping[str, Dialect] = {dialect.name: dialect for dialect in dialects}
        self._cassette = Playback(cassette, branch=None, dialects=self._dialects) if cassette else None
        self._history: Literal["exact", "template"] = history
        self._seed = seed
        self._name = name
        self._limits = limits
        self._visitors = visitors
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._branches: dict[str, set[str]] = {}
        """Trunk → the attempts in memory that repeat it."""
        self._checks: deque[str] = deque()
        """Attempts, in the order in which the next checks ask whether they are still running."""

    async def admit(self, caller: Caller) -> tuple[Rollout, Attempt]:
        """The caller's running attempt. Raises `Refused`: 401 if its token is unknown or its attempt has ended, 421 if
        the attempt belongs to another server.
        """
        found = await self.attempt_of(caller)
        if found is None:
            hint = "give the agent the API key (or base URL) of its attempt"
            if self._visitors is not None:
                who = "only programs of this machine may leave out the key, and no web pages"
                hint = f"{who}: take it from `OPENAI_API_KEY`"
            raise Refused(401, "no such token", code="invalid_api_key", hint=hint)
        if found[1].status != "running":
            self._drop(found[1].id)
            raise attempt_ended()
        if found[1].gateway not in ("", self._name):
            raise other_gateway(found[1].gateway)
        return found

    async def open(self, caller: Caller) -> Session:
        """The session of the caller's attempt. Raises `Refused`, as `admit` does."""
        rollout, attempt = await self.admit(caller)
        session = self._sessions.get(attempt.id)
        if session is None:
            self._drop_idle()
            await self._drop_ended()
            session = self._sessions.setdefault(attempt.id, await self._build(rollout, attempt))
            if rollout.branch is not None:
                self._branches.setdefault(rollout.branch.attempt_id, set()).add(attempt.id)
            self._checks.append(attempt.id)
        self._sessions.move_to_end(attempt.id)
        return session

    async def attempt_of(self, caller: Caller) -> tuple[Rollout, Attempt] | None:
        """The attempt of the caller's token, even if it has ended; None: there is no such attempt.

        A visitor from this machine needs no token.
        """
        found = await self._store.attempt_by_token(caller.token) if caller.token else None
        if found is None and self._visitors is not None and is_local(caller):
            found = await self._store.attempt_by_token(await self._visitors.token(caller.session))
        return found

    async def check(self, attempt: Attempt) -> None:
        """Raises `Refused` (401) if the attempt has ended."""
        found = await self._store.attempt_by_token(attempt.token)
        if found is None or found[1].status != "running":
            raise attempt_ended()

    def attempts(self) -> list[Attempt]:
        """The attempts that have a session in memory."""
        return [session.attempt for session in self._sessions.values()]

    def branches_of(self, trunk: str) -> Collection[str]:
        """The attempts in memory that repeat this attempt."""
        return self._branches.get(trunk, ())

    def requester(self, tool_call_id: str) -> str | None:
        """The id of the attempt whose model requested this tool call.

        None if no attempt in memory did, or several: rollouts with the same seed get the same tool call ids.
        """
        found = [attempt_id for attempt_id, session in self._sessions.items() if session.tree.asked_for(tool_call_id)]
        return found[0] if len(found) == 1 else None

    async def _build(self, rollout: Rollout, attempt: Attempt) -> Session:
        session = Session(
            rollout,
            attempt,
            self._template,
            history=self._history,
            run_seed=self._seed,
            limits=self._limits,
            playback=await self._playback(rollout),
        )
        for call in await self._store.calls([attempt.id]):
            session.recall(call, self._dialects.get(call.dialect))
        return session

    async def _playback(self, rollout: Rollout) -> Playback | None:
        if rollout.branch is None:
            return self._cassette
        trunk = await trunk_of(rollout.branch, self._recordings)
        return Playback(trunk, branch=rollout.branch, dialects=self._dialects)

    def _drop_idle(self) -> None:
        """Drop the sessions that have been idle longest, if there are too many or they hold too many tokens."""
        count = len(self._sessions)
        tokens = 0
        if count % 64 == 63:  # adding them up takes a while
            tokens = sum(session.tokens for session in self._sessions.values())
        if count < KEPT and tokens <= KEPT_TOKENS:
            return
        idle = [attempt_id for attempt_id, session in self._sessions.items() if not session.active]
        for attempt_id in idle[: max(1, len(idle) // 4)]:
            self._drop(attempt_id)

    async def _drop_ended(self) -> None:
        """Check two attempts, and drop their sessions if they have ended.

        With two checks for each new session, at least half of all sessions belong to running attempts.
        """
        for attempt_id in [self._checks.popleft() for _ in range(min(2, len(self._checks)))]:
            session = self._sessions.get(attempt_id)
            if session is None:
                continue
            found = await self._store.attempt_by_token(session.attempt.token)
            if found is None or found[1].status != "running":
                self._drop(attempt_id)
            if attempt_id in self._sessions:
                self._checks.append(attempt_id)

    def _drop(self, attempt_id: str) -> None:
        session = self._sessions.get(attempt_id)
        if session is not None and not session.active:
            del self._sessions[attempt_id]
            if session.rollout.branch is not None:
                trunk = session.rollout.branch.attempt_id
                siblings = self._branches.get(trunk, set())
                siblings.discard(attempt_id)
                if not siblings:
                    self._branches.pop(trunk, None)


def _digest(prompt_ids: Ints) -> bytes:
    return hashlib.blake2b(prompt_ids.tobytes(), digest_size=16).digest()
