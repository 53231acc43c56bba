"""Lets an agent reward one of its own calls: a request to the gateway with the attempt's token."""

import http.client
import json
import os
import sys
from urllib.parse import SplitResult

from lightningrl.errors import UserError
from lightningrl.runner.attach import Identity, gateway_of, identity
from lightningrl.runner.environment import PLACEHOLDER_KEY

TOKEN = "lrl-"
"""Prefix of an attempt's token."""
TIMEOUT_S = 10.0


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
    caller = _caller()
    if caller is None:
        return False
    body = {"value": float(value), "name": name, **({} if call is None else {"call": call})}
    status, answer = _post(caller, json.dumps(body).encode())
    if status != 200:
        raise UserError(f"reward `{name}` was refused: {answer}")
    return True


def _caller() -> Identity | None:
    """The attached attempt, or the one that the environment names. None outside of an attempt."""
    attached = identity.get()
    if attached is not None:
        return attached
    token, base_url = os.environ.get("OPENAI_API_KEY", ""), os.environ.get("OPENAI_BASE_URL", "")
    if token == PLACEHOLDER_KEY:
        raise UserError(
            "cannot tell which attempt this code belongs to",
            hint="in a thread that you start, call `lightningrl.attach` first",
        )
    return Identity(token=token, gateway=gateway_of(base_url)) if token.startswith(TOKEN) and base_url else None


def _post(caller: Identity, body: bytes) -> tuple[int, str]:
    """The status, and the error message if it is not 200."""
    headers = {"authorization": f"Bearer {caller.token}", "content-type": "application/json"}
    connection = _connection(caller.gateway)
    try:
        connection.request("POST", f"{caller.gateway.path}/v1/rewards", body=body, headers=headers)
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise UserError(
            f"the gateway at `{caller.gateway.geturl()}` did not take a reward: {error}", hint="is it still running?"
        ) from error
    finally:
        connection.close()
    return response.status, "" if response.status == 200 else json.loads(content)["error"]["message"]


def _connection(gateway: SplitResult) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if gateway.scheme == "https" else http.client.HTTPConnection
    return kind(gateway.hostname or "", gateway.port, timeout=TIMEOUT_S)
