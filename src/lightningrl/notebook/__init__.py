"""How does a notebook, or a script, train and read runs? `lightningrl.train` and `lightningrl.open`."""

from lightningrl.notebook.run import Run
from lightningrl.notebook.run import open_run as open
from lightningrl.notebook.training import train

__all__ = ["Run", "open", "train"]
