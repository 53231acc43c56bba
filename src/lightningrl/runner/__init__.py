"""Run an unmodified agent: it sees a base URL and a key, and knows nothing else of us."""

from lightningrl.runner.base import Outcome, Runner

__all__ = ["Outcome", "Runner"]
