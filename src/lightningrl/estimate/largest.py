"""Which of the known models is the largest that this machine can train?"""

from pathlib import Path

from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.estimate.cards import Card
from lightningrl.estimate.fit import check_host
from lightningrl.estimate.machine import this_machine
from lightningrl.estimate.memory import memory_of
from lightningrl.estimate.workload import assumed
from lightningrl.models.sizes import known_models, sizes_of_all
from lightningrl.recipe import make_config

RANK = 16
"""Rank of the adapters."""


def largest(card: Card, *, rank: int) -> str | None:
    """Hub id of the largest known model that a card trains: with a vLLM that the run owns on GPUs, and in float32 with
    the embedded engine on CPUs. `rank`: of its adapter; 0: all weights learn. None: none fits.
    """
    sizes = sizes_of_all(known_models(), root=Path())
    for model in sorted(sizes, key=lambda model: sizes[model].parameters, reverse=True):
        config = _recipe(model, rank=rank, card=card)
        try:
            check_host(config, sizes, card)
        except UserError:
            continue
        if memory_of(config, sizes, card, work=assumed(source="")).needed_bytes <= card.memory_bytes:
            return model
    return None


def card_here() -> Card:
    """The device that `trainer.device = "auto"` takes."""
    return this_machine(_recipe(known_models()[0], rank=0, card=None), timed=False)


def _recipe(model: str, *, rank: int, card: Card | None) -> Config:
    dtype, engine = "float32", "embedded"
    if card is not None and card.is_gpu:
        dtype, engine = "bfloat16" if card.bfloat16 else "float16", "vllm"
    tree = {
        "name": "largest",
        "agent": {"entry": "agent:run", "reward": "agent:reward"},
        "tasks": {"source": "agent:tasks"},
        "model": {"path": model, "dtype": dtype, "lora_rank": rank},
        "engine": {"name": engine, "slots": 16, "max_length": 4096},
    }
    return make_config(tree, [], folder=Path(), where="the doctor's recipe")
