"""Token ids in, token ids and logprobs out. An engine knows no messages, no agents and no rewards."""

from lightningrl.engine.base import Delta, Engine

__all__ = ["Delta", "Engine"]
