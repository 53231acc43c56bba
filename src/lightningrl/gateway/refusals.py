"""Why does a request get no answer? Exceptions → `Refused`, which each dialect writes in its own shape."""

import asyncio
import logging

from lightningrl.chat.template import BadConversation
from lightningrl.dialects.base import Refused
from lightningrl.engine.base import Unanswerable
from lightningrl.errors import LightningError, StoreFailed, UserError
from lightningrl.gateway.scripted import ScriptError

log = logging.getLogger(__name__)

GONE = "the client went away"
ENDED = "the run has ended"
"""Why an answer was cut short. The task that makes it is cancelled with one of these two as the message."""
BUSY_S = 1.0
"""`retry-after` of a refusal with status 429, in seconds."""


def refusal_of(error: BaseException) -> Refused:
    """The refusal that the client gets. Any exception not listed here is a bug of the gateway, and is logged."""
    if isinstance(error, Refused):
        return error
    if is_shutdown(error):
        return Refused(503, ENDED, code="run_ended", final=True)
    if isinstance(error, asyncio.CancelledError):
        return abandoned()
    if isinstance(error, StoreFailed):
        return Refused(500, error.message, code="store_error", hint=error.hint)
    if isinstance(error, BadConversation | RecursionError):
        return Refused(400, str(error), code="invalid_messages", param="messages")
    log.error("a call failed", exc_info=error)
    message = error.message if isinstance(error, LightningError) else f"{type(error).__name__}: {error}"
    return Refused(500, message, code="internal_error")


def is_shutdown(error: BaseException) -> bool:
    """The server shuts down, and the grace period is over."""
    return isinstance(error, asyncio.CancelledError) and GONE not in error.args


def engine_refusal(error: LightningError | None, message: str) -> Refused:
    """The refusal for an answer that broke in the engine. `error` is None if the engine has a bug."""
    hint = error.hint if error is not None else None
    if isinstance(error, Unanswerable | UserError):
        return Refused(400, message, code="unanswerable", hint=hint)
    if isinstance(error, ScriptError):
        return Refused(500, message, code="script_error", hint=hint, final=True)
    return Refused(503, message, code="engine_error", hint=hint)


def attempt_ended() -> Refused:
    hint = "an agent must stop calling the model when its attempt has ended"
    return Refused(401, "the attempt of this token has ended", code="attempt_ended", hint=hint, final=True)


def other_gateway(name: str) -> Refused:
    hint = "use the base URL that the attempt was given"
    return Refused(421, f"the server `{name}` answers this attempt", code="other_gateway", hint=hint, final=True)


def abandoned() -> Refused:
    return Refused(410, "this request was given up", code="abandoned", hint="send a new one", final=True)


def too_busy() -> Refused:
    return Refused(429, "too many requests are being answered", code="too_busy", retry_after_s=BUSY_S)
