"""Which sampling settings does an answer get? The request's, with the rollout's over them."""

from typing import Any

from lightningrl.dialects.base import ChatRequest
from lightningrl.gateway.sessions import Randomness, Session
from lightningrl.types import Sampling

LEAST_TEMPERATURE = 0.01
"""Lowest nonzero temperature; vLLM clamps silently (`SamplingParams.__post_init__`), and the record must be exact."""


def sampling_of(
    request: ChatRequest,
    session: Session,
    *,
    choice: int,
    room: int,
    randomness: Randomness,
    ends: tuple[int, ...],
    grammar: str | None,
) -> Sampling:
    """The request's settings, and the policy's own where it has none. The rollout's settings override both.

    `room`: tokens that fit behind the prompt. `ends`: the tokens that end a turn.
    """
    seed = randomness.seed
    if session.seed is None and request.seed is not None:
        seed = (request.seed + choice) % 2**63
    requested = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    settings: dict[str, Any] = {
        "max_tokens": room,
        **{name: value for name, value in requested.items() if value is not None},
        "stop": request.stop,
        "stop_token_ids": ends,
        "seed": seed,
        "grammar": grammar,
        "top_logprobs": request.top_logprobs,
        **session.laid_down,
    }
    settings["max_tokens"] = min(settings["max_tokens"], room)
    if 0 < settings.get("temperature", 1.0) < LEAST_TEMPERATURE:
        settings["temperature"] = LEAST_TEMPERATURE
    return Sampling(**settings)
