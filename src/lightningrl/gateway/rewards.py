"""`POST /v1/rewards`: an agent rewards one of its own calls, if the recipe allows it (`agent.may_reward`).

The client's side is `lightningrl.emit_reward`.
"""

import sys
from typing import Any

from lightningrl.dialects.base import Refused, invalid
from lightningrl.errors import StoreError, StoreFailed
from lightningrl.gateway import http
from lightningrl.gateway.body import decode
from lightningrl.gateway.http import Incoming
from lightningrl.gateway.playback import played_back_as
from lightningrl.gateway.sessions import Sessions
from lightningrl.store import Store
from lightningrl.types import FINAL, Reward

NAME_LIMIT = 200
"""Characters of a reward's name."""


class Rewards:
    """Takes rewards for single calls. None is for the attempt as a whole, so none can replace its final reward."""

    def __init__(self, store: Store, sessions: Sessions, *, allowed: bool) -> None:
        self._store = store
        self._sessions = sessions
        self._allowed = allowed

    async def serve(self, incoming: Incoming) -> None:
        """Raises `Refused`."""
        caller = incoming.caller()
        await self._sessions.admit(caller)
        data = await incoming.read()
        session = await self._sessions.open(caller)
        session.spent.read(len(data))
        body, attempt = decode(data), session.attempt
        if not self._allowed:
            message, hint = "agents may not reward themselves here", "the recipe may say `agent.may_reward = true`"
            raise Refused(403, message, code="not_allowed", hint=hint)
        value, name = _value(body), _name(body)
        call_id = await self._call(attempt.id, body.get("call"))
        if session.playback is not None:
            names = played_back_as(await self._store.calls([attempt.id]))
            call_id = names.get((attempt.id, call_id), call_id)
        reward = Reward(attempt_id=attempt.id, call_id=call_id, name=name, value=value, source="agent")
        try:
            await self._store.append(reward)
        except StoreFailed:
            raise
        except StoreError as error:
            await self._sessions.check(attempt)
            raise invalid(error.message, param="call", hint="give the id of an answer of this attempt") from error
        await http.respond(incoming.send, 200, {"call": call_id, "name": name, "value": value})

    async def _call(self, attempt_id: str, given: Any) -> str:
        """The id of the call to reward; the latest one if the agent gives none."""
        if isinstance(given, str):
            return given
        if given is not None:
            raise invalid(f"`call` is `{given!r:.80}`", param="call", hint="give the id of an answer, or none")
        answered = [call for call in await self._store.calls([attempt_id]) if call.capture != "incomplete"]
        if not answered:
            raise invalid("the attempt has no call yet", param="call", hint="reward a call once it is answered")
        return max(answered, key=lambda call: call.index).id


def _value(body: dict[str, Any]) -> float:
    value = body.get("value")  # JSON has no infinity, but integers of any length
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
        raise invalid(f"`value` is `{value!r:.80}`", param="value", hint="a reward is a finite number")
    return float(value)


def _name(body: dict[str, Any]) -> str:
    name = body.get("name", "step")
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT:
        raise invalid(f"`name` is `{name!r:.80}`", param="name", hint=f"give up to {NAME_LIMIT} characters")
    if name == FINAL:
        raise invalid(f"`{FINAL}` is not the agent's to give", param="name", hint="the reward function gives it")
    return name
