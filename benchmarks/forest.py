"""Speed of forest training against the usual ways to pack an agent's calls: same model, same loss, same gradient.

    python benchmarks/forest.py [--rollouts 24] [--repeats 5]

    calls     one call per row, sorted by length and padded, causal SDPA
    linear    the calls of each rollout merged into one row, sorted and padded, causal SDPA; every history is a prefix
    forest    every unique prefix once

All three run the same layers on one thread, and compute logits only where a token is trained. The gradients are
compared first. Times are CPU seconds: the best of the repeats, which take turns. Prints a table and writes
benchmarks/results/forest.json.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightningrl.config import LossConfig
from lightningrl.data.forest import Forest, Lesson, build_forest, read_ids
from lightningrl.models.base import PLAIN, Attend, Style
from lightningrl.models.dense import DenseModel
from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import build_model
from lightningrl.models.varlen_attention import by_forest_attention
from lightningrl.trainer.logprobs import term_logprobs, unique_rows
from lightningrl.trainer.losses import Terms, ppo_clip
from lightningrl.types import Transition

VOCAB, PROMPT, COMPLETION, FEEDBACK = 1300, 150, 24, 24
TURNS, GROUPS = (1, 3, 6, 10), (1, 8)
ROW_TOKENS = 8192
"""Padded tokens per batch of rows: small enough for rows of similar length, large enough to amortise the overhead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Padded rows as a forest, so that all code after the attention is shared."""

    forest: Forest
    width: int


def episodes(*, rollouts: int, group: int, turns: int, seed: int = 0) -> list[list[Lesson]]:
    """[rollout][call]; lengths vary by a quarter."""
    rng = np.random.default_rng(seed)

    def text(mean: int) -> list[int]:
        return rng.integers(0, VOCAB, rng.integers(mean * 3 // 4, mean * 5 // 4 + 1)).tolist()

    made: list[list[Lesson]] = []
    for task in range(rollouts // group):
        prompt = text(PROMPT)
        for member in range(group):
            history, calls = list(prompt), []
            for turn in range(turns):
                completion = text(COMPLETION)
                calls.append(_lesson(f"{task}/{member}/{turn}", history, completion, rng))
                history = history + completion + text(FEEDBACK)
            made.append(calls)
    return made


def _lesson(name: str, prompt: list[int], completion: list[int], rng: np.random.Generator) -> Lesson:
    C = len(completion)
    transition = Transition(
        call_id=name,
        parent_call_id=None,
        agent="",
        policy_version=0,
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.full(C, -np.log(VOCAB), np.float32),
        reward=None,
    )
    rollout_id = name.rpartition("/")[0]
    advantages = rng.normal(size=C).astype(np.float32)
    return Lesson(
        rollout_id=rollout_id, group_id="g", transition=transition, advantages=advantages, weights=np.full(C, 1e-3)
    )


def padded_rows(rows: Sequence[list[Lesson]]) -> list[Rows]:
    """One row per list of lessons, the sequence of its last call; sorted by length and cut into batches."""
    batches: list[list[list[Lesson]]] = [[]]
    for row in sorted(rows, key=lambda r: len(read_ids(r[-1].transition))):
        if batches[-1] and (len(batches[-1]) + 1) * len(read_ids(row[-1].transition)) > ROW_TOKENS:
            batches.append([])
        batches[-1].append(row)
    return [_pad(batch) for batch in batches]


def _pad(batch: list[list[Lesson]]) -> Rows:
    width = max(len(read_ids(row[-1].transition)) for row in batch)
    token_ids = np.zeros((len(batch), width), np.int32)
    sources: list[np.ndarray] = []
    for b, row in enumerate(batch):
        ids = read_ids(row[-1].transition)
        token_ids[b, : len(ids)] = ids
        sources += [b * width + len(le.transition.prompt_ids) - 1 + np.arange(len(le.weights)) for le in row]
    lessons = [le for row in batch for le in row]
    terms = build_forest(lessons)  # for its terms, in the order of the lessons
    forest = replace(
        terms,
        token_ids=token_ids.reshape(-1),
        positions=np.tile(np.arange(width, dtype=np.int32), len(batch)),
        sources=np.concatenate(sources).astype(np.int32),
        states=np.array([own[0] for own in sources], np.int32),
    )
    return Rows(forest=forest, width=width)


def causal(width: int) -> Attend:
    """Causal attention over rows of `width` tokens. Padding is on the right, so causality masks it."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style = PLAIN) -> Tensor:
        Q, K, V = (x.view(-1, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(Q, K, V, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(q.shape)

    return attend


def forward_backward(model: DenseModel, forest: Forest, attend: Attend) -> None:
    hidden = model.hidden(torch.from_numpy(forest.token_ids), torch.from_numpy(forest.positions), attend)
    rows = unique_rows(forest, dtype=torch.float32, device=model.device)
    logprobs, _ = term_logprobs(model.logits(hidden.index_select(0, rows.sources)), rows)
    old, A, w = (torch.from_numpy(x).float() for x in (forest.logprobs, forest.advantages, forest.weights))
    losses, _ = ppo_clip(Terms(logprobs=logprobs, old_logprobs=old, advantages=A), LossConfig())
    torch.autograd.backward((losses * w).sum())


def ways(model: DenseModel, rollouts: list[list[Lesson]]) -> dict[str, Callable[[], None]]:
    """Name → function from lessons to gradient, packing included."""

    def rows(made: list[list[Lesson]]) -> None:
        for batch in padded_rows(made):
            forward_backward(model, batch.forest, causal(batch.width))

    def forest() -> None:
        made = build_forest([le for calls in rollouts for le in calls])
        attend = by_forest_attention(made.starts, made.parents, made.positions, model=model)
        forward_backward(model, made, attend)

    return {
        "calls": lambda: rows([[le] for calls in rollouts for le in calls]),
        "linear": lambda: rows(rollouts),
        "forest": forest,
    }


def gradient(model: DenseModel, way: Callable[[], None]) -> Tensor:
    model.hf.zero_grad()
    way()
    return torch.cat([p.grad.reshape(-1) for p in model.hf.parameters()])


def measure(model: DenseModel, *, turns: int, group: int, rollouts: int, repeats: int) -> dict[str, Any]:
    made = episodes(rollouts=rollouts, group=group, turns=turns)
    contenders = ways(model, made)
    expected = gradient(model, contenders["calls"])
    errors = {
        name: float((gradient(model, way) - expected).norm() / expected.norm()) for name, way in contenders.items()
    }
    assert max(errors.values()) < 1e-4, errors
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, way in contenders.items():
            model.hf.zero_grad()
            began = time.process_time()
            way()
            best[name] = min(best[name], time.process_time() - began)
    flat = [le for calls in made for le in calls]
    tokens = {
        "calls": sum(len(read_ids(le.transition)) for le in flat),
        "linear": sum(len(read_ids(calls[-1].transition)) for calls in made),
        "forest": len(build_forest(flat).token_ids),
    }
    return {"turns": turns, "group": group, "seconds": best, "tokens": tokens, "gradient_error": errors}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    model = build_model(VOCAB)
    found: list[dict[str, Any]] = []
    print("turns group |   calls  linear  forest (ms) | forest is … times as fast as calls, linear")
    for group in GROUPS:
        for turns in TURNS:
            row = measure(model, turns=turns, group=group, rollouts=arguments.rollouts, repeats=arguments.repeats)
            found.append(row)
            ms = {name: 1e3 * s for name, s in row["seconds"].items()}
            times = f"{ms['calls']:7.0f} {ms['linear']:7.0f} {ms['forest']:7.0f}"
            print(f"{turns:5} {group:5} | {times}      | {_ratios(row)}", flush=True)
    result = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": 1,
        "rollouts": arguments.rollouts,
        "rows": found,
    }
    path = Path(__file__).parent / "results" / "forest.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _ratios(row: dict[str, Any]) -> str:
    s = row["seconds"]
    return f"{s['calls'] / s['forest']:6.2f}x {s['linear'] / s['forest']:6.2f}x"


if __name__ == "__main__":
    main()
