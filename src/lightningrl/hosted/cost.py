"""What has a service processed, and what does that cost?"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Spent:
    """Tokens that the service has processed since the start of this process."""

    prefill: int = 0
    """Tokens of prompts, each time one was sent."""
    sample: int = 0
    """Tokens that were sampled."""
    train: int = 0
    """Tokens of rows in forward and backward passes."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    told: dict[str, int] = field(default_factory=dict[str, int])
    """The counts at the last call of `metrics`."""

    def add(self, *, prefill: int = 0, sample: int = 0, train: int = 0) -> None:
        with self.lock:
            self.prefill += prefill
            self.sample += sample
            self.train += train

    def tokens(self) -> dict[str, int]:
        with self.lock:
            return {"prefill": self.prefill, "sample": self.sample, "train": self.train}

    def metrics(self, prices: Mapping[str, float]) -> dict[str, float]:
        """Tokens since the last call, and US dollars if all prices are known. It is a count, not the service's bill."""
        counts = self.tokens()
        fresh = {f"service/{kind}": float(count - self.told.get(kind, 0)) for kind, count in counts.items()}
        self.told = counts
        cost = dollars({kind: fresh[f"service/{kind}"] for kind in counts}, prices)
        return fresh if cost is None else fresh | {"service/usd": cost}


def dollars(tokens: Mapping[str, float], prices: Mapping[str, float]) -> float | None:
    """The cost of tokens by kind, at prices for a million; None: the price of a kind is missing."""
    if not tokens.keys() <= prices.keys():
        return None
    return sum(count * prices[kind] for kind, count in tokens.items()) / 1e6
