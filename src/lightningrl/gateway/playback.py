"""Which requests of a branch's attempt are answered from the record, and which are sampled?

A request is the k-th with its prompt, dialect and model in the attempt. Its record is the k-th such call of the trunk:

    record is played back                            the recorded answer
    record is the branching call, or may follow it   sampled
    no record, and an answer has been sampled        sampled
    no record, and no answer has been sampled        the request differs: it is refused, and the branch is void

A call that began after the branching call had ended may follow it. In a parallel conversation such a call can be
sampled while the branching call is still being answered, and then that conversation has no record any more.

A call that was relayed has no prompt ids. Its key is the conversation, without the ids of tool calls.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from lightningrl.branches import DIFFERS, played_back
from lightningrl.dialects.base import ChatRequest, Dialect, Past, Refused
from lightningrl.gateway.difference import without_ids
from lightningrl.store import Records
from lightningrl.types import Branch, Call, Ints


class Playback:
    """The record of one branch's attempt, and how far it has been used.

    A record of other attempts can be shared by all sessions of a server: give all their calls and no `branch`. Then
    each recorded answer is given once, to whichever attempt asks first.
    """

    def __init__(self, trunk: Sequence[Call], *, branch: Branch | None, dialects: Mapping[str, Dialect]) -> None:
        """`trunk`: all recorded calls, in their order. `branch`: None plays back all of them."""
        self._dialects = dialects
        self._place = None if branch is None else branch.call_id
        played = trunk if branch is None else played_back(trunk, branch)
        self._played = {call.id for call in played if call.capture != "incomplete"}
        self.trunk = trunk
        self.shared = branch is None
        self._records: dict[bytes, list[Call]] = {}
        """Key → complete calls, in their order."""
        for call in trunk:
            if call.capture != "incomplete":
                self._records.setdefault(self._key(call), []).append(call)
        self._relays = any(call.capture == "upstream" for call in trunk)
        self._taken: set[str] = set()
        """The ids of recorded calls that have been given, or whose places have been sampled."""
        self._parted = False
        """An answer has been sampled: whatever is not in the record is sampled, too."""
        self.void = False
        """A request differed, and the attempt teaches nothing: nothing is sampled for it any more."""

    @property
    def pure(self) -> bool:
        """Nothing is sampled at all: there is no branching call."""
        return self._place is None

    def relayed(self, request: ChatRequest, dialect: Dialect) -> list[bytes]:
        """The key of a request whose record was relayed; empty: there is no such record."""
        key = conversation_key(request.body, dialect) if self._relays else b""
        return [key] if key in self._records else []

    def again(self, keys: Sequence[bytes]) -> bool:
        """Is an answer to a request with these keys played back?"""
        return any(self.played(record) for record in self.find(keys) or ())

    def find(self, keys: Sequence[bytes]) -> list[Call | None] | None:
        """The record of each answer to one request, or None for one without a record. None for all: the request
        differs, or it would be sampled for an attempt that is void.

        So of several answers some may be played back, and the others sampled, as parallel calls are.
        """
        taken: set[str] = set()
        found: list[Call | None] = []
        for key in keys:
            record = next((call for call in self._free(key) if call.id not in taken), None)
            if (record is None and not self._parted) or (self.void and self.played(record) is None):
                return None
            if record is not None:
                taken.add(record.id)
            found.append(record)
        return found

    def played(self, record: Call | None) -> Call | None:
        """The record, if its answer is played back; None: the answer is sampled."""
        return record if record is not None and record.id in self._played else None

    def unused(self) -> set[str]:
        """The ids of the complete calls whose answers have not been given."""
        return {call.id for calls in self._records.values() for call in calls} - self._taken

    def take(self, records: Iterable[Call | None]) -> None:
        """These records are being used: the next request with the same key gets the next one."""
        self._taken.update(record.id for record in records if record is not None)

    def give_back(self, records: Iterable[Call | None]) -> None:
        """The answers were not recorded. The next request with the same key gets these records."""
        self._taken.difference_update(record.id for record in records if record is not None)

    def answered(self, records: Iterable[Call | None]) -> None:
        """The answers to these records are recorded."""
        if self._place is not None and any(record is not None and record.id not in self._played for record in records):
            self._parted = True

    def differs(self) -> None:
        """A request that differs is recorded."""
        self.void = self._place is not None

    def recall(self, call: Call) -> None:
        """Take in a call that an earlier session answered."""
        if (call.capture_reason or "").startswith(DIFFERS):
            self.differs()
        if call.capture == "incomplete":
            return
        if call.replays is not None:
            self._taken.add(call.replays)
            return
        fresh = [record for record in self._free(self._key(call)) if record.id not in self._played][:1]
        self.take(fresh)
        self.answered(fresh)

    def _free(self, key: bytes) -> Iterable[Call]:
        return (call for call in self._records.get(key, ()) if call.id not in self._taken)

    def _key(self, call: Call) -> bytes:
        if call.capture != "upstream":
            return prompt_key(call.prompt_ids, dialect=call.dialect, model=model_of(call.request))
        dialect = self._dialects.get(call.dialect)
        return b"" if dialect is None else conversation_key(call.request, dialect)


async def trunk_of(branch: Branch, recordings: Records) -> list[Call]:
    """All calls of the attempt that a branch repeats. Raises `Refused` if there is none to repeat."""
    rollout_id = branch.attempt_id.rpartition(".")[0]
    attempts = await recordings.attempts([rollout_id])
    status = next((attempt.status for attempt in attempts if attempt.id == branch.attempt_id), None)
    if status is None:
        raise _no_record(branch, "does not exist", hint="is it in another run?")
    if status == "running":
        raise _no_record(branch, "has not ended", hint="repeat one that has ended")
    trunk = await recordings.calls([branch.attempt_id])
    if branch.call_id not in (None, *(call.id for call in trunk if call.capture != "incomplete")):
        raise _no_record(branch, f"has no complete call `{branch.call_id}`", hint="branch at one of its calls")
    return trunk


def _no_record(branch: Branch, what: str, *, hint: str) -> Refused:
    message = f"the recorded attempt `{branch.attempt_id}` {what}"
    return Refused(409, message, code="no_record", hint=hint, final=True)


def played_back_as(calls: Iterable[Call]) -> dict[tuple[str, str], str]:
    """(attempt, id of a response) → the call that played it back. Clients know responses by the ids that they had."""
    found: dict[tuple[str, str], str] = {}
    for call in calls:
        if call.replays is not None:
            found[call.attempt_id, call.replays] = call.id
            found[call.attempt_id, str(call.response.get("id") or call.response.get("responseId"))] = call.id
    return found


def prompt_key(prompt_ids: Ints, *, dialect: str, model: str) -> bytes:
    """The key of a request that an engine answers."""
    head = msgspec.json.encode((dialect, model))
    return hashlib.blake2b(head + prompt_ids.tobytes(), digest_size=16).digest()


def keys_of(prompts: Sequence[Ints], request: ChatRequest, dialect: Dialect) -> list[bytes]:
    """The keys of all answers to a request that an engine answers."""
    model = model_of(request.body)
    return [prompt_key(ids, dialect=dialect.name, model=model) for ids in prompts for _ in range(request.n)]


def conversation_key(body: Mapping[str, Any], dialect: Dialect) -> bytes:
    """The key of a request that an upstream answers. One that cannot be read is known by its body."""
    try:
        request = dialect.parse(body, Past())
    except (Refused, RecursionError):
        asked: Any = {name: value for name, value in body.items() if name != "metadata"}  # may name a session
    else:
        asked = ([without_ids(message) for message in request.messages], request.prompts, request.tools)
    head = (dialect.name, model_of(body), asked)
    return hashlib.blake2b(msgspec.json.encode(head, order="sorted"), digest_size=16).digest()


def model_of(body: Mapping[str, Any]) -> str:
    return str(body.get("model", ""))
