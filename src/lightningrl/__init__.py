"""Train the language model inside any agent with reinforcement learning, without changing the agent."""

from lightningrl.errors import LightningError, UserError
from lightningrl.runner.attach import attach
from lightningrl.runner.emit import emit_reward
from lightningrl.types import Attempt, Call, Reward, Rollout, Sampling, Span, Task, Weights

__version__ = "0.1.0"

__all__ = [
    "Attempt",
    "Call",
    "LightningError",
    "Reward",
    "Rollout",
    "Sampling",
    "Span",
    "Task",
    "UserError",
    "Weights",
    "__version__",
    "attach",
    "emit_reward",
]
