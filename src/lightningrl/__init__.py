"""Train the language model inside any agent with reinforcement learning, without changing the agent."""

from typing import TYPE_CHECKING, Any

from lightningrl.errors import LightningError, UserError
from lightningrl.runner.attach import attach
from lightningrl.runner.emit import emit_reward
from lightningrl.runner.replayed import replayed
from lightningrl.types import Attempt, Call, Reward, Rollout, Sampling, Span, Task, Weights

if TYPE_CHECKING:
    from lightningrl.notebook import Run, open, train

__version__ = "0.1.0"

__all__ = [
    "Attempt",
    "Call",
    "LightningError",
    "Reward",
    "Rollout",
    "Run",
    "Sampling",
    "Span",
    "Task",
    "UserError",
    "Weights",
    "__version__",
    "attach",
    "emit_reward",
    "open",
    "replayed",
    "train",
]


def __getattr__(name: str) -> Any:
    """`train`, `open` and `Run` are imported when they are first used (PEP 562): an agent that imports `attach` waits
    for none of what trains and reads runs.
    """
    if name in ("Run", "open", "train"):
        from lightningrl import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module `lightningrl` has no attribute `{name}`")
