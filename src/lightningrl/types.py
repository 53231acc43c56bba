"""The nouns of LightningRL: what an agent leaves behind, and what learning reads.

Recorded, append-only: `Task`, `Rollout`, `Attempt`, `Call`, `Span`, `Reward`, `Weights`. They live in the store and are
never edited. Derived, never stored: `Transition` and `Trajectory`, made from the records by `lightningrl.data`.
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
"""The name of the reward that says how good a whole attempt was. Step rewards have other names and never overwrite it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a data set: what the agent is run on."""

    id: str
    """Unique within its split."""
    input: Mapping[str, Any]
    """JSON; handed to the agent as it is."""
    split: str
    """`train`, `heldout`, or a name the recipe uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an engine draws the next token. The defaults are the policy itself: no shaping at all."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    max_tokens: int = 1024
    """At most this many sampled tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; the text before the string is the answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion; they are sampled, recorded and trained."""
    seed: int | None = None
    """None: the engine draws one."""
    grammar: str | None = None
    """Only completions of this language are drawn: a Lark grammar as llguidance reads it. Logprobs are then those of
    the masked distribution.
    """
    top_logprobs: int = 0
    """How many of the likeliest tokens are reported beside each sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One requested execution of an agent on a task. Rollouts of one task in one step share a `group_id`."""

    id: str
    """Chosen by whoever enqueues it; enqueueing the same id again repeats nothing that succeeded, which makes a restart
    safe.
    """
    group_id: str
    task: Task
    status: RolloutStatus = "queued"
    max_attempts: int = 1
    timeout_s: float = 300.0
    """Wall-clock seconds for one attempt."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling fields that override what the agent asks for, e.g. {"temperature": 0.0} when evaluating greedily."""
    accepted_attempt_id: str | None = None
    """The one attempt that teaches; None until the rollout has succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a rollout. A crash or a lost worker leads to the next one."""

    id: str
    rollout_id: str
    number: int
    """Counts from 1."""
    token: str
    """Secret. It is the API key the agent is given: it authenticates and attributes its calls at once. Known to the
    process that claimed the attempt, and where it was just presented; "" where the attempt was read from the store,
    which keeps `token_hash` alone.
    """
    token_hash: str = ""
    """See `hash_token`."""
    status: AttemptStatus = "running"
    worker: str = ""
    lease_until: float = 0.0
    """Unix seconds; a running attempt whose lease has passed is lost."""
    error: str | None = None
    """One line of what went wrong, then the traceback; None unless it failed."""
    output: Any = None
    """JSON: what the agent returned (or printed). None while running."""
    started_at: float = 0.0
    ended_at: float | None = None
    """Unix seconds; None while running."""


def hash_token(token: str) -> str:
    """SHA-256, as hex digits. A token has 144 random bits, so a plain hash cannot be searched for it."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One LLM request of an attempt, token-exact: what the engine read, what it sampled, how likely that was.

    A writer that is called twice, the second time with its own first answer in the history:

        call   parent  prompt_ids                    completion_ids   logprobs
        c1     None    [1 2 3]                       [7 8 9]          [-.1 -.2 -.1]
        c2     c1      [1 2 3 7 8 9 4 5]             [6 9]            [-.3 -.1]
                       └─ exact ids of c1 ┘└ new
    """

    id: str
    """Also the response id that the agent's SDK sees."""
    attempt_id: str
    index: int
    """Order of arrival within the attempt, from 0."""
    parent_call_id: str | None
    """The call whose conversation this one continues; None for a fresh root."""
    agent: str
    """The role that made the call, as far as it is known; "" if not."""
    policy: str
    policy_version: int
    dialect: str
    """The wire format the agent speaks, e.g. `openai.chat`."""
    request: Mapping[str, Any]
    """The body the agent sent, as JSON."""
    response: Mapping[str, Any]
    """The body it was answered with (for a stream: the same answer in one piece)."""
    prompt_ids: Ints
    """[P] what the engine read."""
    completion_ids: Ints
    """[C] what the engine sampled, its end token included."""
    logprobs: Floats
    """[C] of each sampled token, under the distribution it was drawn from (nats)."""
    sampling: Sampling
    finish_reason: FinishReason
    capture: Capture
    """How `prompt_ids` came about. `incomplete` is never trained."""
    capture_reason: str | None = None
    """Why a prompt was forked or bridged only partly, or a call is incomplete; None when there is nothing to explain.
    """
    started_at: float = 0.0
    ended_at: float = 0.0
    """Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that happened in an attempt: a tool ran, documents were looked for, a guard-rail fired, a call was
    answered.

    Recorded where the agent's telemetry tells it (OTLP); derived from the calls where it does not: the request that
    follows a tool call carries the tool's result. Both look the same to the rules of AIR.
    """

    id: str
    """16 hex digits, or of our own making where it is derived."""
    attempt_id: str
    call_id: str | None
    """The call that caused it: for a tool, the one whose answer asked for it. None if that is not known."""
    kind: SpanKind
    name: str
    """Of the tool, the agent, the model."""
    status: SpanStatus = "unset"
    """`error` only where it is said so."""
    error: str | None = None
    """What was raised or reported; None unless `status` is `error`."""
    input: str | None = None
    """What went in, as text: a tool's arguments exactly as the model wrote them."""
    output: str | None = None
    """What came out, as text."""
    started_at: float = 0.0
    ended_at: float = 0.0
    """Unix seconds. Of a derived tool span: from the answer that asked for it to the request that brought its result.
    """
    trace_id: str = ""
    parent_id: str | None = None
    """The span around it, in the same trace."""
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Everything else it said of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A finite number with a name, a source and a target."""

    attempt_id: str
    value: float
    name: str = FINAL
    source: RewardSource = "grader"
    call_id: str | None = None
    """None: the reward is for the attempt as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One published version of a policy."""

    policy: str
    version: int
    """Counts from 0, the weights that training started from."""
    uri: str
    """A Hugging Face folder; relative to the run's folder in the store, absolute where an engine is to load it."""
    kind: Literal["full", "lora"] = "full"


OfAttempt = TypeVar("OfAttempt", Call, Span, Reward)


def by_attempt(records: Iterable[OfAttempt]) -> dict[str, list[OfAttempt]]:
    """Attempt id → its records, in the order given."""
    found: dict[str, list[OfAttempt]] = {}
    for record in records:
        found.setdefault(record.attempt_id, []).append(record)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The paper's (input, output, reward) of one call."""

    call_id: str
    parent_call_id: str | None
    agent: str
    policy_version: int
    prompt_ids: Ints
    """[P]"""
    completion_ids: Ints
    """[C]"""
    logprobs: Floats
    """[C] under the policy that sampled them."""
    reward: float | None
    """Sum of the rewards given to this very call; None if there are none."""
    temperature: float = 1.0
    """The softmax temperature that `logprobs` refer to."""
    truncated: bool = False
    """The call ran into its token limit."""
    started_at: float = 0.0
    ended_at: float = 0.0
    """Unix seconds: a call that began after another had ended may be its consequence."""
    value: float | None = None
    """What the critic expects at the last token of the prompt; None without a critic."""
    left_out: str | None = None
    """Why this call is not trained; None: it is. It is still a member of its trajectory, so that baselines do not
    depend on selection.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The transitions of one accepted attempt, in causal order, and what the attempt as a whole was worth."""

    rollout_id: str
    group_id: str
    task_id: str
    transitions: tuple[Transition, ...]
    reward: float
    """What the attempt as a whole was worth: its final reward, or the one that its policy learns from instead."""
