"""Which policy answers, and in which role does the agent speak? The first route whose pattern fits the model name decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lightningrl.gateway.dialects.base import Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One line of the routing table."""

    model: str = "*"
    """The model name that the agent asks for; `*` and `?` are wildcards."""
    agent: str = ""
    """The role that calls under this name; empty: the model name itself."""
    policy: str = "policy"
    """Who answers."""


def choose(routes: Sequence[Route], model: str) -> Route:
    for route in routes:
        if fnmatchcase(model, route.model):
            return route
    raise Refused(404, f"no route for model `{model}`", code="model_not_found", param="model", hint=f"routes: {', '.join(r.model for r in routes)}")


def listed(routes: Sequence[Route]) -> list[str]:
    """Model names to show: a pattern stands for its policy."""
    return list(dict.fromkeys(route.policy if "*" in route.model or "?" in route.model else route.model for route in routes))
