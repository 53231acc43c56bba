"""Where agents talk to their model: any wire dialect in, token-exact calls recorded, the same dialect out."""

from lightningrl.gateway.assembly import create_app
from lightningrl.gateway.routing import Route

__all__ = ["Route", "create_app"]
