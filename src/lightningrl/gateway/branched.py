"""How is a request of a branch answered? From the record, or afresh; or it is refused."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightningrl.branches import DIFFERS
from lightningrl.chat import Prompt
from lightningrl.dialects.base import Refused
from lightningrl.gateway.answering import Work
from lightningrl.gateway.asked import Asked
from lightningrl.gateway.backend import Backend
from lightningrl.gateway.difference import example
from lightningrl.gateway.generation import NO_VERSION
from lightningrl.gateway.playback import Playback
from lightningrl.gateway.recorded import Recorded
from lightningrl.types import Call, Sampling


class Branched:
    """One answer of a branch. If it breaks, its records are free again. See `answering.Work`."""

    def __init__(self, work: Work, playback: Playback, records: Sequence[Call | None]) -> None:
        self._work = work
        self._playback = playback
        self._records = records
        self.delivery = work.delivery
        self.sampled = work.sampled
        playback.take(records)

    async def run(self, delivery: Any) -> Any:
        recorded = False
        try:
            answered = await self._work.run(delivery)
            recorded = self.sampled()  # the error of an upstream is an answer, too
            return answered
        finally:
            if recorded:
                self._playback.answered(self._records)
            else:
                self._playback.give_back(self._records)


class RelayedAgain:
    """The recorded answer of an upstream. See `answering.Work`."""

    def __init__(self, backend: Backend, asked: Asked, record: Call) -> None:
        asked.session.spent.ask(1)
        index = asked.session.next_index()
        self._backend = backend
        self._session = asked.session
        self._recorded = Recorded(asked.dialect, asked.request, [record])
        self._call = replace(
            record,
            id=asked.call_id(index),
            attempt_id=asked.session.attempt.id,
            index=index,
            agent=asked.agent,
            request=asked.request.body,
            started_at=time.time(),
            request_id=asked.request_id,
            replays=record.id,
        )
        self.delivery = self._recorded.delivery

    def sampled(self) -> bool:
        return True

    async def run(self, delivery: Any) -> Any:
        call = replace(self._call, ended_at=time.time())
        await self._backend.record(self._session.attempt, call)
        self._session.given(call)
        return await self._recorded.run(delivery)


async def differs(backend: Backend, asked: Asked, playback: Playback, *, prompts: Sequence[Prompt]) -> Refused:
    """Record a request that has no place in the record, and return its refusal, with an example of the difference.

    `prompts`: what the engine would have read; none, if an upstream would have answered.
    """
    why = "an earlier request differed, so this one is not sampled"
    if not playback.void:
        trunk, unused = playback.trunk, playback.unused()
        why = example(asked.request, dialect=asked.dialect.name, trunk=trunk, unused=unused)
    session = asked.session
    session.spent.ask(1)
    index, now = session.next_index(), time.time()
    hint = "the agent went another way than the attempt that it repeats"
    if playback.shared:
        hint = "this request is not on the recording; record again if it should be"
    refused = Refused(409, f"{DIFFERS}{why}", code="replay_differs", hint=hint, final=True)
    prompt = prompts[0] if prompts else None
    call = Call(
        id=asked.call_id(index),
        attempt_id=session.attempt.id,
        index=index,
        parent_call_id=None if prompt is None else prompt.parent_call_id,
        agent=asked.agent,
        policy=asked.policy,
        policy_version=NO_VERSION,
        dialect=asked.dialect.name,
        request=asked.request.body,
        response=asked.dialect.error(refused),
        prompt_ids=np.array([], np.int32) if prompt is None else prompt.ids,
        completion_ids=np.array([], np.int32),
        logprobs=np.array([], np.float32),
        sampling=Sampling(),
        finish_reason="error",
        capture="incomplete",
        capture_reason=f"{DIFFERS}{why}",
        started_at=now,
        ended_at=now,
        request_id=asked.request_id,
    )
    await backend.record(session.attempt, call)
    playback.differs()
    return refused
