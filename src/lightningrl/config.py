"""All settings of a run: TOML, then overrides such as `trainer.learning_rate=1e-4`. Unknown keys are errors.

The string below each setting is its documentation: in docs/settings.md, in error messages and in `--help`.
"""

import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lightningrl.errors import UserError, meant
from lightningrl.presets import PRESETS


def _device(given: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", given):
        raise ValueError(f"`{given}` is none of `auto`, `cpu`, `cuda` and `cuda:1`")
    return given


BackendName: TypeAlias = Literal["local", "tinker"]
DeviceName: TypeAlias = Annotated[str, AfterValidator(_device)]
"""`auto`, `cpu`, `cuda` (the first GPU), or `cuda:N`: GPU N of those that torch sees, from 0 on."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class AgentConfig(Section):
    entry: str | None = None
    """`module:function`, called with a task's input; it may be `async`. Give either this or `command`."""
    command: list[str] | None = None
    """A program that reads a task's input as JSON on stdin and prints its answer. Give either this or `entry`."""
    reward: str = ""
    """`module:function`, called with (task input, the agent's return value). Returns a number, or a dict with `final`
    and further rewards. Required in a recipe.
    """
    reward_range: tuple[float, float] | None = None
    """`[lowest, highest]` value of the final reward. An attempt with a reward outside this range fails."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables to set for the agent, in addition to those that it inherits (see docs/gateway.md)."""
    inherit_env: list[str] = Field(default_factory=list)
    """More environment variables that the agent inherits (`*`: any characters), except the keys of upstreams."""
    workers: int = Field(default=2, ge=0)
    """Number of processes on this machine that run agents; 0: only `lightningrl worker` runs them (docs/workers.md)."""
    concurrency: int = Field(default=64, ge=1)
    """Number of attempts that run at the same time on this machine, in all processes together."""
    labels: list[str] = Field(default_factory=list)
    """Run attempts only on workers with all of these labels (`lightningrl worker --label NAME`). The processes of this
    machine have none.
    """
    grade: Literal["worker", "server"] = "worker"
    """Where the reward function runs. `server`: where agents run, nobody is trusted with rewards."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of an attempt, in seconds."""
    max_attempts: int = Field(default=2, ge=1)
    """Number of attempts at a rollout before it counts as failed."""
    lease_s: float = Field(default=60.0, ge=1)
    """An attempt is lost, and tried again elsewhere, if its worker has not been heard for this time, in seconds."""
    relay_host: str = "127.0.0.1"
    """The worker machine's address for its agents; another one for agents in networks of their own (docs/deploy.md)."""
    may_reward: bool = False
    """Allow the agent to reward its own calls with `lightningrl.emit_reward`. It can never set the final reward."""
    max_calls: int = Field(default=0, ge=0)
    """Number of answers that an attempt may request; more are refused (403), and the attempt goes on. 0: no limit."""
    max_tokens: int = Field(default=0, ge=0)
    """Number of tokens that may be sampled for an attempt. The answer that reaches it is complete. 0: no limit."""
    max_bytes: int = Field(default=0, ge=0)
    """Size of all requests of an attempt together, in bytes. 0: no limit."""
    isolation: Literal["none", "bwrap"] = "none"
    """`bwrap`: run each attempt of `command` in a sandbox of bubblewrap, whose only network is the gateway
    (docs/security.md).
    """
    processes: int = Field(default=256, ge=1)
    """In a sandbox: number of processes and threads of an attempt."""
    memory_gib: float = Field(default=4.0, gt=0)
    """In a sandbox: memory of an attempt, in GiB, besides its files."""
    file_gib: float = Field(default=1.0, gt=0)
    """In a sandbox: size of a file, and of all files in each of `/tmp`, the home and shared memory, in GiB. They are in
    memory.
    """
    readable: list[str] = Field(default_factory=list)
    """In a sandbox: more paths that the agent can read, besides the system's programs and the recipe's folder."""

    @model_validator(mode="after")
    def _one_way_to_run(self) -> "AgentConfig":
        if (self.entry is None) == (self.command is None):
            raise ValueError("give either `entry` or `command`")
        if self.isolation != "none" and self.command is None:
            raise ValueError("`isolation` is for programs: give `command` in place of `entry`")
        return self

    @field_validator("reward_range")
    @classmethod
    def _from_low_to_high(cls, given: tuple[float, float] | None) -> tuple[float, float] | None:
        if given is not None and given[0] >= given[1]:
            raise ValueError(f"`[{given[0]:g}, {given[1]:g}]` is not from low to high")
        return given


class TasksConfig(Section):
    source: str = ""
    """`module:function`, called as f(split, seed=…, count=…), or the path of a JSONL file whose rows have `input` and
    `split`. Required in a recipe.
    """
    heldout: int = Field(default=200, ge=1)
    """Number of held-out tasks for the evaluation before and after training."""
    seed: int = 0
    """Seed of the held-out tasks. Training tasks depend on the seed of the run."""


class ModelConfig(Section):
    path: str
    """A Hugging Face folder (relative to the recipe) or hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in computations and files. What learns is kept and updated in float32 in any case. GPUs
    without bfloat16 (T4) need `float16`; its loss is scaled.
    """
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters on all projections of a frozen model (arXiv 2106.09685, scale 2); 0: train all weights."""


class RouteConfig(Section):
    """Which calls this route matches, and which policy answers them. The first route whose four patterns match is used;
    `*` and `?` are wildcards.
    """

    model: str = "*"
    """Pattern for the model name in the request."""
    caller: str = "*"
    """Pattern for the agent's name: `gen_ai.agent.name` in the baggage header, or the header `x-agent-name`."""
    system: str = "*"
    """Pattern for the system prompt, e.g. `*write a title*`."""
    fingerprint: str = "*"
    """Pattern for the fingerprint of system prompt and tools, which `lightningrl rollouts --report` shows."""
    agent: str = ""
    """Role of these calls; empty: the caller's name, or else the model name."""
    policy: str = "policy"
    """The policy that answers: `policy` or a name from `[policies.NAME]` is trained, `frozen` is not, and
    `upstreams.NAME` is another server.
    """
    weights: str = ""
    """With `frozen`: the model folder, e.g. a checkpoint of another run; empty: the model before training."""
    train: bool = True
    """Train on these calls. Calls that are not answered by a trained policy are never trained."""

    @model_validator(mode="after")
    def _known_by_its_role(self) -> "RouteConfig":
        if not self.train and not self.agent and (self.caller, self.system, self.fingerprint) != ("*", "*", "*"):
            raise ValueError("a route with `train = false` and a pattern besides `model` needs an `agent`")
        return self


class UpstreamConfig(Section):
    url: str
    """Base URL of a server that accepts the agent's API format, including `/v1` if it has one."""
    key_env: str = ""
    """Environment variable with the server's key; empty: it needs none."""
    model: str = ""
    """Model name to request from the server; empty: the agent's."""


class EngineConfig(Section):
    name: str = "embedded"
    """`embedded`, `vllm`, `relay`, or `pkg.module:attr`: an engine class or a script function (docs/gateway.md)."""
    urls: list[str] = Field(default_factory=list)
    """Base URLs of the servers for `vllm` or `relay`. `vllm` without any: the run starts and ends its own."""
    python: str = ""
    """Python of the environment in which vLLM is installed, for a vLLM that the run owns: a path (relative to the
    recipe) or a command; empty: the run's own.
    """
    flags: list[str] = Field(default_factory=list)
    """More flags for a vLLM that the run owns, e.g. `["--enforce-eager"]`. What the run sets itself is refused."""
    gpus: list[int] = Field(default_factory=list)
    """Numbers of the GPUs for vLLM, one server on each; empty: all but the trainer's, or the trainer's if there is no
    other.
    """
    sleep: Literal["auto", "on", "off"] = "auto"
    """Whether vLLM gives its GPU memory to the trainer for each update; `auto`: if they share a GPU."""
    cache_gib: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """GiB of keys and values in each vLLM that the run owns; `auto`: what the running requests can use and fits."""
    slots: int = Field(default=64, ge=1)
    """Number of requests that are decoded together in a batch."""
    max_length: int = Field(default=1024, ge=16)
    """Largest number of tokens of a request, prompt and completion together."""

    @property
    def owns_vllm(self) -> bool:
        """Whether the run starts and ends its own vLLM."""
        return self.name == "vllm" and not self.urls


class ServiceConfig(Section):
    """`[service]`: with `backend = "tinker"`, where models learn and answer (docs/hosted.md)."""

    url: str = ""
    """Base URL of a service that speaks the Tinker API; empty: that of Thinking Machines."""
    key_env: str = "TINKER_API_KEY"
    """Environment variable with the key of the service. Agents never get it."""
    model: str = ""
    """The service's name for the model; empty: `model.path`."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Longest time to wait for the answer to a request, in seconds."""
    prices: dict[Literal["prefill", "sample", "train"], float] = Field(default_factory=dict)
    """US dollars for a million tokens, e.g. `{prefill = 0.1, sample = 0.4, train = 0.4}`: then costs are counted."""


class GatewayConfig(Section):
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0: any free port."""
    public_url: str = ""
    """The address of this server for workers on other machines, e.g. that of a proxy; empty: `host` and `port`."""
    certificate: Path | None = None
    """File (PEM) with the server's certificate and those above it, relative to the recipe: workers then connect by
    `https`. The processes of this machine keep to plain HTTP on its loopback.
    """
    certificate_key: Path | None = None
    """File (PEM) with the key of the certificate, if that file does not hold it."""
    hosts: list[str] = Field(default_factory=list)
    """More domain names of this server; `*`: any characters. Requests to other names are refused, against DNS
    rebinding. Addresses, names without a dot and the name in `public_url` are always good.
    """
    history: Literal["exact", "template"] = "exact"
    """How earlier answers appear in the prompt: `exact` are the tokens that were sampled, `template` renders their text
    again, as a deployed model would see it.
    """
    strict: bool = False
    """Use constrained decoding for tools marked `strict`. Such calls are not trained, and some SDKs mark every tool.
    Required or named tools and `response_format` are always enforced.
    """
    embeddings: str = ""
    """`upstreams.NAME` that answers embedding requests; empty: they are refused."""


class StoreConfig(Section):
    url: str = ""
    """Database of the records, for several servers of one run: `postgresql://user@host/database`. Empty: `store.sqlite`
    in the run's folder.
    """


class AirConfig(Section):
    """`[[air]]`: a rule that rewards the call that caused an event (a span: a tool call, an LLM call, …)."""

    rule: str
    """A built-in rule, or `module:function` from `Span` to a number or None (see docs/air.md)."""
    value: float = 1.0
    """Reward when the rule holds. The return value of a function is multiplied by it."""
    tool: str = "*"
    """Apply the rule only to tools with this name; `*` and `?` are wildcards."""
    over: float = Field(default=0.0, ge=0)
    """Limit for the rules `slow` (seconds) and `costly` (tokens)."""
    cap: float = Field(default=math.inf, gt=0, allow_inf_nan=True)
    """Largest sum of absolute rewards that one attempt gets from this rule, against reward hacking."""


class AlgorithmConfig(Section):
    credit: str = "uniform"
    """Distributes the reward over a rollout's calls: a built-in name (docs/algorithms.md) or `module:function`."""
    credit_options: dict[str, float | str] = Field(default_factory=dict)
    """Parameters of the credit, by name, e.g. `{discount = 0.9}`."""
    advantage: str = "grpo"
    """How the values of calls are compared within a group: a built-in name or `module:function`."""
    group_by: Literal["task", "role"] = "task"
    """Compare all calls of a task's rollouts, or only calls of the same role."""
    aggregation: Literal["rollout-mean", "call-mean", "token-mean"] = "rollout-mean"
    """Give every rollout, every call or every token the same weight in the loss."""
    reward: str = "final"
    """Name of the attempt's reward to train on. A reward function may give each role its own."""
    truncation_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from the value of a call that reached its token limit."""
    shaping: Literal["additive", "potential"] = "additive"
    """Add `[[air]]` rewards as they are, or as differences of a potential, which does not change the best policy."""
    dynamic_sampling: int = Field(default=0, ge=0)
    """How often a step replaces groups whose rewards are all equal by new tasks (DAPO, arXiv 2503.14476)."""
    audit: str = ""
    """A reward that is not trained on. If it falls while the trained one rises, the run warns of reward hacking."""


class LossConfig(Section):
    name: Literal["ppo_clip", "cispo", "pg"] = "ppo_clip"
    """`pg`: no clipping. `ppo_clip`: clipped ratio (arXiv 1707.06347). `cispo`: clipped weight (arXiv 2506.13585)."""
    ratio: Literal["token", "call", "rollout"] = "token"
    """The ratio π / π_old: per token, or the geometric mean over a call or rollout (GSPO, arXiv 2507.18071)."""
    clip_low: float = Field(default=0.2, ge=0)
    """Clip the ratio below 1 - this."""
    clip_high: float = Field(default=0.28, ge=0)
    """Clip the ratio above 1 + this. A value above `clip_low` encourages exploration (DAPO, arXiv 2503.14476)."""
    clip_dual: float = Field(default=0.0, ge=0)
    """For negative advantages, limit the loss to this many times their size (arXiv 1912.09729 uses 3); 0: no limit."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the initial weights."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence (joschu.net/blog/kl-approx.html)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    value_coef: float = Field(default=0.5, ge=0)
    """Weight of the critic's squared error, if the credit needs a critic."""
    importance: Literal["none", "token", "call", "rollout", "token-mask", "call-mask", "rollout-mask"] = "none"
    """Importance sampling correction for tokens of older weights: truncate the ratio of each token, call or rollout, or
    mask those above the cap.
    """
    importance_cap: float = Field(default=2.0, ge=1)
    """Cap of the importance ratio."""
    proximal: bool = False
    """Decoupled PPO (arXiv 2110.00641): clip around the weights before the batch's update, not the sampling weights."""

    @model_validator(mode="after")
    def _sound(self) -> "LossConfig":
        if 0 < self.clip_dual <= 1:
            raise ValueError(f"`clip_dual` is `{self.clip_dual:g}`, but must be above 1, or 0 for none; 3 is usual")
        if self.name == "pg" and (self.ratio != "token" or self.proximal):
            raise ValueError("`pg` does not clip: remove `ratio` and `proximal`")
        if self.importance != "none" and self.name != "pg" and not self.proximal:
            raise ValueError(f"`importance` with `{self.name}` needs `proximal = true`")
        return self


class TrainerConfig(Section):
    name: str = "local"
    """Name of the trainer: `local`, or `module:attr`."""
    device: DeviceName = "auto"
    """Where weights, training and the embedded engine live. `cuda`: on the first GPU that torch sees; `cuda:1`: on the
    second, and so on; `auto`: on the first, or on the CPU if no GPU works.
    """
    learning_rate: float = Field(default=5e-4, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["linear", "constant"] = "linear"
    """`linear` decays to zero over the run."""
    minibatches: int = Field(default=4, ge=1)
    """Number of optimizer steps per batch."""
    max_tokens: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Most unique tokens in one forward and backward pass. It limits memory and does not change the result. `auto`: as
    many as fit in the device's free memory (on a CPU: in half of what weights, gradients and moments leave, and at
    least 4096 with checkpointing), at most 65536.
    """
    checkpointing: Literal["auto", "on", "off"] = "auto"
    """Whether the backward pass computes each layer again, which takes less memory and a third more time; `auto`: in
    passes that would not fit otherwise.
    """
    threads: int = Field(default=2, ge=1)
    """Number of CPU threads for training."""
    measured: float = Field(default=0.1, ge=0, le=1)
    """Share of a step's sampled tokens whose entropies before the update and log-probabilities after it are recorded,
    in `taught/`: at most this share, in whole groups, and at least one group. 0: none.
    """


class LoopConfig(Section):
    steps: int = Field(default=60, ge=0)
    """Number of batches to collect and train on."""
    tasks_per_step: int = Field(default=24, ge=1)
    """Number of tasks in a batch."""
    group_size: int = Field(default=8, ge=1)
    """Number of rollouts of each task."""
    fork_share: float = Field(default=0.0, ge=0, le=0.9)
    """Share of these rollouts that are branches: each repeats another one up to some call, and goes its own way from
    there (docs/algorithms/fork.md). It needs `algorithm.credit = "fork"`.
    """
    forks: int = Field(default=2, ge=1)
    """Number of branches at each place where a rollout is branched."""
    fork_at: Literal["uniform", "variance"] = "uniform"
    """Where to branch: at any call, or more often where returns differed, as far as that is known."""
    max_off_policy_steps: int = Field(default=4, ge=0)
    """Do not train on calls whose weights are older than this many steps."""
    eval_every: int = Field(default=10, ge=0)
    """Number of steps between held-out evaluations; 0: evaluate only before and after training."""
    eval_tasks: int = Field(default=64, ge=1)
    """Number of held-out tasks in each of these evaluations."""

    @property
    def places(self) -> int:
        """How often the rollouts of a group are branched."""
        return round(self.fork_share * self.group_size) // self.forks

    @property
    def trunks(self) -> int:
        """Number of rollouts of each task that are no branches."""
        return self.group_size - self.places * self.forks

    @model_validator(mode="after")
    def _room_for_branches(self) -> "LoopConfig":
        if self.fork_share and not self.places:
            raise ValueError(f"`fork_share` is less than the `{self.forks}` branches of one place: raise `group_size`")
        if self.places and self.trunks < 2:
            raise ValueError("`fork_share` leaves fewer than two rollouts to branch from: raise `group_size`")
        return self


class ReplayConfig(Section):
    tools: Literal["rerun", "safe", "never"] = "rerun"
    """Tools in the part that a branch repeats. `rerun`: they run again. `safe`: recorded results are played back where
    possible (docs/replayable.md). `never`: the same, and where it is not possible, the branch is void.
    """


Size: TypeAlias = Literal["hidden", "layers", "heads", "kv_heads", "head_size", "intermediate", "max_length"]


class WarmstartConfig(Section):
    """`[warmstart]`: how `lightningrl warmstart` makes the model that `model.path` names (see docs/tutorial.md)."""

    teacher: str = ""
    """Answers in the model's place on training tasks; its rollouts become demonstrations. `module:function` (a script,
    see docs/gateway.md) or `upstreams.NAME`.
    """
    demonstrations: str = ""
    """Demonstrations instead of a teacher: a JSONL file of conversations, the folder of a run, or `module:function`,
    called as f(seed=…, count=…).
    """
    reward: float = 1.0
    """Smallest final reward of a rollout that is used as a demonstration."""
    count: int = Field(default=2000, ge=1)
    """Number of rollouts of the teacher, or of demonstrations to request from a function."""
    base: str = ""
    """A model folder (relative to the recipe) or hub id to start from; empty: create a tiny model and its tokenizer."""
    tokenizer: str = ""
    """`module:function` from the demonstrations to the tiny model's tokenizer; empty: a tokenizer with every word and
    phrase of the demonstrations.
    """
    shape: dict[Size, int] = Field(default_factory=dict[Size, int])
    """Sizes of the tiny model, such as `{hidden = 64}`; `models/tiny.py` has the defaults."""
    steps: int = Field(default=600, ge=1)
    """Number of batches of demonstrations to train on. With `steer` it can be fewer, or up to three times as many."""
    batch: int = Field(default=32, ge=1)
    """Number of demonstrations in a batch."""
    learning_rate: float = Field(default=0.0, ge=0)
    """Peak learning rate of AdamW; 0: 3e-3 for a tiny model, 1e-3 with a `base`."""
    reading: int = Field(default=0, ge=0)
    """Number of earlier steps in which a tiny model also predicts its input, such as tool results. It then learns
    sooner to copy from the input.
    """
    reading_prompts: bool = False
    """Predict the first prompt in these steps, too."""
    steer: bool = True
    """Stop when the agent succeeds on 35 to 50 % of the training tasks it tries; false: take exactly `steps`."""

    @model_validator(mode="after")
    def _one_source(self) -> "WarmstartConfig":
        if self.teacher and self.demonstrations:
            raise ValueError("give either `teacher` or `demonstrations`")
        return self


class LearnerConfig(Section):
    """All settings of one policy that is trained."""

    model: ModelConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    loss: LossConfig = LossConfig()
    trainer: TrainerConfig = TrainerConfig()


class Config(Section):
    name: str
    """Name of the run's folder: up to 100 letters, digits, spaces, `_`, `.`, `-`; first a letter, digit or `_`."""
    root: Path = Path(".")
    """Folder for `entry`, `reward`, `source` and relative paths; by default the recipe's."""
    seed: int = 0
    """Seed of all randomness in the run."""
    preset: str = ""
    """An algorithm by name, e.g. `grpo`. It provides the values that `[algorithm]` and `[loss]` leave out."""
    agent: AgentConfig
    tasks: TasksConfig = TasksConfig()
    model: ModelConfig
    routes: list[RouteConfig] = Field(default_factory=lambda: [RouteConfig()])
    """Which policy answers which calls, and which calls are trained; by default `policy` answers and trains all."""
    upstreams: dict[str, UpstreamConfig] = Field(default_factory=dict)
    """Other servers, which are not trained: `[upstreams.NAME]`."""
    backend: BackendName = "local"
    """Where models learn and answer. `tinker`: at a service that speaks the Tinker API (docs/hosted.md)."""
    service: ServiceConfig = ServiceConfig()
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    store: StoreConfig = StoreConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    air: list[AirConfig] = Field(default_factory=list[AirConfig])
    """Automatic Intermediate Rewarding: rules that reward calls for events that they caused. Every credit except
    `uniform` uses these rewards.
    """
    loss: LossConfig = LossConfig()
    trainer: TrainerConfig = TrainerConfig()
    replay: ReplayConfig = ReplayConfig()
    policies: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """`[policies.NAME]`: policies that are trained, each with its own `preset`, `model`, `algorithm`, `loss` and
    `trainer`. What a policy leaves out is taken from the top level. Without any there is one, named `policy`.
    """
    loop: LoopConfig = LoopConfig()
    loggers: list[str] = Field(default_factory=list)
    """Services that show the run: `wandb`, `trackio`, `mlflow`, `tensorboard`, `otlp`, or `pkg.module:attr` for your
    own (docs/loggers.md).
    """
    warmstart: WarmstartConfig = WarmstartConfig()

    @model_validator(mode="before")
    @classmethod
    def _begin_with_preset(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return _merged(_preset(tree), _of_backend(tree), tree)

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, given: str) -> str:
        if not re.fullmatch(r"\w[\w .-]{0,99}", given):
            raise ValueError(f"`{given}` cannot name a folder")
        return given

    @model_validator(mode="after")
    def _known_policies(self) -> "Config":
        learners = self.learners()
        for name in learners:
            if name == "frozen" or not re.fullmatch(r"[\w-]+", name):
                raise UserError(
                    f"a policy cannot be named `{name}`",
                    hint="use letters, digits, `_` and `-`; `frozen` is reserved",
                )
        upstreams = [f"upstreams.{name}" for name in self.upstreams]
        known = [*learners, "frozen", *upstreams]
        for index, name in enumerate(route.policy for route in self.routes):
            if name not in known:
                raise UserError(f"no policy `{name}` for `routes.{index}.policy`", hint=meant(name, known))
        if self.gateway.embeddings and self.gateway.embeddings not in upstreams:
            raise UserError(
                f"there is no `[{self.gateway.embeddings}]` for `gateway.embeddings`",
                hint=meant(self.gateway.embeddings, upstreams),
            )
        return self

    @model_validator(mode="after")
    def _branches_have_their_credit(self) -> "Config":
        for name, learner in self.learners().items():
            credit = learner.algorithm.credit
            if self.loop.places and credit != "fork" and ":" not in credit:
                hint = 'set `algorithm.credit = "fork"`; other credits take branches for independent rollouts'
                raise UserError(f"`loop.fork_share` is set, but `{name}` has the credit `{credit}`", hint=hint)
            if credit == "fork" and not self.loop.places:
                raise UserError("credit `fork` needs branches", hint="set `loop.fork_share`, e.g. to 0.5")
        return self

    @model_validator(mode="after")
    def _keys_stay_with_the_gateway(self) -> "Config":
        for name in sorted({*self.agent.inherit_env} & {*self.secrets()}):
            hint = "the gateway adds this key to relayed requests; for the agent's own use, set another variable"
            raise UserError(f"`agent.inherit_env` names `{name}`, which holds the key of an upstream", hint=hint)
        return self

    @model_validator(mode="after")
    def _tools_can_be_withheld(self) -> "Config":
        if self.replay.tools == "never" and self.agent.command is not None:
            hint = 'the tools of a program run out of reach: give `agent.entry`, or say `replay.tools = "safe"`'
            raise UserError('`replay.tools = "never"` needs an agent that is a Python function', hint=hint)
        return self

    @model_validator(mode="after")
    def _of_one_backend(self) -> "Config":
        names = [("engine.name", self.engine.name)]
        names += [("trainer.name", learner.trainer.name) for learner in self.learners().values()]
        for key, name in names:
            if (name == "tinker") != (self.backend == "tinker"):
                raise UserError(f"`{key}` is `{name}`, but `backend` is `{self.backend}`", hint=f"leave `{key}` out")
        return self

    def secrets(self) -> list[str]:
        """Environment variables with the keys of upstreams and of the service. Agents never get them."""
        return [self.service.key_env, *(upstream.key_env for upstream in self.upstreams.values() if upstream.key_env)]

    @property
    def vllm_python(self) -> str:
        """`engine.python` as it can be run from any folder; empty: this Python."""
        name = self.engine.python
        if "/" in name:
            return str((self.root / Path(name).expanduser()).absolute())
        return shutil.which(name) or name

    def learners(self) -> dict[str, LearnerConfig]:
        """The policies that are trained, each with all of its settings."""
        shared = self.model_dump(include=set(LearnerConfig.model_fields))
        policies = self.policies or {"policy": {}}
        return {name: _learner(name, own, shared=shared) for name, own in policies.items()}


def _merged(*trees: Mapping[str, Any]) -> dict[str, Any]:
    """Merge trees section by section; later values win."""
    merged: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = _merged(merged[key], value) if both else value
    return merged


def _preset(tree: Mapping[str, Any], *, of: str = "") -> Mapping[str, Any]:
    name = tree.get("preset") or ""
    if name and name not in list(PRESETS):
        raise UserError(f"unknown preset `{name}` (`{of}preset`)", hint=meant(str(name), PRESETS))
    return PRESETS[name] if name else {}


def _of_backend(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The engine and the trainer that belong to `backend`."""
    name = tree.get("backend")
    return {"engine": {"name": name}, "trainer": {"name": name}} if name == "tinker" else {}


def _learner(name: str, own: Mapping[str, Any], *, shared: Mapping[str, Any]) -> LearnerConfig:
    try:
        return LearnerConfig.model_validate(
            _merged(shared, _preset(own, of=f"policies.{name}."), _without(own, "preset"))
        )
    except ValidationError as error:
        raise _inside(error, "policies", name) from error


def _inside(error: ValidationError, *loc: str) -> ValidationError:
    """The same errors, with the path from the top of the tree."""
    lines: list[Any] = [{**line, "loc": (*loc, *line["loc"])} for line in error.errors(include_url=False)]
    return ValidationError.from_exception_data(error.title, lines)


def _without(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name != key}
