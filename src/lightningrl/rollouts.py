"""Which rollouts does a run need, and how did they end? Batches to learn from, held-out exams, and one first try.

The id of a rollout says what it is for, and its sampling seed follows from the id and the seed of the run. A resumed
run therefore requests the same rollouts again, and the store repeats none that has ended.
"""

import re
from collections import Counter
from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from lightningrl.algorithms.places import Differences, Way, places
from lightningrl.algorithms.selection import role_learns, silent_groups
from lightningrl.checkpoints import Checkpoints
from lightningrl.config import Config, RouteConfig
from lightningrl.data.tasks import derived_seed, load_tasks
from lightningrl.data.transitions import why_left_out
from lightningrl.errors import AgentError, GraderError
from lightningrl.progress import MODES, TEMPERATURE, Exam, Mode, Watcher
from lightningrl.store import Store, Where, wait
from lightningrl.types import FINAL, Attempt, Branch, Call, Rollout, Task, accepted_attempts, by_attempt, by_group

MORE_TRIES = 3
"""Tasks tried after a first one without a call. One task may be special; several without a call are a wrong URL."""
UNREACHED = re.compile(r"connect|timed out|time-?out|resolv|unauthor|authenti|api.?key|\b40[134]\b", re.IGNORECASE)
"""Matches the error of an agent that sent its requests to another server."""


class Rollouts:
    """Requests rollouts from the store and waits until agents have run them."""

    def __init__(
        self, config: Config, *, store: Store, checkpoints: Checkpoints, folder: Path, watcher: Watcher
    ) -> None:
        self._config = config
        self._store = store
        self._checkpoints = checkpoints
        self._folder = folder
        self._watcher = watcher
        self._differences = Differences()
        self._compared = 0
        """Steps whose siblings are in `_differences`."""

    async def collect(self, step: int) -> list[Rollout]:
        """Run each task of this step `group_size` times. With dynamic sampling (DAPO, arXiv 2503.14476), groups in
        which all rewards are equal are replaced by groups of new tasks. With `fork_share`, a part of each group are
        branches of the others, which run first.
        """
        batch = await self._groups(step, self._config.loop.tasks_per_step)
        algorithms = [learner.algorithm for learner in self._config.learners().values()]
        names = {algorithm.reward for algorithm in algorithms}
        for retry in range(1, max(algorithm.dynamic_sampling for algorithm in algorithms) + 1):
            rewards = await self._store.rewards(accepted_attempts(batch))
            silent = silent_groups(batch, rewards, names=names)
            if not silent:
                break
            kept = [rollout for rollout in batch if rollout.group_id not in silent]
            batch = kept + await self._groups(step, len(silent), retry=retry)
        return batch + await self._branches(step, batch) if self._config.loop.places else batch

    async def examine(
        self, tasks: Sequence[Task], *, version: int, mode: Mode, when: str = "", recall: bool = False
    ) -> Exam:
        """Run each task once with the weights `version`. `when` names the exam in messages. `recall`: run nothing, and
        read the exam that an earlier process took.
        """
        rollouts = self._exam(tasks, version=version, mode=mode)
        if recall:
            rollouts = await self._store.rollouts(ids=[rollout.id for rollout in rollouts])
        else:
            rollouts = await self._finish(rollouts, version=version, what=f"{mode} evaluation {when}".rstrip())
        rewards = await self._store.rewards(accepted_attempts(rollouts))
        final = {reward.attempt_id: reward.value for reward in rewards if reward.name == FINAL}
        exam = Exam(
            version=version,
            mode=mode,
            rollouts=tuple(rollouts),
            rewards=np.array([final.get(rollout.accepted_attempt_id or "", np.nan) for rollout in rollouts]),
        )
        self._watcher.examined(exam)
        return exam

    async def try_out(self) -> None:
        """Run the first held-out task, to find out early whether the agent reaches the model. The exam that follows
        does not run it again. Raises `AgentError` if neither this task nor a few more lead to a call.
        """
        attempts = await self._try(1, "one task")
        if not attempts or await self._has_calls(attempts):
            return
        attempts = await self._try(MORE_TRIES, "a few more tasks")
        if await self._has_calls(attempts):
            return
        errors = [attempt.error.splitlines()[0] for attempt in attempts if attempt.error]
        if len(errors) == len(attempts) and not any(map(UNREACHED.search, errors)):
            failed = list(dict.fromkeys(attempt.rollout_id for attempt in attempts))
            raise await self._all_failed(failed, what="the first tasks")
        raise never_called(
            errors[0] if errors else f"it answered `{attempts[-1].output!r:.80}`", log=self._folder / "agents.log"
        )

    def heldout(self, count: int) -> list[Task]:
        """The first `count` held-out tasks, the same ones every time."""
        tasks, root = self._config.tasks, self._config.root
        return load_tasks(tasks, "heldout", seed=tasks.seed, count=count, root=root)

    async def _groups(self, step: int, count: int, *, retry: int = 0) -> list[Rollout]:
        """Run `count` new tasks, a group of rollouts each."""
        config = self._config
        name = f"train-{step:05d}" + (f"-retry{retry}" if retry else "")
        seed = derived_seed(config.seed, "train", step, *([retry] if retry else []))
        tasks = load_tasks(config.tasks, "train", seed=seed, count=count, root=config.root)
        rollouts = [
            self._rollout(f"{name}-{index:03d}-{member:02d}", task, group_id=f"{name}-{index:03d}", temperature=1.0)
            for index, task in enumerate(tasks)
            for member in range(config.loop.trunks)
        ]
        what = f"step {step + 1}" + (f", other tasks {retry}" if retry else "")
        return await self._finish(rollouts, version=step, what=what)

    async def _branches(self, step: int, trunks: Sequence[Rollout]) -> list[Rollout]:
        """Run the branches of a step, which repeat some of its `trunks` up to a call that learns. A group that has
        branches from before a restart keeps them: trunks that succeed only afterwards would change its places.
        """
        known = await self._store.rollouts(group_ids=list(by_group(trunks)))
        tries = self._config.agent.max_attempts
        rollouts = [replace(rollout, max_attempts=tries) for rollout in known if rollout.branch is not None]
        rollouts += await self._new_branches(step, trunks, branched=by_group(rollouts))
        return await self._finish(rollouts, version=step, what=f"step {step + 1}, branches") if rollouts else []

    async def _new_branches(self, step: int, trunks: Sequence[Rollout], *, branched: Container[str]) -> list[Rollout]:
        """The branches of all groups that are not `branched` yet."""
        config = self._config.loop
        calls = await self._learning_calls(trunks)
        trunks = [trunk for trunk in trunks if trunk.accepted_attempt_id in calls]
        differences = await self._differences_before(step) if config.fork_at == "variance" else None
        rollouts: list[Rollout] = []
        for group_id, members in by_group(trunk for trunk in trunks if trunk.group_id not in branched).items():
            own = [calls[str(trunk.accepted_attempt_id)] for trunk in members]
            others = [calls[str(trunk.accepted_attempt_id)] for trunk in trunks if trunk.group_id != group_id]
            chosen = places(
                [_way(of) for of in own],
                elsewhere=[_way(of) for of in others],
                count=config.places,
                seed=derived_seed(self._config.seed, "places", group_id),
                differences=differences,
            )
            rollouts += [
                self._branch(trunk, of[place], number=k + 1)
                for trunk, of, at in zip(members, own, chosen, strict=True)
                for place in at
                for k in range(config.forks)
            ]
        return rollouts

    async def _learning_calls(self, trunks: Sequence[Rollout]) -> dict[str, list[Call]]:
        """Attempt id → its calls to whose prompts another answer would be trained."""
        learns = partial(_learns, learners=self._config.learners(), routes=self._config.routes)
        return by_attempt(filter(learns, await self._store.calls(accepted_attempts(trunks))))

    async def _differences_before(self, step: int) -> Differences:
        """Where the returns of siblings differed in earlier steps. All of it follows from the store."""
        total = step - self._compared
        for done in range(total):
            if total > 1:
                self._watcher.doing(f"step {step + 1}: reading the branches of earlier steps", done, total)
            await self._compare(self._compared)
            self._compared += 1
        return self._differences

    async def _compare(self, step: int) -> None:
        """Compare the returns of the siblings of a step, by the reward from which their policy learns."""
        rollouts = await self._store.rollouts(where=Where(prefix=f"train-{step:05d}-"))
        branches = dict[str, list[str]]()  # the branching call → attempts of its branches
        for rollout in rollouts:
            if rollout.branch is not None and rollout.accepted_attempt_id is not None:
                branches.setdefault(str(rollout.branch.call_id), []).append(rollout.accepted_attempt_id)
        branched = {rollout.branch.attempt_id for rollout in rollouts if rollout.branch is not None}
        rewards = await self._store.rewards(accepted_attempts(rollouts))
        returns = {(reward.attempt_id, reward.name): reward.value for reward in rewards if reward.call_id is None}
        learners = self._config.learners()
        trunks = [rollout for rollout in rollouts if rollout.accepted_attempt_id in branched]
        for attempt_id, calls in (await self._learning_calls(trunks)).items():
            for depth, call in enumerate(calls):
                name = learners[call.policy].algorithm.reward
                others = [returns[a, name] for a in branches.get(call.id, ()) if (a, name) in returns]
                if others and (attempt_id, name) in returns:
                    self._differences.add(call.agent, depth, [*others, returns[attempt_id, name]])

    def _branch(self, trunk: Rollout, call: Call, *, number: int) -> Rollout:
        rollout_id = f"{trunk.id}-at{call.index + 1:02d}-{number}"
        branch = Branch(attempt_id=call.attempt_id, call_id=call.id)
        rollout = self._rollout(rollout_id, trunk.task, group_id=trunk.group_id, temperature=1.0)
        return replace(rollout, branch=branch)

    def _exam(self, tasks: Sequence[Task], *, version: int, mode: Mode) -> list[Rollout]:
        """Seeds do not depend on the version, so that two versions meet the same randomness."""
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
        self, rollout_id: str, task: Task, *, temperature: float, group_id: str = "", seed_of: str = ""
    ) -> Rollout:
        """Group and seed follow from the id, unless they are given."""
        seed = derived_seed(self._config.seed, seed_of or rollout_id)
        return Rollout(
            id=rollout_id,
            group_id=group_id or rollout_id,
            task=task,
            max_attempts=self._config.agent.max_attempts,
            timeout_s=self._config.agent.timeout_s,
            sampling={"temperature": temperature, "top_p": 1.0, "top_k": 0, "seed": seed},
            labels=tuple(self._config.agent.labels),
        )

    async def _finish(self, rollouts: Sequence[Rollout], *, version: int, what: str) -> list[Rollout]:
        """Enqueue the rollouts and wait until all have ended. Failed rollouts are returned too; it is an error only if
        all failed and none is a branch. If the weights `version` have been trained further already, nothing is
        enqueued: their records stay as they are, and failed rollouts are not repeated.
        """
        ids = [rollout.id for rollout in rollouts]
        if version >= self._checkpoints.published:
            await self._store.enqueue(rollouts)
        ended = await wait(
            self._store, ids, progress=lambda done: self._watcher.doing(f"{what}: running the agent", done, len(ids))
        )
        if all(rollout.status == "failed" and rollout.branch is None for rollout in ended):
            raise await self._all_failed(ids, what=what)
        return ended

    async def _try(self, count: int, what: str) -> list[Attempt]:
        tasks = self.heldout(min(count, self._config.tasks.heldout))
        rollouts = [replace(rollout, max_attempts=1) for rollout in self._exam(tasks, version=0, mode=MODES[0])]
        ids = [rollout.id for rollout in rollouts]
        await self._store.enqueue(rollouts)
        self._watcher.doing(f"trying {what}: does the agent call the model?")
        await wait(self._store, ids)
        return await self._store.attempts(ids)

    async def _has_calls(self, attempts: Sequence[Attempt]) -> bool:
        return bool(await self._store.calls([attempt.id for attempt in attempts]))

    async def _all_failed(self, rollout_ids: Sequence[str], *, what: str) -> AgentError | GraderError:
        """The error to raise when all rollouts failed: the most frequent first line, with an example's traceback."""
        errors = [attempt.error or "no error was given" for attempt in await self._store.attempts(rollout_ids)]
        line, count = Counter(error.splitlines()[0] for error in errors).most_common(1)[0]
        example = next(error for error in errors if error.startswith(line))
        kind = GraderError if line.startswith("GraderError") else AgentError
        hint = f"the agents' own output is in {self._folder / 'agents.log'}"
        if (self._folder / "config.toml").exists():
            resume = f"lightningrl train {self._folder}/config.toml --run-dir {self._folder} --resume"
            hint = f"nothing was lost: fix it, then `{resume}`; {hint}"
        return kind(f"all {len(rollout_ids)} rollouts of {what} failed; {count} times: {example}", hint=hint)


def _way(calls: Sequence[Call]) -> Way:
    lengths = np.array([len(call.completion_ids) for call in calls], np.float64)
    return Way(roles=[call.agent for call in calls], costs=np.cumsum(lengths[::-1])[::-1])


def _learns(call: Call, *, learners: Collection[str], routes: Sequence[RouteConfig]) -> bool:
    """Whether an answer to this call's prompt would be trained."""
    trains = partial(role_learns, routes=routes)
    return call.policy in learners and why_left_out(call, policy=call.policy, trains=trains) is None


def never_called(detail: str, *, log: Path) -> AgentError:
    """The error to raise when agents have ended without a call. `detail`: what they did instead."""
    source = "it must take its base URL from OPENAI_BASE_URL and its key from OPENAI_API_KEY, as OpenAI's SDKs do"
    return AgentError(
        f"the agent never called the model: {detail}",
        hint=f"{source} (docs/gateway.md); what it printed is in {log}",
    )
