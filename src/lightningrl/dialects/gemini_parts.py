"""How does Google write the signature of a function call, and the log-probabilities of tokens?"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from lightningrl.dialects.base import TokenLogprob

SIGNED = b"lightningrl:"
"""The start of the gateway's signatures; the id of the call follows."""

PLAIN = str.maketrans("-_", "+/")
"""URL-safe base64 → base64."""


def signature(call_id: str) -> str:
    return base64.b64encode(SIGNED + call_id.encode()).decode()


def signed(signature: str | None) -> str | None:
    """The call id in one of the gateway's signatures; None for another's. SDKs write base64 in either alphabet."""
    try:
        plain = base64.b64decode((signature or "").translate(PLAIN) + "==")
    except ValueError:
        return None
    return plain[len(SIGNED) :].decode(errors="replace") if plain.startswith(SIGNED) else None


def logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "chosenCandidates": [{"token": token.text, "logProbability": token.logprob} for token in tokens],
        "topCandidates": [
            {"candidates": [{"token": text, "logProbability": logprob} for text, logprob in token.top]}
            for token in tokens
        ],
    }


def tokens_of(scores: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """The inverse of `logprobs`."""

    def pair(token: Mapping[str, Any]) -> tuple[str, float]:
        return token["token"], token["logProbability"]

    return tuple(
        TokenLogprob(text=token["token"], logprob=token["logProbability"], top=tuple(map(pair, top["candidates"])))
        for token, top in zip(scores["chosenCandidates"], scores["topCandidates"], strict=True)
    )
