"""The table of docs/gpu.md: which models fit on which GPU, and how long a step takes, by the estimator."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from lightningrl.cli.bill import duration
from lightningrl.config import Config
from lightningrl.estimate import Estimate, estimate
from lightningrl.estimate.cards import CARDS
from lightningrl.estimate.layout import gpus_named
from lightningrl.estimate.workload import assumed
from lightningrl.models.sizes import Sizes, sizes_of
from lightningrl.recipe import make_config

MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "meta-llama/Llama-3.2-3B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B")
ORDER = ("t4", "l4", "4090", "a100", "h100")
PLACE = re.compile(r"(<!-- table: .*? -->)\n.*?(<!-- end of table -->)", re.DOTALL)


def page(root: Path) -> str:
    """The text of docs/gpu.md with a new table."""
    text = (root / "docs" / "gpu.md").read_text(encoding="utf-8")
    return PLACE.sub(lambda found: "\n".join((found[1], "", *_table(root), "", found[2])), text)


def _table(root: Path) -> Iterator[str]:
    names = [CARDS[key].name for key in ORDER]
    yield f"| model | what learns | {' | '.join(names)} |"
    yield "|---|---|" + "---|" * len(names)
    for model in MODELS:
        for learns, rank in (("LoRA, rank 16", 16), ("all weights", 0)):
            cells = [_cell(root, model, key, rank=rank) for key in ORDER]
            yield f"| {model.partition('/')[2]} | {learns} | {' | '.join(cells)} |"


def _cell(root: Path, model: str, key: str, *, rank: int) -> str:
    """Time of a step on one card, or on two with vLLM on the second; a dash if neither suffices."""
    for gpus, note in (([0], ""), ([1], ", two")):
        found = _estimate(root, model, key, rank=rank, gpus=gpus)
        if found.fits and found.seconds.total is not None:
            return f"{duration(found.seconds.total)}{note}"
    return "–"


def _estimate(root: Path, model: str, key: str, *, rank: int, gpus: list[int]) -> Estimate:
    config = _recipe(root, model, rank=rank, gpus=gpus, dtype="float16" if key == "t4" else "bfloat16")
    card = replace(CARDS[key], count=gpus_named(config))
    return estimate(config, {model: _sizes(model)}, card, work=assumed(source="docs/gpu.md"))


@cache
def _sizes(model: str) -> Sizes:
    return sizes_of(model, root=Path())


def _recipe(root: Path, model: str, **settings: Any) -> Config:
    tree = {
        "name": "table",
        "agent": {"entry": "agent:run", "reward": "agent:reward", "concurrency": 256},
        "tasks": {"source": "agent:tasks"},
        "model": {"path": model, "dtype": settings["dtype"], "lora_rank": settings["rank"]},
        "engine": {"name": "vllm", "gpus": settings["gpus"], "max_length": 4096},
        "trainer": {"device": "cuda", "minibatches": 2},
        "loop": {"tasks_per_step": 32, "group_size": 8},
    }
    return make_config(tree, [], folder=root, where="the table of docs/gpu.md")
