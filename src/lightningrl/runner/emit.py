"""Lets an agent reward one of its own calls: a request to the gateway with the attempt's token."""

import http.client
import json
import sys

from lightningrl.errors import UserError
from lightningrl.runner.asking import ask, caller
from lightningrl.runner.attach import Identity


def emit_reward(value: float, *, name: str = "step", call: str | None = None) -> bool:
    """Reward one call of the running attempt: the one whose response has the id `call`; by default the latest.

        answer = client.chat.completions.create(…)
        lightningrl.emit_reward(0.2, name="plan_is_valid", call=answer.id)

    The recipe must allow it (`agent.may_reward`). An agent can never set its final reward. The `uniform` credit ignores
    these rewards.

    Returns True if the reward was recorded, False outside of an attempt, e.g. in production: nothing is sent then.
    Blocks for some milliseconds, also in a coroutine. Raises `UserError` if `value` is not finite, or if the gateway
    refuses it.
    """
    if not abs(value) <= sys.float_info.max:  # an integer may be too large as well
        raise UserError(f"reward `{name}` is `{value!r:.80}`", hint="a reward is a finite number")
    asker = caller()
    if asker is None:
        return False
    body = {"value": float(value), "name": name, **({} if call is None else {"call": call})}
    status, answer = _post(asker, json.dumps(body).encode())
    if status != 200:
        raise UserError(f"reward `{name}` was refused: {answer}")
    return True


def _post(asker: Identity, body: bytes) -> tuple[int, str]:
    """The status, and the error message if it is not 200."""
    try:
        status, content = ask(asker, "POST", "/v1/rewards", body)
    except (OSError, http.client.HTTPException) as error:
        raise UserError(
            f"the gateway at `{asker.gateway.geturl()}` did not take a reward: {error}", hint="is it still running?"
        ) from error
    return status, "" if status == 200 else json.loads(content)["error"]["message"]
