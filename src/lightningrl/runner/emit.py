"""How does an agent reward a call of its own, in the middle of an attempt? By telling the gateway, with the attempt's
own token.
"""

import http.client
import json
import os
import sys
from urllib.parse import SplitResult

from lightningrl.errors import UserError
from lightningrl.runner.attach import Identity, gateway_of, identity
from lightningrl.runner.environment import PLACEHOLDER_KEY

TOKEN = "lrl-"
"""What the token of an attempt begins with."""
TIMEOUT_S = 10.0


def emit_reward(value: float, *, name: str = "step", call: str | None = None) -> bool:
    """Reward one call of the attempt that is running: the one whose response has the id `call`, or else the latest that
    was answered.

        answer = client.chat.completions.create(…)
        lightningrl.emit_reward(0.2, name="plan_is_valid", call=answer.id)

    The recipe must allow it (`agent.may_reward`); the final reward is never the agent's to give. Credits other than
    `uniform` learn from it. True if it was recorded; False outside of any attempt, e.g. in production, where nothing is
    sent. It blocks for some milliseconds, also in a coroutine. Raises `UserError` for a value that is not finite, and
    whatever else the gateway refuses.
    """
    if not abs(value) <= sys.float_info.max:  # also an integer may be too large
        raise UserError(f"reward `{name}` is `{value!r:.80}`", hint="a reward is a finite number")
    who = _who()
    if who is None:
        return False
    body = {"value": float(value), "name": name, **({} if call is None else {"call": call})}
    status, answer = _post(who, json.dumps(body).encode())
    if status != 200:
        raise UserError(f"reward `{name}` was refused: {answer}")
    return True


def _who() -> Identity | None:
    """Whose code is running: as attached, or as the environment says. None: nobody's whom a gateway of ours knows."""
    attached = identity.get()
    if attached is not None:
        return attached
    token, base_url = os.environ.get("OPENAI_API_KEY", ""), os.environ.get("OPENAI_BASE_URL", "")
    if token == PLACEHOLDER_KEY:
        raise UserError(
            "it is not known which attempt this code belongs to",
            hint="in a thread of your own, call `lightningrl.attach` first",
        )
    return Identity(token=token, gateway=gateway_of(base_url)) if token.startswith(TOKEN) and base_url else None


def _post(who: Identity, body: bytes) -> tuple[int, str]:
    """(status, what was said if that is not 200)"""
    headers = {"authorization": f"Bearer {who.token}", "content-type": "application/json"}
    connection = _connection(who.gateway)
    try:
        connection.request("POST", f"{who.gateway.path}/v1/rewards", body=body, headers=headers)
        answer = connection.getresponse()
        said = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise UserError(
            f"the gateway at `{who.gateway.geturl()}` did not take a reward: {error}", hint="does it still run?"
        ) from error
    finally:
        connection.close()
    return answer.status, "" if answer.status == 200 else json.loads(said)["error"]["message"]


def _connection(gateway: SplitResult) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if gateway.scheme == "https" else http.client.HTTPConnection
    return kind(gateway.hostname or "", gateway.port, timeout=TIMEOUT_S)
