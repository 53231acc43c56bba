"""Does a recipe fit on a device, and how long does it take? Arithmetic on configurations; no weights are loaded."""

from lightningrl.estimate.fit import check_memory
from lightningrl.estimate.hosted import HostedEstimate, estimate_hosted
from lightningrl.estimate.recipe import Estimate, estimate

__all__ = ["Estimate", "HostedEstimate", "check_memory", "estimate", "estimate_hosted"]
