"""Counts over recorded calls: captures and their reasons, agents, dialects, policies, roles and tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from lightningrl.dialects.base import ChatRequest
from lightningrl.dialects.recorded import Reader
from lightningrl.gateway.routing import fingerprint, system_prompt
from lightningrl.prefix import common_prefix
from lightningrl.types import Call, Capture

CAPTURES: tuple[Capture, ...] = get_args(Capture)
UNEXPLAINED = "no reason was recorded"


@dataclass(slots=True, kw_only=True)
class Reason:
    """Calls that are forked, partly bridged or incomplete for the same reason."""

    calls: int = 0
    example: str = ""
    """Id of the first such call."""


@dataclass(slots=True, kw_only=True)
class Role:
    """Calls with the same system prompt and the same tools."""

    calls: int = 0
    sampled_tokens: int = 0
    system: str = ""
    """The first 200 characters of the system prompt."""
    tools: tuple[str, ...] = ()
    agents: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True, kw_only=True)
class Census:
    """Counts over any number of attempts."""

    calls: int = 0
    captures: Counter[str] = field(default_factory=Counter[str])
    partly_reasons: dict[str, Reason] = field(default_factory=dict[str, Reason])
    fork_reasons: dict[str, Reason] = field(default_factory=dict[str, Reason])
    incomplete_reasons: dict[str, Reason] = field(default_factory=dict[str, Reason])
    agents: Counter[str] = field(default_factory=Counter[str])
    dialects: Counter[str] = field(default_factory=Counter[str])
    policies: Counter[str] = field(default_factory=Counter[str])
    roles: dict[str, Role] = field(default_factory=dict[str, Role])
    """By fingerprint."""
    replayed: int = 0
    """Part of `calls`: those of branches whose answers were played back. They count in no number of tokens."""
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Part of `prompt_tokens`: tokens that the parent call has read or sampled."""

    def add(self, calls: Sequence[Call]) -> None:
        """Count the calls of one attempt; `calls` are in order."""
        known: dict[str, Call] = {}
        reader = Reader()
        for call in calls:
            self._add(call, known.get(call.parent_call_id or ""))
            self._add_role(call, reader.request(call))
            known[call.id] = call

    def reasons(self) -> dict[str, dict[str, Reason]]:
        """Capture → reason → calls, for captures that have reasons."""
        return {"partly": self.partly_reasons, "forked": self.fork_reasons, "incomplete": self.incomplete_reasons}

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that no parent call has read or sampled."""
        return self.prompt_tokens - self.reused_tokens

    def counts(self) -> dict[str, Any]:
        """The plain numbers, as JSON."""
        return {
            "calls": self.calls,
            **{capture: self.captures[capture] for capture in CAPTURES},
            "agents": self.agents,
            "dialects": self.dialects,
            "replayed": self.replayed,
            "sampled_tokens": self.sampled_tokens,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
        }

    def _add(self, call: Call, parent: Call | None) -> None:
        self.calls += 1
        self.captures[call.capture] += 1
        self.agents[call.agent] += 1
        self.dialects[call.dialect] += 1
        self.policies[call.policy] += 1
        if call.replays is None:
            self._add_tokens(call, parent)
        else:
            self.replayed += 1
        reasons = self.reasons().get(call.capture)
        if reasons is not None:
            reason = reasons.setdefault(call.capture_reason or UNEXPLAINED, Reason(example=call.id))
            reason.calls += 1

    def _add_tokens(self, call: Call, parent: Call | None) -> None:
        self.sampled_tokens += len(call.completion_ids)
        self.prompt_tokens += len(call.prompt_ids)
        if parent is not None:
            before = np.concatenate((parent.prompt_ids, parent.completion_ids))
            self.reused_tokens += common_prefix(before, call.prompt_ids)

    def _add_role(self, call: Call, request: ChatRequest | None) -> None:
        if request is None:
            return
        role = self.roles.get(name := fingerprint(request))
        if role is None:
            system = " ".join(system_prompt(request).split())[:200]
            tools = tuple(str(tool.get("function", {}).get("name", "?")) for tool in request.tools)
            role = self.roles[name] = Role(system=system, tools=tools)
        role.calls += 1
        role.sampled_tokens += len(call.completion_ids) if call.replays is None else 0
        role.agents[call.agent] += 1
