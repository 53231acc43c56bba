"""`POST /v1/rewards`: an agent rewards one of its own calls, if the recipe allows it (`agent.may_reward`). See
`lightningrl.emit_reward`.
"""

import sys
from typing import Any

from lightningrl.dialects.base import Refused
from lightningrl.errors import StoreError, StoreFailed
from lightningrl.gateway import http
from lightningrl.gateway.http import Receive, Scope, Send
from lightningrl.gateway.identity import caller_of
from lightningrl.gateway.sessions import Sessions
from lightningrl.store import Store
from lightningrl.types import FINAL, Reward

NAME_LIMIT = 200
"""Characters of a reward's name."""


class Rewards:
    """Takes rewards for single calls. None of them is for the attempt as a whole, so none can stand in for its final
    reward.
    """

    def __init__(self, store: Store, sessions: Sessions, *, allowed: bool) -> None:
        self._store = store
        self._sessions = sessions
        self._allowed = allowed

    async def serve(self, scope: Scope, receive: Receive, send: Send, *, path_token: str | None, query: str) -> None:
        """Raises `Refused`."""
        caller = caller_of(scope, path_token=path_token)
        await self._sessions.admit(caller)
        body = http.decode(await http.read(scope, receive))
        session = await self._sessions.open(caller)
        if not self._allowed:
            raise Refused(
                403,
                "agents may not reward themselves here",
                code="not_allowed",
                hint="the recipe may say `agent.may_reward = true`",
            )
        value, name = _value(body), _name(body)
        call_id = await self._call(session.attempt.id, body.get("call"))
        try:
            await self._store.append(
                Reward(attempt_id=session.attempt.id, call_id=call_id, name=name, value=value, source="agent")
            )
        except StoreFailed:
            raise
        except StoreError as error:
            raise Refused(
                400,
                error.message,
                code="invalid_request",
                param="call",
                hint="give the id of an answer of this attempt",
            ) from error
        await http.respond(send, 200, {"call": call_id, "name": name, "value": value})

    async def _call(self, attempt_id: str, given: Any) -> str:
        if given is not None:
            if not isinstance(given, str):
                raise Refused(
                    400,
                    f"`call` is `{given!r:.80}`",
                    code="invalid_request",
                    param="call",
                    hint="give the id of an answer, or none",
                )
            return given
        answered = [call for call in await self._store.calls([attempt_id]) if call.capture != "incomplete"]
        if not answered:
            raise Refused(
                400,
                "the attempt has no call yet",
                code="invalid_request",
                param="call",
                hint="reward a call once it is answered",
            )
        return max(answered, key=lambda call: call.index).id


def _value(body: dict[str, Any]) -> float:
    value = body.get("value")  # JSON has no infinity, but integers of any length
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
        raise Refused(
            400,
            f"`value` is `{value!r:.80}`",
            code="invalid_request",
            param="value",
            hint="a reward is a finite number",
        )
    return float(value)


def _name(body: dict[str, Any]) -> str:
    name = body.get("name", "step")
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT:
        raise Refused(
            400,
            f"`name` is `{name!r:.80}`",
            code="invalid_request",
            param="name",
            hint=f"give up to {NAME_LIMIT} characters",
        )
    if name == FINAL:
        raise Refused(
            400,
            f"`{FINAL}` is not the agent's to give",
            code="invalid_request",
            param="name",
            hint="the reward function gives it",
        )
    return name
