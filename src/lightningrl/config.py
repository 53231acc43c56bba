"""One typed tree of settings: a recipe's TOML, then dotted overrides (`trainer.learning_rate=1e-4`). An unknown key is
an error.

Every setting says what it means in the string below it; `lightningrl train --dry-run` prints the resolved tree.
"""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lightningrl.errors import UserError, meant
from lightningrl.presets import PRESETS


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class AgentConfig(Section):
    entry: str | None = None
    """`module:function`, called with a task's input; it may be `async`. Either this or `command`."""
    command: list[str] | None = None
    """A program that reads a task's input as JSON on stdin and prints its answer. Either this or `entry`."""
    reward: str
    """`module:function`, called with (task input, what the agent returned); returns a number, or a dict of `final` and
    others.
    """
    reward_range: tuple[float, float] | None = None
    """`[lowest, highest]` that the final reward can be. One outside is the reward function's mistake: its attempt has
    failed.
    """
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables that the agent gets beside those that it inherits (see docs/gateway.md)."""
    inherit_env: list[str] = Field(default_factory=list)
    """Names of environment variables that the agent inherits beside the usual ones; `*` stands for any characters.
    Never an upstream's key.
    """
    workers: int = Field(default=2, ge=1)
    """Processes that run agents."""
    concurrency: int = Field(default=64, ge=1)
    """Attempts that run at the same time, over all workers."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which an attempt is given up."""
    max_attempts: int = Field(default=2, ge=1)
    """Tries at one rollout before it has failed."""
    may_reward: bool = False
    """Whether the agent may reward its own calls (`lightningrl.emit_reward`). The final reward is never its to give."""

    @model_validator(mode="after")
    def _one_way_to_run(self) -> "AgentConfig":
        if (self.entry is None) == (self.command is None):
            raise ValueError("give either `entry` or `command`")
        return self

    @field_validator("reward_range")
    @classmethod
    def _from_low_to_high(cls, given: tuple[float, float] | None) -> tuple[float, float] | None:
        if given is not None and given[0] >= given[1]:
            raise ValueError(f"`[{given[0]:g}, {given[1]:g}]` does not go from low to high")
        return given


class TasksConfig(Section):
    source: str
    """`module:function`, called as f(split, seed=…, count=…), or the path of a JSONL file whose rows have `input` and
    `split`.
    """
    heldout: int = Field(default=200, ge=1)
    """Held-out tasks for the figures before and after."""
    seed: int = 0
    """Seed of the held-out tasks. Training tasks follow the run's own seed."""


class ModelConfig(Section):
    path: str
    """A Hugging Face folder (relative to the recipe) or hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in products and in files. What learns is held in float32 beside them, so that small updates
    are not rounded away.
    """
    lora_rank: int = Field(default=0, ge=0)
    """Train an adapter of this rank on every projection (arXiv 2106.09685, scaled by 2), and leave the weights as they
    are; 0 trains all weights.
    """


class RouteConfig(Section):
    """Which calls are meant, then who answers them. The first route whose four patterns fit is taken; `*` and `?` are
    wildcards.
    """

    model: str = "*"
    """The model name that the agent asks for."""
    caller: str = "*"
    """The agent's name as telemetry gives it: `gen_ai.agent.name` in the baggage header, or the header `x-agent-name`.
    """
    system: str = "*"
    """The system prompt, e.g. `*write a title*` for side calls."""
    fingerprint: str = "*"
    """Of system prompt and tools, as `lightningrl rollouts --report` shows it."""
    agent: str = ""
    """The role that these calls are; empty: the caller's name, or else the model name."""
    policy: str = "policy"
    """`policy`, or a name from `[policies.NAME]`, learns; `frozen` answers with fixed weights; `upstreams.NAME` relays
    to another server.
    """
    weights: str = ""
    """With `frozen`: the model folder that answers, e.g. a checkpoint of another run; empty: what training started
    from.
    """
    train: bool = True
    """Whether these calls teach. Calls that no learning policy answers never do."""

    @model_validator(mode="after")
    def _known_by_its_role(self) -> "RouteConfig":
        if not self.train and not self.agent and (self.caller, self.system, self.fingerprint) != ("*", "*", "*"):
            raise ValueError(
                "a route with `train = false` that fits by more than the model name needs an `agent` to be told apart by"
            )
        return self


class UpstreamConfig(Section):
    url: str
    """Base URL of a server that speaks the agent's dialect, with `/v1` if it has one."""
    key_env: str = ""
    """Environment variable that holds its key; empty: it needs none."""
    model: str = ""
    """The model name to ask it for; empty: the agent's."""


class EngineConfig(Section):
    name: str = "embedded"
    """`embedded`, `vllm`, `relay`, or `pkg.module:attr`: a class is an engine, a function a script (see
    docs/gateway.md).
    """
    urls: list[str] = Field(default_factory=list)
    """Base URLs of the servers behind `vllm` or `relay`."""
    slots: int = Field(default=64, ge=1)
    """Generations that are decoded together."""
    max_length: int = Field(default=1024, ge=16)
    """Tokens of prompt and completion that fit in a slot."""


class GatewayConfig(Section):
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes any free port."""
    history: Literal["exact", "template"] = "exact"
    """What the model reads of its own earlier answers: `exact`ly what it sampled, or what the chat `template` makes of
    it, as deployment would.
    """
    strict: bool = False
    """Whether tools marked `strict` are held to their schema by a grammar. Calls drawn under one are never trained, and
    some SDKs mark every tool; so by default the policy is left to learn it. Demands (`required` or named tools, a
    `response_format`) always hold.
    """
    embeddings: str = ""
    """`upstreams.NAME` that answers embedding requests; empty: nobody does."""


class AirConfig(Section):
    """`[[air]]`: one rule that turns what happened (a span: a tool call, an LLM call, …) into a reward of the call that
    caused it.
    """

    rule: str
    """A built-in rule, or `module:function` from `Span` to a number or None (see docs/air.md)."""
    value: float = 1.0
    """The reward when the rule holds; what a function returns is multiplied by it."""
    tool: str = "*"
    """Only spans of tools with this name; `*` and `?` are wildcards."""
    over: float = Field(default=0.0, ge=0)
    """The budget of `slow` (seconds) and `costly` (tokens)."""
    cap: float = Field(default=math.inf, gt=0, allow_inf_nan=True)
    """One attempt gets at most this much from the rule, in absolute value, so that it does not pay to farm it."""


class AlgorithmConfig(Section):
    credit: str = "uniform"
    """What each call of a rollout was worth: a built-in name (see docs/algorithms/) or `module:function`."""
    credit_options: dict[str, float | str] = Field(default_factory=dict)
    """Parameters of the credit, by name, e.g. `{discount = 0.9}`."""
    advantage: str = "grpo"
    """How good that is, compared with the rest of the group."""
    group_by: Literal["task", "role"] = "task"
    """Whether all calls of a task's rollouts are compared, or those of each role for themselves."""
    aggregation: Literal["rollout-mean", "call-mean", "token-mean"] = "rollout-mean"
    """Whether every rollout, every call or every token counts the same."""
    reward: str = "final"
    """The attempt's reward to learn from, by its name: a reward function may give each role one of its own."""
    truncation_penalty: float = Field(default=0.0, ge=0)
    """Taken off the value of a call that ran into its token limit."""
    shaping: Literal["additive", "potential"] = "additive"
    """Whether rewards of `[[air]]` are added as they are, or as differences of a potential, which provably keeps the
    best policy the best.
    """
    dynamic_sampling: int = Field(default=0, ge=0)
    """Times that a step goes for new tasks in place of those whose rollouts all got the same reward (DAPO, arXiv
    2503.14476).
    """
    audit: str = ""
    """A reward that nobody learns from, by its name: if it falls while the trained one rises, the run warns of reward
    hacking.
    """


class LossConfig(Section):
    name: Literal["ppo_clip", "cispo", "pg"] = "ppo_clip"
    """`pg`: plain policy gradient (with advantages of 1: supervised learning). `ppo_clip`: clipped ratio, arXiv
    1707.06347. `cispo`: clipped weight, arXiv 2506.13585.
    """
    ratio: Literal["token", "call", "rollout"] = "token"
    """Whether the ratio π / π_old is one of each token, or the geometric mean over a call or a rollout (GSPO, arXiv
    2507.18071).
    """
    clip_low: float = Field(default=0.2, ge=0)
    """The ratio is clipped below 1 - this."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped above 1 + this; larger than `clip_low` keeps exploring (DAPO, arXiv 2503.14476)."""
    clip_dual: float = Field(default=0.0, ge=0)
    """With a negative advantage the loss is at most this many times it (arXiv 1912.09729: 3); 0: no limit."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the weights that training started from."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How it is estimated from the sampled tokens (joschu.net/blog/kl-approx.html)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of a bonus for entropy."""
    value_coef: float = Field(default=0.5, ge=0)
    """Weight of the critic's squared error, where the credit needs a critic."""
    importance: Literal["none", "token", "call", "rollout", "token-mask", "call-mask", "rollout-mask"] = "none"
    """Corrects for tokens that older weights sampled: by a truncated ratio of each token, call or rollout, or by
    leaving out those that exceed it.
    """
    importance_cap: float = Field(default=2.0, ge=1)
    """Where that ratio is truncated, or a token, call or rollout left out."""
    proximal: bool = False
    """Clip around the weights that the batch is first learnt by, not around those that sampled it (decoupled PPO, arXiv
    2110.00641).
    """

    @model_validator(mode="after")
    def _sound(self) -> "LossConfig":
        if 0 < self.clip_dual <= 1:
            raise ValueError(
                f"`clip_dual` is `{self.clip_dual:g}`: up to 1 it would leave nothing to learn where advantages are negative; 3 is usual"
            )
        if self.name == "pg" and (self.ratio != "token" or self.proximal):
            raise ValueError("`pg` clips no ratio: `ratio` and `proximal` would change nothing")
        if self.importance != "none" and self.name != "pg" and not self.proximal:
            raise ValueError(
                f"`{self.name}` already has a ratio to the weights that sampled: `importance` needs `proximal = true` beside it"
            )
        return self


class TrainerConfig(Section):
    name: str = "local"
    """Which trainer."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Peak step size of AdamW."""
    schedule: Literal["linear", "constant"] = "linear"
    """`linear` decays to zero over the run."""
    minibatches: int = Field(default=4, ge=1)
    """Optimizer steps made from one collected batch."""
    max_tokens: int = Field(default=65536, ge=1)
    """Unique tokens in one forward and backward; a larger batch is split, which changes nothing but memory."""
    threads: int = Field(default=2, ge=1)
    """Threads of one matrix product while training."""


class LoopConfig(Section):
    steps: int = Field(default=60, ge=0)
    """Batches to collect and learn from."""
    tasks_per_step: int = Field(default=24, ge=1)
    """Groups in a batch."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of each task."""
    max_off_policy_steps: int = Field(default=4, ge=0)
    """Calls that were answered by weights older than this many steps are not learnt from."""
    eval_every: int = Field(default=10, ge=0)
    """Steps between looks at held-out tasks; 0: only before and after."""
    eval_tasks: int = Field(default=64, ge=1)
    """Held-out tasks in each of those looks."""


Size: TypeAlias = Literal["hidden", "layers", "heads", "kv_heads", "head_size", "intermediate", "max_length"]


class WarmstartConfig(Section):
    """`[warmstart]`: how `lightningrl warmstart` makes the model that `model.path` names (see docs/tutorial.md)."""

    teacher: str = ""
    """Plays the model on training tasks, and its rollouts are the demonstrations: `module:function` (a script, see
    docs/gateway.md) or `upstreams.NAME`."""
    demonstrations: str = ""
    """In place of a teacher: a JSONL file of conversations, the folder of a run, or `module:function`, called as
    f(seed=…, count=…).
    """
    reward: float = 1.0
    """The final reward that a rollout of the teacher, or of a run, needs to be a demonstration."""
    count: int = Field(default=2000, ge=1)
    """Rollouts of the teacher, or demonstrations that a function is asked for."""
    base: str = ""
    """A model folder (relative to the recipe) or hub id to train further; empty: a tiny model and its tokenizer are
    made.
    """
    tokenizer: str = ""
    """`module:function` from the demonstrations to the tiny model's tokenizer; empty: one that knows every word and
    phrase of them.
    """
    shape: dict[Size, int] = Field(default_factory=dict[Size, int])
    """Sizes of the tiny model, such as `{hidden = 64}`; the rest is as in `models/tiny.py`."""
    steps: int = Field(default=600, ge=1)
    """Batches of demonstrations to learn from; with `steer` fewer or up to three times as many."""
    batch: int = Field(default=32, ge=1)
    """Demonstrations in a batch."""
    learning_rate: float = Field(default=0.0, ge=0)
    """Peak step size of AdamW; 0: 3e-3 for a tiny model, 1e-3 for one with a `base`."""
    reading: int = Field(default=0, ge=0)
    """Steps before those in which a tiny model also learns to predict what it is told, such as tool results: it learns
    sooner to copy from there.
    """
    reading_prompts: bool = False
    """Whether the first prompt is predicted then, too."""
    steer: bool = True
    """Stop as soon as the agent succeeds on 35 to 50 % of the training tasks that it is tried on. False: take exactly
    `steps`.
    """

    @model_validator(mode="after")
    def _one_source(self) -> "WarmstartConfig":
        if self.teacher and self.demonstrations:
            raise ValueError("give either `teacher` or `demonstrations`")
        return self


class LearnerConfig(Section):
    """All there is to say about one policy that learns."""

    model: ModelConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    loss: LossConfig = LossConfig()
    trainer: TrainerConfig = TrainerConfig()


class Config(Section):
    name: str
    """Names the run's folder: up to 100 letters, digits, spaces, `_`, `.` and `-`; the first is a letter, a digit or
    `_`.
    """
    root: Path = Path(".")
    """The folder that `entry`, `reward`, `source` and relative paths are looked up in; the recipe's own unless it says
    otherwise.
    """
    seed: int = 0
    """Everything random follows from it."""
    preset: str = ""
    """An algorithm of the field, by name: fills in what `[algorithm]` and `[loss]` leave out."""
    agent: AgentConfig
    tasks: TasksConfig
    model: ModelConfig
    routes: list[RouteConfig] = Field(default_factory=lambda: [RouteConfig()])
    """Which calls lead to which policy, and whether they teach; by default all lead to the one that learns."""
    upstreams: dict[str, UpstreamConfig] = Field(default_factory=dict)
    """Other servers, frozen: `[upstreams.NAME]`."""
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    air: list[AirConfig] = Field(default_factory=list[AirConfig])
    """Automatic Intermediate Rewarding: rules that reward calls for what came of them. Credits other than `uniform` use
    these rewards.
    """
    loss: LossConfig = LossConfig()
    trainer: TrainerConfig = TrainerConfig()
    policies: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """`[policies.NAME]`: several policies that learn. Each may have `preset`, `model`, `algorithm`, `loss` and
    `trainer` of its own, and is like the sections at the top in whatever it leaves out. Without any there is one,
    `policy`.
    """
    loop: LoopConfig = LoopConfig()
    warmstart: WarmstartConfig = WarmstartConfig()

    @model_validator(mode="before")
    @classmethod
    def _begin_with_preset(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return _merged(_preset(tree), tree)

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
                    hint="letters, digits, `_` and `-`, and not `frozen`: that is what does not learn",
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
    def _keys_stay_with_the_gateway(self) -> "Config":
        for name in sorted({*self.agent.inherit_env} & {*self.secrets()}):
            hint = "the gateway adds it to what the agent asks an upstream; an agent that needs one itself gets another variable"
            raise UserError(f"`agent.inherit_env` names `{name}`, which holds the key of an upstream", hint=hint)
        return self

    def secrets(self) -> list[str]:
        """Environment variables that hold keys of upstreams: agents never get them."""
        return [upstream.key_env for upstream in self.upstreams.values() if upstream.key_env]

    def learners(self) -> dict[str, LearnerConfig]:
        """The policies that learn, each with all of its settings."""
        shared = self.model_dump(include=set(LearnerConfig.model_fields))
        policies = self.policies or {"policy": {}}
        return {name: _learner(name, own, shared=shared) for name, own in policies.items()}


def _merged(*trees: Mapping[str, Any]) -> dict[str, Any]:
    """Later trees over earlier ones, section by section."""
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


def _learner(name: str, own: Mapping[str, Any], *, shared: Mapping[str, Any]) -> LearnerConfig:
    try:
        return LearnerConfig.model_validate(
            _merged(shared, _preset(own, of=f"policies.{name}."), _without(own, "preset"))
        )
    except ValidationError as error:
        raise _inside(error, "policies", name) from error


def _inside(error: ValidationError, *loc: str) -> ValidationError:
    """The same mistakes, named from the top of the tree."""
    lines: list[Any] = [{**line, "loc": (*loc, *line["loc"])} for line in error.errors(include_url=False)]
    return ValidationError.from_exception_data(error.title, lines)


def _without(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name != key}


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and lay the overrides (`a.b=value`, value in TOML) over it."""
    path = path / "recipe.toml" if path.is_dir() else path
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = "no recipe at" if isinstance(error, FileNotFoundError) else "cannot read the recipe"
        raise UserError(f"{reason} `{path}`", hint="give the path of a recipe.toml, or its folder") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"`{path}` is not valid TOML: {error}", hint="mend the line it names") from error
    return make_config(tree, overrides, folder=path.parent, where=str(path))


def make_config(tree: dict[str, Any], overrides: Sequence[str], *, folder: Path, where: str) -> Config:
    """Settings from a tree, the overrides laid over it. `folder` is what a relative `root` is relative to; `where`
    names the tree in errors.
    """
    for override in overrides:
        _lay_over(tree, override)
    tree["root"] = str((folder / tree.get("root", ".")).resolve())
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, where=where) from error


def dump_config(config: Config) -> str:
    """The resolved tree as TOML; `load_config` reads it back to the same settings."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _lay_over(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"override `{override}` has no `=`", hint="write it as `trainer.learning_rate=1e-4`")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *parents, last = key.strip().split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise UserError(
                f"`{name}` in override `{override}` is a value, not a section", hint="see `lightningrl train --dry-run`"
            )
    tree[last] = value


def _explain(error: ValidationError, *, where: str) -> UserError:
    """Name one wrong setting, and what was probably meant. A key that nobody knows says most: what it was to be is then
    missing, too.
    """
    first = min(error.errors(), key=lambda line: line["type"] != "extra_forbidden")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValidationError):
        return _explain(cause, where=where)
    loc, kind, meaning = _place(first["loc"])
    key, given = ".".join(loc), first["input"]
    hint = f"`{key}`: {meaning}" if meaning else "`lightningrl settings` explains every key"
    match first["type"]:
        case "extra_forbidden":
            return UserError(f"unknown key `{key}` in `{where}`", hint=meant(loc[-1], _keys(first["loc"][:-1])))
        case "missing" if isinstance(first["loc"][-1], str):
            return UserError(f"`{key}` is missing in `{where}`", hint=hint)
        case "literal_error":
            return UserError(f"`{key}` in `{where}` cannot be `{given}`", hint=meant(str(given), get_args(kind)))
        case "value_error":
            return UserError(f"`{key}` in `{where}`: {cause}", hint=hint)
        case "model_type" | "dict_type":
            return UserError(f"`{key}` in `{where}` should be a section, not `{given}`", hint=hint)
        case _:
            given = f" is `{given}`" if isinstance(given, str | int | float) else ""
            should = first["msg"].replace("Input", "it").partition(", unable")[0]
            return UserError(f"`{key}` in `{where}`{given}: {should}", hint=hint)


def _place(loc: Sequence[str | int]) -> tuple[list[str], Any, str]:
    """The key of the setting, without what only tells the types of a union apart; its type, and what it means."""
    key, meaning = list[str](), ""
    kind: Any = Config
    for part in loc:
        if isinstance(kind, type) and issubclass(cast(Any, kind), Section):
            field = kind.model_fields.get(str(part))
            kind, meaning = (field.annotation, " ".join((field.description or "").split())) if field else (Any, "")
        elif get_origin(kind) in (list, dict):
            kind = LearnerConfig if key == ["policies"] else get_args(kind)[-1]
        else:
            break
        key.append(str(part))
    return key, kind, meaning


def _keys(loc: Sequence[str | int]) -> list[str]:
    """What may be in the section."""
    section = _place(loc)[1]
    return [*section.model_fields, *(["preset"] if section is LearnerConfig else [])]
