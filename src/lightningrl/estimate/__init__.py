"""Does a recipe fit on a device, and how long does it take? Arithmetic on configurations; no weights are loaded."""

from lightningrl.estimate.fit import check_memory
from lightningrl.estimate.recipe import Estimate, estimate

__all__ = ["Estimate", "check_memory", "estimate"]
