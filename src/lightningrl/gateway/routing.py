"""Which policy answers a request, and what is the agent's role? The first route whose patterns all fit decides."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

import msgspec

from lightningrl.config import RouteConfig
from lightningrl.dialects.base import TURNS, ChatRequest, Refused

FROZEN = "frozen"
"""The policy with fixed weights: those that training started from, unless a route names others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One line of the routing table. `*` and `?` are wildcards in the four patterns."""

    model: str = "*"
    """The model name in the request."""
    caller: str = "*"
    """The agent's name from telemetry or a header."""
    system: str = "*"
    """The system prompt."""
    fingerprint: str = "*"
    """Digest of system prompt and tools: see `fingerprint`."""
    agent: str = ""
    """The agent's role; empty: the caller's name, or else the model name."""
    policy: str = "policy"
    """An engine's policy, or an upstream."""


def frozen(weights: str) -> str:
    """The name of the policy that answers with these fixed weights. "": those that training started from."""
    return f"{FROZEN}:{weights}" if weights else FROZEN


def configured(route: RouteConfig) -> Route:
    """The route that a recipe describes."""
    policy = frozen(route.weights) if route.policy == FROZEN else route.policy
    return Route(**route.model_dump(include={"model", "caller", "system", "fingerprint", "agent"}), policy=policy)


def choose(routes: Sequence[Route], request: ChatRequest, *, caller: str) -> Route:
    """The first route that fits. Raises `Refused` (404) if none does."""
    for route in routes:
        if _fits(route, request, caller):
            return route
    hint = f"routes: {', '.join(dict.fromkeys(route.model for route in routes))}"
    raise Refused(404, f"no route for model `{request.model}`", code="model_not_found", param="model", hint=hint)


def opening(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same request with its instructions and an empty user message, without the rest of the conversation."""
    field = next((name for name in TURNS if isinstance(body.get(name), list)), None)
    if field is None:
        return body
    instructions = takewhile(
        lambda turn: isinstance(turn, Mapping) and turn.get("role") in ("system", "developer"), body[field]
    )
    return {**body, field: [*instructions, {"role": "user"}]}


def role(route: Route, request: ChatRequest, *, caller: str) -> str:
    return route.agent or caller or request.model


def listed(routes: Sequence[Route]) -> list[str]:
    """Model names to show: the policy's name in place of a pattern."""
    names = [route.policy if "*" in route.model or "?" in route.model else route.model for route in routes]
    return list(dict.fromkeys(names))


def models(routes: Sequence[Route]) -> dict[str, Any]:
    """The list of models as OpenAI, Anthropic and Google each expect it, in one body."""
    names = listed(routes)
    entries = [_entry(name) for name in names]
    return {
        "object": "list",
        "data": entries,
        "has_more": False,
        "first_id": names[0],
        "last_id": names[-1],
        "models": [*map(_google, names)],
    }


def model(routes: Sequence[Route], name: str) -> dict[str, Any]:
    """The entry of one model. Raises `Refused` (404) if no route fits its name."""
    if name not in listed(routes) and not any(fnmatchcase(name, route.model) for route in routes):
        raise Refused(404, f"no model `{name}`", code="model_not_found", param="model")
    return {**_google(name), **_entry(name)}


def _entry(name: str) -> dict[str, Any]:
    """A model as OpenAI and Anthropic describe it."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "lightningrl",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _google(name: str) -> dict[str, Any]:
    return {
        "name": f"models/{name}",
        "displayName": name,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def fingerprint(request: ChatRequest) -> str:
    """A digest of system prompt and tools. One role of an agent usually has one fingerprint."""
    system = system_prompt(request).encode("utf-8", "surrogatepass")
    tools = msgspec.json.encode(request.tools, order="sorted")
    return hashlib.blake2b(system + b"\n" + tools, digest_size=6).hexdigest()


def _fits(route: Route, request: ChatRequest, caller: str) -> bool:
    return (
        (route.model == "*" or fnmatchcase(request.model, route.model))
        and (route.caller == "*" or fnmatchcase(caller, route.caller))
        and (route.system == "*" or fnmatchcase(system_prompt(request), route.system))
        and (route.fingerprint == "*" or fnmatchcase(fingerprint(request), route.fingerprint))
    )


def system_prompt(request: ChatRequest) -> str:
    """All system messages at the beginning of a conversation, joined."""
    leading = takewhile(lambda message: message.role == "system", request.messages)
    return "\n".join(message.content for message in leading)
