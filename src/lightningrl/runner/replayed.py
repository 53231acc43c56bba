"""Lets an agent's own loop play back the tool results of a branch, in one line."""

import http.client
from functools import lru_cache

import msgspec

from lightningrl.errors import UserError
from lightningrl.runner.asking import ask, caller
from lightningrl.runner.attach import Identity
from lightningrl.runner.tool_playback import ToolPlayback
from lightningrl.tracing.tool_results import Recorded

PATH = "/v1/replay/tools"


def replayed(tool_call_id: str) -> str | None:
    """The recorded result of a tool call, for a tool that must not run twice; None: the tool is to run.

        result = lightningrl.replayed(call.id)
        if result is None:
            result = pay(**arguments)

    It is None outside of a branch, for a tool call that is new in the branch, and with `replay.tools = "rerun"`. In a
    program of its own, the first use asks the gateway, which blocks for some milliseconds.

    With `replay.tools = "never"`, a recorded tool call without a result ends the attempt, which is void.
    """
    asker = caller()
    if asker is None:
        return None
    playback = asker.tools or _of_token(asker)
    found = playback.result(tool_call_id)
    return None if found is None else found.text


def fetch(asker: Identity) -> ToolPlayback:
    """The tool results that an attempt plays back, from the gateway. Blocks. Raises `UserError` if the gateway refuses,
    `OSError` or `http.client.HTTPException` if it does not answer.
    """
    status, body = ask(asker, "GET", PATH)
    if status != 200:
        raise UserError(f"the gateway has no tool results: {msgspec.json.decode(body)['error']['message']}")
    return ToolPlayback(msgspec.json.decode(body, type=Recorded))


@lru_cache(maxsize=256)
def _of_token(asker: Identity) -> ToolPlayback:
    """For code outside of our workers, which has a token only."""
    try:
        return fetch(asker)
    except (OSError, http.client.HTTPException) as error:
        message = f"the gateway at `{asker.gateway.geturl()}` does not tell recorded tool results: {error}"
        raise UserError(message, hint="is it still running?") from error
