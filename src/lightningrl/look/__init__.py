"""What happened in a run, as plain data. The page and the terminal show it, and `--json` prints it. Read-only."""

from lightningrl.look.detail import CallDetail, look_at_call
from lightningrl.look.group import GroupView, look_at_group
from lightningrl.look.opened import opened
from lightningrl.look.rollout import RolloutView, look_at
from lightningrl.look.teaching import Teaching

__all__ = [
    "CallDetail",
    "GroupView",
    "RolloutView",
    "Teaching",
    "look_at",
    "look_at_call",
    "look_at_group",
    "opened",
]
