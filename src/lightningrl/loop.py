"""collect → credit → pack → step → publish. Read this first.

The loop asks the store for rollouts and waits for them; agents run elsewhere and know nothing of it. What it learns
from are records alone, so a run that is killed anywhere goes on from its last published weights as if nothing had
happened.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np

from lightningrl.algorithms.air import air_rewards
from lightningrl.algorithms.selection import silent_groups
from lightningrl.checkpoints import Checkpoints
from lightningrl.config import Config
from lightningrl.cpu import CpuSplit
from lightningrl.data.dump import dump_lessons
from lightningrl.data.forest import Lesson
from lightningrl.data.tasks import asked, derived_seed, load_tasks
from lightningrl.errors import AgentError, GraderError, UserError
from lightningrl.learner import Learner
from lightningrl.store import Store, wait
from lightningrl.tracing import spans_of, united
from lightningrl.types import FINAL, Attempt, Call, Capture, Doubles, Reward, Rollout, Task

Mode: TypeAlias = Literal["sampled", "greedy"]
MODES: tuple[Mode, ...] = ("sampled", "greedy")
TRIED = 3
"""Tasks that must all go by without a call before an agent is said not to reach the model."""
UNREACHED = re.compile(r"connect|timed out|time-?out|resolv|unauthor|authenti|api.?key|\b40[134]\b", re.IGNORECASE)
"""What an agent's error says where it has asked another server than ours."""
TEMPERATURE: dict[Mode, float] = {"sampled": 1.0, "greedy": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """How the policy did on the first held-out tasks."""

    version: int
    mode: Mode
    rollouts: tuple[Rollout, ...]
    """One a task, in the order of the tasks."""
    rewards: Doubles
    """[tasks] a rollout that failed has NaN."""

    @property
    def failed(self) -> int:
        """Rollouts without a reward."""
        return int(np.isnan(self.rewards).sum())

    @property
    def mean(self) -> float:
        """Over the rollouts that did not fail."""
        return float(np.nanmean(self.rewards))


class Watcher(Protocol):
    """Somebody who wants to know how it goes. Nothing it does changes the run."""

    def doing(self, what: str, done: int = 0, total: int = 0) -> None: ...

    def stepped(self, step: int, metrics: dict[str, float]) -> None: ...

    def examined(self, exam: Exam) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The run in a few figures: held-out exams before and after."""

    before: dict[Mode, Exam]
    after: dict[Mode, Exam]
    rollouts: int


class Loop:
    """Learns from one recipe: one policy, or several in the same rollouts."""

    def __init__(
        self,
        config: Config,
        *,
        store: Store,
        learners: Sequence[Learner],
        checkpoints: Checkpoints,
        folder: Path,
        watcher: Watcher,
    ) -> None:
        self.config = config
        self.store = store
        self.learners = learners
        self.checkpoints = checkpoints
        self.folder = folder
        self.watcher = watcher
        self.cpu = CpuSplit()

    async def run(self) -> Summary:
        """Learn for `loop.steps` steps, from wherever the store says we are."""
        config, steps = self.config.loop, self.config.loop.steps
        version = await self.restore()
        self.cpu.lap("rest")
        tasks, recall = self.config.tasks.heldout, version > 0 or self.checkpoints.published > 0
        if not recall:
            await self.try_out()
        before: dict[Mode, Exam] = {
            mode: await self.examine(0, mode, tasks, when="before training", recall=recall) for mode in MODES
        }
        for step in range(version, steps):
            if step and config.eval_every and step % config.eval_every == 0:
                await self.examine(step, "sampled", min(config.eval_tasks, tasks), when=f"after {step} steps")
            started, spent = time.monotonic(), self.cpu.seconds
            batch = await self.collect(step)
            collected = time.monotonic()
            self.cpu.lap("gateway")
            self.watcher.doing(f"step {step + 1}: learning from {len(batch)} rollouts")
            metrics = await self.learn(step, batch)
            self.watcher.doing(f"step {step + 1}: saving the new weights and serving them")
            await self.publish(step + 1)
            metrics |= {"time/collect_s": collected - started, "time/learn_s": time.monotonic() - collected}
            self.cpu.lap("training")
            self.watcher.stepped(step, metrics | self.cpu.since(spent))
        after: dict[Mode, Exam] = {
            mode: await self.examine(steps, mode, tasks, when="after training") for mode in MODES
        }
        return Summary(before=before, after=after, rollouts=sum((await self.store.count()).values()))

    async def restore(self) -> int:
        """Go back to the newest version, and serve it; the first time, publish what the models came with.

        Where a damaged version has to be learnt again, nothing is served before: queued rollouts wait for the weights
        that they are to run with.
        """
        version = await self.checkpoints.restore()
        if version < 0:
            await self.publish(0)
            return 0
        if version >= self.checkpoints.published:
            await self._serve(version)
        return version

    async def try_out(self) -> None:
        """Run the first task of the first exam before the others, so that an agent that does not reach the model is
        told at once. The exam does not run it again. One task may be unlike the others: where it brings no call, a few
        more are tried.
        """
        attempts = await self._try(1, "one task")
        if attempts and not await self.store.calls([attempt.id for attempt in attempts]):
            attempts = await self._try(TRIED, "a few more tasks")
            if not await self.store.calls([attempt.id for attempt in attempts]):
                await self._not_reached(attempts)

    async def _try(self, count: int, what: str) -> list[Attempt]:
        rollouts = self._exam(self._heldout_tasks(min(count, self.config.tasks.heldout)), version=0, mode=MODES[0])
        await self.store.enqueue([replace(rollout, max_attempts=1) for rollout in rollouts])
        self.watcher.doing(f"trying {what}: does the agent call the model?")
        await wait(self.store, [rollout.id for rollout in rollouts])
        return await self.store.attempts([rollout.id for rollout in rollouts])

    async def _not_reached(self, attempts: Sequence[Attempt]) -> None:
        """Say so; but where the agent failed for another reason than that it reached no server, say that."""
        errors = [attempt.error.splitlines()[0] for attempt in attempts if attempt.error]
        if len(errors) == len(attempts) and not any(map(UNREACHED.search, errors)):
            failed = list(dict.fromkeys(attempt.rollout_id for attempt in attempts))
            await self._give_up(failed, what="the first tasks")
        what = errors[0] if errors else f"it answered `{attempts[-1].output!r:.80}`"
        hint = "it must take its base URL from OPENAI_BASE_URL and its key from OPENAI_API_KEY, as OpenAI's SDKs do (docs/gateway.md)"
        raise AgentError(
            f"the agent never called the model: {what}",
            hint=f"{hint}; what it printed is in {self.folder / 'agents.log'}",
        )

    async def collect(self, step: int) -> list[Rollout]:
        """Run every task of this step `group_size` times, and wait for all of them; then as often as the recipe asks
        for it, put new tasks in the place of those whose rollouts all got the same reward.
        """
        batch = await self._collect(step, 0, self.config.loop.tasks_per_step)
        for retry in range(1, max(learner.config.algorithm.dynamic_sampling for learner in self.learners) + 1):
            rewards = await self.store.rewards(
                [rollout.accepted_attempt_id for rollout in batch if rollout.accepted_attempt_id]
            )
            silent = silent_groups(batch, rewards, names={learner.config.algorithm.reward for learner in self.learners})
            if not silent:
                break
            fresh = await self._collect(step, retry, len(silent))
            batch = [rollout for rollout in batch if rollout.group_id not in silent] + fresh
        return batch

    async def _collect(self, step: int, retry: int, count: int) -> list[Rollout]:
        config = self.config
        name = f"train-{step:05d}" + (f"-retry{retry}" if retry else "")
        seed = derived_seed(config.seed, "train", step, *([retry] if retry else []))
        tasks = load_tasks(config.tasks, "train", seed=seed, count=count, root=config.root)
        return await self._finish(
            [
                self._rollout(f"{name}-{index:03d}-{member:02d}", task, group_id=f"{name}-{index:03d}", temperature=1.0)
                for index, task in enumerate(tasks)
                for member in range(config.loop.group_size)
            ],
            version=step,
            what=f"step {step + 1}" + (f", other tasks {retry}" if retry else ""),
        )

    async def learn(self, step: int, batch: Sequence[Rollout]) -> dict[str, float]:
        """Turn the records of a batch into new weights: every policy from its own calls, one after the other.

        An update that is not finite is not made; what it was to be made from is kept in the run's folder, and the run
        goes on.
        """
        lessons, metrics = await self.credit(step, batch)
        decay = 1.0 - step / self.config.loop.steps
        await asyncio.gather(*(learner.engine.pause() for learner in self.learners))
        for learner in self.learners:
            seed = derived_seed(self.config.seed, "minibatches", step)
            found = await learner.update(lessons[learner.name], seed=seed, decay=decay)
            metrics |= self._named(learner, found)
            if found.get("optim/skipped"):
                trained = [lesson for lesson in lessons[learner.name] if lesson.weights.any()]
                dump_lessons(self.folder / "skipped" / f"step-{step:05d}-{learner.name}.npz", trained)
        return metrics

    async def credit(self, step: int, batch: Sequence[Rollout]) -> tuple[dict[str, list[Lesson]], dict[str, float]]:
        """records → trajectories → what each sampled token is to teach, for each policy."""
        accepted = [rollout.accepted_attempt_id for rollout in batch if rollout.accepted_attempt_id]
        calls, rewards = await self.store.calls(accepted), await self.store.rewards(accepted)
        if accepted and not calls:
            raise AgentError(
                "the agent never called the model",
                hint="it must take its base URL from OPENAI_BASE_URL, as OpenAI's SDKs do",
            )
        air = await self._air(accepted, calls)
        metrics, lessons, left_out = _census(batch, calls, [*rewards, *air]), dict[str, list[Lesson]](), Counter[str]()
        metrics |= await self._ungraded_logs(batch, rewards)
        tasks = {rollout.group_id: asked(rollout.task) for rollout in batch}
        metrics |= {
            "tasks/count": float(len(tasks)),
            "tasks/heldout": float(sum(task in self._heldout for task in tasks.values())),
        }
        for learner in self.learners:
            oldest = step - self.config.loop.max_off_policy_steps
            lessons[learner.name], found, reasons = await learner.lessons(
                batch, calls, rewards, air=air, oldest_version=oldest
            )
            metrics |= self._named(learner, found)
            left_out.update(reasons)
        if calls and not any(lesson.weights.any() for made in lessons.values() for lesson in made):
            reasons = ", ".join(f"`{reason}` {count} times" for reason, count in left_out.items())
            raise UserError(f"no call may be trained: {reasons}", hint="check `routes`: is there a role that learns?")
        return lessons, metrics

    @cached_property
    def _heldout(self) -> frozenset[bytes]:
        """The inputs of the held-out tasks: none of them should be trained on."""
        config = self.config
        return frozenset(
            map(
                asked,
                load_tasks(
                    config.tasks, "heldout", seed=config.tasks.seed, count=config.tasks.heldout, root=config.root
                ),
            )
        )

    async def _air(self, attempt_ids: Sequence[str], calls: Sequence[Call]) -> list[Reward]:
        """What the rules of the recipe say of what happened. They follow from records, and are not stored."""
        rules = self.config.air
        return (
            air_rewards(united(await self.store.spans(attempt_ids), spans_of(calls)), rules, root=self.config.root)
            if rules
            else []
        )

    async def _ungraded_logs(self, batch: Sequence[Rollout], rewards: Sequence[Reward]) -> dict[str, float]:
        """Of programs: the share of attempts that printed several lines and got 0. It may be their logs that were
        graded.
        """
        if self.config.agent.command is None:
            return {}
        worth = {
            reward.attempt_id: reward.value for reward in rewards if reward.name == FINAL and reward.call_id is None
        }
        accepted = [
            attempt for attempt in await self.store.attempts([rollout.id for rollout in batch]) if attempt.id in worth
        ]
        logs = [
            attempt
            for attempt in accepted
            if isinstance(attempt.output, str) and "\n" in attempt.output and worth[attempt.id] == 0
        ]
        return {"answers/logs": len(logs) / max(len(accepted), 1)}

    def _named(self, learner: Learner, metrics: dict[str, float]) -> dict[str, float]:
        """Several policies are told apart by their names."""
        return (
            metrics if len(self.learners) == 1 else {f"{learner.name}/{name}": value for name, value in metrics.items()}
        )

    async def publish(self, version: int) -> None:
        """Save the weights, tell the store, then serve them."""
        await self.checkpoints.save(version)
        await self._serve(version)

    async def _serve(self, version: int) -> None:
        for learner in self.learners:
            await learner.serve(learner.weights(version))

    async def examine(self, version: int, mode: Mode, count: int, *, when: str = "", recall: bool = False) -> Exam:
        """Try the policy on held-out tasks, the same ones every time."""
        return await self.examine_on(self._heldout_tasks(count), version=version, mode=mode, when=when, recall=recall)

    async def examine_on(
        self, tasks: Sequence[Task], *, version: int, mode: Mode, when: str = "", recall: bool = False
    ) -> Exam:
        """Try the policy once on each of these tasks. `when`: how the exam is told from others in messages.
        `recall`: read an exam of earlier weights, and run nothing.
        """
        rollouts = self._exam(tasks, version=version, mode=mode)
        if recall:
            rollouts = await self.store.rollouts(ids=[rollout.id for rollout in rollouts])
        else:
            rollouts = await self._finish(rollouts, version=version, what=f"{mode} exam {when}".rstrip())
        accepted = [rollout.accepted_attempt_id for rollout in rollouts if rollout.accepted_attempt_id]
        rewards = {
            reward.attempt_id: reward.value for reward in await self.store.rewards(accepted) if reward.name == FINAL
        }
        exam = Exam(
            version=version,
            mode=mode,
            rollouts=tuple(rollouts),
            rewards=np.array([rewards.get(rollout.accepted_attempt_id or "", np.nan) for rollout in rollouts]),
        )
        self.watcher.examined(exam)
        self.cpu.lap("gateway")
        return exam

    def _heldout_tasks(self, count: int) -> list[Task]:
        config = self.config
        return load_tasks(config.tasks, "heldout", seed=config.tasks.seed, count=count, root=config.root)

    def _exam(self, tasks: Sequence[Task], *, version: int, mode: Mode) -> list[Rollout]:
        return [
            self._rollout(
                f"exam-{version:05d}-{mode}-{index:04d}",
                task,
                seed_of=f"exam-{mode}-{index}",
                temperature=TEMPERATURE[mode],
            )
            for index, task in enumerate(tasks)
        ]

    def _rollout(
        self,
        rollout_id: str,
        task: Task,
        *,
        temperature: float,
        group_id: str | None = None,
        seed_of: str | None = None,
    ) -> Rollout:
        """Its sampling seed follows from its name, so a repeated attempt draws the same tokens."""
        return Rollout(
            id=rollout_id,
            group_id=group_id or rollout_id,
            task=task,
            max_attempts=self.config.agent.max_attempts,
            timeout_s=self.config.agent.timeout_s,
            sampling={
                "temperature": temperature,
                "top_p": 1.0,
                "top_k": 0,
                "seed": derived_seed(self.config.seed, seed_of or rollout_id),
            },
        )

    async def _finish(self, rollouts: Sequence[Rollout], *, version: int, what: str) -> list[Rollout]:
        """Enqueue, wait, report progress. Rollouts that failed are part of the answer, unless all did. Where `version`,
        whose weights are to answer, has been learnt from before, the records stay as they are: also a rollout that
        failed is not tried again.
        """
        ids = [rollout.id for rollout in rollouts]
        if version >= self.checkpoints.published:
            await self.store.enqueue(rollouts)
        ended = await wait(
            self.store, ids, progress=lambda done: self.watcher.doing(f"{what}: running the agent", done, len(ids))
        )
        if all(rollout.status == "failed" for rollout in ended):
            await self._give_up(ids, what=what)
        return ended

    async def _give_up(self, failed: Sequence[str], *, what: str) -> None:
        """Say whose failure it was: the most frequent first line, with its traceback."""
        errors = [attempt.error or "no error was given" for attempt in await self.store.attempts(failed)]
        line, count = Counter(error.splitlines()[0] for error in errors).most_common(1)[0]
        example = next(error for error in errors if error.startswith(line))
        kind = GraderError if line.startswith("GraderError") else AgentError
        hint = f"the agents' own output is in {self.folder / 'agents.log'}"
        if (self.folder / "config.toml").exists():
            hint = f"nothing was lost: mend it, then `lightningrl train {self.folder}/config.toml --run-dir {self.folder} --resume`; {hint}"
        raise kind(f"all {len(failed)} rollouts of {what} failed; {count} times: {example}", hint=hint)


def _census(batch: Sequence[Rollout], calls: Sequence[Call], rewards: Sequence[Reward]) -> dict[str, float]:
    """What the batch was made of, taught from or not. A reward by another than the grader has its source in its name."""
    accepted = sum(rollout.accepted_attempt_id is not None for rollout in batch)
    captures = Counter(call.capture for call in calls)
    return {
        "calls/per_rollout": len(calls) / max(accepted, 1),
        "calls/truncated": float(sum(call.finish_reason == "length" for call in calls)),
        "tokens/sampled": float(sum(len(call.completion_ids) for call in calls)),
        "tokens/per_call": float(np.mean([len(call.completion_ids) for call in calls])) if calls else 0.0,
        **_rewards_by_name(rewards, attempts=accepted),
        **{f"calls/{capture}": float(captures[capture]) for capture in get_args(Capture)},
    }


def _rewards_by_name(rewards: Sequence[Reward], *, attempts: int) -> dict[str, float]:
    """What an attempt got on average under each name; `reward/mean` is the final one."""
    sums: dict[str, float] = {FINAL: 0.0}
    for reward in rewards:
        name = reward.name if reward.source == "grader" else f"{reward.source}.{reward.name}"
        sums[name] = sums.get(name, 0.0) + reward.value
    means = {name: total / max(attempts, 1) for name, total in sums.items()}
    return {"reward/mean": means[FINAL], **{f"reward/{name}": mean for name, mean in means.items()}}
