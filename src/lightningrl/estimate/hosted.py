"""What does a run at a service take? Tokens by kind, and dollars at the service's prices; nothing is computed here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightningrl.config import Config, LearnerConfig
from lightningrl.estimate.recipe import exam_tasks
from lightningrl.estimate.workload import FOLLOW_UP, Workload
from lightningrl.hosted.cost import dollars
from lightningrl.trainer.tinker import passes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedEstimate:
    """What a recipe takes at a service."""

    name: str
    model: str
    work: Workload
    rollouts: int
    """Rollouts of a step."""
    steps: int
    step_tokens: Mapping[str, float]
    """Kind (`prefill`, `sample`, `train`) → tokens of a step."""
    exam_tokens: Mapping[str, float]
    """Kind → tokens of all evaluations."""
    prices: Mapping[str, float]
    """Kind → US dollars for a million tokens; not all kinds: there is no cost."""
    assumptions: tuple[str, ...]

    @property
    def tokens(self) -> dict[str, float]:
        """Kind → tokens of the run."""
        return {kind: self.steps * count + self.exam_tokens[kind] for kind, count in self.step_tokens.items()}

    @property
    def step_usd(self) -> float | None:
        return dollars(self.step_tokens, self.prices)

    @property
    def usd(self) -> float | None:
        """US dollars of the run; None: a price is missing."""
        return dollars(self.tokens, self.prices)


def estimate_hosted(config: Config, *, work: Workload) -> HostedEstimate:
    """The estimate for a recipe with a service as its backend."""
    loop, learners = config.loop, list(config.learners().values())
    rollouts = loop.tasks_per_step * loop.group_size
    again = sum(map(_times, learners)) / len(learners)  # policies share the calls of a batch

    def answered(count: float) -> dict[str, float]:
        return {"prefill": count * work.calls * work.prompt_tokens, "sample": count * work.sampled_tokens}

    return HostedEstimate(
        name=config.name,
        model=config.service.model or learners[0].model.path,
        work=work,
        rollouts=rollouts,
        steps=loop.steps,
        step_tokens=answered(rollouts) | {"train": rollouts * work.unique_tokens * again},
        exam_tokens=answered(exam_tasks(config)) | {"train": 0.0},
        prices={**config.service.prices},
        assumptions=tuple(_assumptions(work, again)),
    )


def _times(learner: LearnerConfig) -> float:
    """How often a row is sent in a step."""
    return passes(learner.loss) + (learner.loss.kl_coef > 0) + learner.loss.proximal + learner.trainer.measured


def _assumptions(work: Workload, again: float) -> Iterator[str]:
    """What the estimate takes for granted."""
    if not work.is_measured:
        told = f"{work.calls:g} calls of a rollout, {work.completion_tokens:,.0f} tokens sampled by each"
        yield f"{told}; a later call reads its history and {FOLLOW_UP} new tokens"
    yield f"every rollout is trained, in one row that is sent {again:.3g} times; branches repeat what they share"
    yield "each prompt is billed in full, also where the service has read it before; forward passes as training"
