"""Train the language model inside any agent with reinforcement learning, without changing the agent."""

from lightningrl.errors import LightningError, UserError
from lightningrl.runner.attach import attach
from lightningrl.types import Attempt, Call, Reward, Rollout, Sampling, Task, Weights

__version__ = "0.1.0"

__all__ = ["Attempt", "Call", "LightningError", "Reward", "Rollout", "Sampling", "Task", "UserError", "Weights", "__version__", "attach"]
