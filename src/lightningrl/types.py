"""The records in the store, and what learning derives from them.

Stored: `Rollout` with its `Task`, `Attempt`, `Call` with its `Sampling`, `Span`, `Reward`, `Weights`. Only the status
of a rollout and of an attempt changes; everything else is written once.
Derived, never stored: `Transition`, `Trajectory`, spans that follow from calls, and AIR rewards.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]

RolloutStatus: TypeAlias = Literal["queued", "running", "succeeded", "failed"]
AttemptStatus: TypeAlias = Literal["running", "succeeded", "failed", "timeout", "lost"]
Capture: TypeAlias = Literal["bridged", "partly", "rendered", "forked", "upstream", "incomplete"]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "cancelled", "error"]
SpanKind: TypeAlias = Literal["llm", "tool", "retrieval", "agent", "guardrail", "other"]
SpanStatus: TypeAlias = Literal["ok", "error", "unset"]
RewardSource: TypeAlias = Literal["agent", "grader", "air", "system"]

FINAL = "final"
"""Name of the reward for a whole attempt. Other rewards of an attempt have other names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a data set: the input of one agent run."""

    id: str
    """Unique within its split."""
    input: Mapping[str, Any]
    """JSON; passed to the agent unchanged."""
    split: str
    """`train`, `heldout`, or a name of the recipe's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an engine samples tokens. The defaults leave the policy's distribution unchanged."""

    temperature: float = 1.0
    """0: greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    max_tokens: int = 1024
    """Largest number of sampled tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion. The answer is the text before the string."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion. They are recorded and trained."""
    seed: int | None = None
    """None: the engine chooses one at random."""
    grammar: str | None = None
    """Constrained decoding: a Lark grammar in the syntax of llguidance. Log-probabilities are then those of the masked
    distribution. None: unconstrained.
    """
    top_logprobs: int = 0
    """Number of most likely tokens to report with each sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A rollout that repeats a recorded attempt up to one of its calls, and goes its own way from there.

    The gateway answers from the record all requests that are no consequence of the branching call. So the agent, which
    runs again from its start, gets to the same place.
    """

    attempt_id: str
    """The recorded attempt, called the trunk."""
    call_id: str | None
    """The branching call: the first one of the trunk that is answered afresh. None: all are played back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One requested execution of an agent on a task. Rollouts of one task in one step share a `group_id`."""

    id: str
    """Chosen by the caller. Enqueueing an id again repeats it only if it failed, so a restart is safe."""
    group_id: str
    task: Task
    status: RolloutStatus = "queued"
    max_attempts: int = 1
    timeout_s: float = 300.0
    """Time limit of one attempt, in seconds."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling fields that override the agent's, e.g. `{"temperature": 0.0}` for greedy evaluation."""
    accepted_attempt_id: str | None = None
    """The attempt that is trained on; None until the rollout has succeeded."""
    labels: tuple[str, ...] = ()
    """Only workers that have all of these labels run this rollout."""
    branch: Branch | None = None
    """The recorded attempt that this rollout repeats at first; None: it repeats none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a rollout. If it fails, the next one begins, up to `Rollout.max_attempts`."""

    id: str
    rollout_id: str
    number: int
    """Counts from 1."""
    token: str
    """Secret: the API key of the agent. It authenticates a call and attributes it to this attempt. The store keeps only
    `token_hash`, so an attempt read from the store has "" here.
    """
    token_hash: str = ""
    """`hash_token(token)`."""
    status: AttemptStatus = "running"
    worker: str = ""
    gateway: str = ""
    """The server that answers its calls; "" if there is only one."""
    lease_until: float = 0.0
    """Unix seconds. A running attempt is lost when its lease ends without a heartbeat."""
    error: str | None = None
    """One line of message, then the traceback; None while running and after success."""
    output: Any = None
    """JSON: the value that the agent returned, or the text that it printed; None while running."""
    started_at: float = 0.0
    ended_at: float | None = None
    """Unix seconds; None while running."""


def hash_token(token: str) -> str:
    """SHA-256 as hex digits. A token has 144 random bits, so a hash without salt cannot be reversed by search."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One LLM request of an attempt, with the exact tokens that the engine read and sampled.

    Two calls of one agent. The second one has the first answer `[7 8 9]` in its history:

        call   parent  prompt_ids                    completion_ids   logprobs
        c1     None    [1 2 3]                       [7 8 9]          [-.1 -.2 -.1]
        c2     c1      [1 2 3 7 8 9 4 5]             [6 9]            [-.3 -.1]
                        └─ from c1┘ └ rendered from the new message
    """

    id: str
    """Also the id of the response that the agent's SDK receives."""
    attempt_id: str
    index: int
    """Order of arrival within the attempt, from 0."""
    parent_call_id: str | None
    """The call whose conversation this call continues; None for a new conversation."""
    agent: str
    """The role that made the call; "" if unknown."""
    policy: str
    policy_version: int
    dialect: str
    """Wire format of the request, e.g. `openai.chat`."""
    request: Mapping[str, Any]
    """JSON body of the request."""
    response: Mapping[str, Any]
    """JSON body of the response; a streamed response as if it had not been streamed."""
    prompt_ids: Ints
    """[P] tokens that the engine read."""
    completion_ids: Ints
    """[C] tokens that the engine sampled, end token included."""
    logprobs: Floats
    """[C] log-probability (nats) of each sampled token under the distribution that it was sampled from, after
    temperature, top_p, top_k and grammar. `data/transitions.py` decides which of these can be trained.
    """
    sampling: Sampling
    finish_reason: FinishReason
    capture: Capture
    """How `prompt_ids` were made. `rendered`: a new conversation. `bridged`: earlier ids, then newly rendered ones.
    `partly`: the same, but some earlier answers are rendered from text. `forked`: all is rendered from text, since the
    history was changed. `upstream`: reported by another server. `incomplete`: the answer broke; it is never trained.
    """
    capture_reason: str | None = None
    """Why a call is `forked`, `partly` bridged or `incomplete`; None for the others."""
    started_at: float = 0.0
    ended_at: float = 0.0
    """Unix seconds."""
    request_id: str = ""
    """Given to the HTTP request by the relay of a remote worker, which may send it again; "" without a relay."""
    replays: str | None = None
    """In a branch: the call of the trunk whose answer was played back. It is not trained again. None: the engine
    answered. `response` is the recorded one, with the id that it had.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An event of an attempt: a tool call, a retrieval, a guardrail, an LLM call.

    Spans of the agent's telemetry (OTLP) are stored. Others are derived from the calls when they are read, since the
    request after a tool call contains the tool's result. AIR rules treat both alike.
    """

    id: str
    """16 hex digits; a derived span has an id of another form."""
    attempt_id: str
    call_id: str | None
    """The call that caused the event, e.g. the one whose answer requested the tool; None if unknown."""
    kind: SpanKind
    name: str
    """Name of the tool, the agent or the model."""
    status: SpanStatus = "unset"
    """`error` only if the telemetry or the tool's result says so."""
    error: str | None = None
    """Error message; None unless `status` is `error`."""
    input: str | None = None
    """Input as text, e.g. the arguments of a tool exactly as the model wrote them; None if unknown."""
    output: str | None = None
    """Output as text; None if unknown."""
    started_at: float = 0.0
    ended_at: float = 0.0
    """Unix seconds. A derived tool span lasts from the answer with the tool call to the request with its result."""
    trace_id: str = ""
    parent_id: str | None = None
    """The enclosing span of the same trace; None for a root."""
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """All other attributes of the telemetry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A finite number with a name, a source and a target."""

    attempt_id: str
    value: float
    name: str = FINAL
    source: RewardSource = "grader"
    call_id: str | None = None
    """None: the reward is for the whole attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One published version of a policy."""

    policy: str
    version: int
    """Counts from 0, the weights before training."""
    uri: str
    """A Hugging Face folder: relative to the run's folder in the store, absolute when passed to an engine."""
    kind: Literal["full", "lora"] = "full"


def accepted_attempts(rollouts: Iterable[Rollout]) -> list[str]:
    """Ids of the attempts that teach: one for each rollout that succeeded."""
    return [rollout.accepted_attempt_id for rollout in rollouts if rollout.accepted_attempt_id]


def by_group(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    """Group id → its rollouts, in the order given."""
    found: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.group_id, []).append(rollout)
    return found


OfAttempt = TypeVar("OfAttempt", Call, Span, Reward)


def by_attempt(records: Iterable[OfAttempt]) -> dict[str, list[OfAttempt]]:
    """Attempt id → its records, in the order given."""
    found: dict[str, list[OfAttempt]] = {}
    for record in records:
        found.setdefault(record.attempt_id, []).append(record)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One call as (input, output, reward), the data interface of Agent Lightning (arXiv 2508.03680, section 3.1).

    The two calls of `Call`'s example become `[1 2 3] → [7 8 9]` and `[1 2 3 7 8 9 4 5] → [6 9]`.
    """

    call_id: str
    parent_call_id: str | None
    agent: str
    policy_version: int
    prompt_ids: Ints
    """[P]"""
    completion_ids: Ints
    """[C]"""
    logprobs: Floats
    """[C] nats, under the policy that sampled them."""
    reward: float | None
    """Sum of the rewards whose target is this call; None if there are none."""
    temperature: float = 1.0
    """Softmax temperature of `logprobs`."""
    truncated: bool = False
    """Whether the call ended at its token limit."""
    started_at: float = 0.0
    ended_at: float = 0.0
    """Unix seconds. `causal.py` reads from them which call can be a consequence of which."""
    value: float | None = None
    """The critic's value at the last token of the prompt; None without a critic."""
    replays: str | None = None
    """In a branch: the call of the trunk whose answer was played back; None: it was sampled."""
    left_out: str | None = None
    """Why this call is not trained; None: it is trained. A call that is left out stays in its trajectory, and
    its rewards count in baselines.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The transitions of one accepted attempt, in order of arrival, and the reward of the attempt."""

    rollout_id: str
    group_id: str
    task_id: str
    transitions: tuple[Transition, ...]
    reward: float
    """The final reward of the attempt, or the reward that `algorithm.reward` names."""
    branch: Branch | None = None
    """Where it parts from another trajectory of its group; None: nowhere."""
