"""What happened in a run, as plain data for people to look at: pages and terminals show it, `--json` prints it. Reads
records, writes nothing.
"""

from lightningrl.look.opened import opened
from lightningrl.look.rollout import RolloutView, look_at
from lightningrl.look.teaching import Teaching

__all__ = ["RolloutView", "Teaching", "look_at", "opened"]
