"""Does a recipe fit in a device's memory, and which settings make it fit?"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.estimate.cards import GIB, Card
from lightningrl.estimate.layout import host_bytes, resting_bytes, vllm_parts
from lightningrl.estimate.memory import memory_of, placed_on, taken_beside
from lightningrl.estimate.parts import RESERVED, chosen_forests, computing_parts, engine_parts, held_parts, total
from lightningrl.estimate.workload import assumed
from lightningrl.models.sizes import Sizes

Changes: TypeAlias = Mapping[str, Any]
"""Key of a setting → another value."""
HOST_SHARE = 0.8
"""Share of the machine's memory for weights that have left the GPU; agents and processes have the rest."""
SHORTEST = 1024
"""A shorter `engine.max_length` is not proposed."""


def check_memory(config: Config, sizes: Mapping[str, Sizes], card: Card) -> None:
    """Raises `UserError` for a recipe that cannot run on the device at all, with the settings that would fit.

    What must fit is what trainer and engine hold, and one call of `engine.max_length` tokens: larger batches are split.
    """
    check_host(config, sizes, card)
    needed = least_bytes(config, sizes, card)
    if needed <= card.memory_bytes:
        return

    def fits(other: Config) -> bool:  # as `--estimate` sees it, which counts whole forests
        found = memory_of(other, sizes, card, work=assumed(source=""))
        counted = found.needed_bytes if found.owned else total(found.trainer)
        return max(counted, least_bytes(other, sizes, card)) <= card.memory_bytes

    found = changes_that_fit(config, card, fits)
    hint = f"this would fit: {overrides(found)}" if found else "choose a smaller model, or a larger device"
    where = f"`{card.name}` has {card.memory_bytes / GIB:.1f} GiB"
    raise UserError(
        f"`{config.name}` needs at least {needed / GIB:.1f} GiB, and {where}",
        hint=f"{hint}; `lightningrl train RECIPE --estimate` shows every part",
    )


def check_host(config: Config, sizes: Mapping[str, Sizes], card: Card) -> None:
    """Raises `UserError` if the machine cannot hold the weights that leave the GPU while the trainer has it."""
    placed = placed_on(config, card)
    if placed is None or card.host_bytes is None or not card.is_gpu:
        return
    needed = host_bytes(config, sizes, placed)
    if needed > HOST_SHARE * card.host_bytes:
        message = f"vLLM's weights take {needed / GIB:.1f} GiB of the machine's memory while the trainer has the GPU"
        hint = "choose a smaller model, give vLLM a GPU of its own, or set `engine.sleep=off`"
        raise UserError(f"{message}, and it has {card.host_bytes / GIB:.1f} GiB", hint=hint)


def least_bytes(config: Config, sizes: Mapping[str, Sizes], card: Card) -> int:
    """Bytes without which no step can be taken."""
    held, engine, placed = held_parts(config, sizes), engine_parts(config, sizes), placed_on(config, card)
    others = total(engine) + RESERVED[card.kind]
    serving = 0
    if placed is not None and bool(placed.gpus) == card.is_gpu:
        server = vllm_parts(config, sizes, placed, memory_bytes=card.memory_bytes, resting=False)
        others += taken_beside(placed, server)
        serving = total(server) + (resting_bytes(config, sizes, kind=card.kind) if placed.shared else 0)
    call = config.engine.max_length
    forests = chosen_forests(config, sizes, card, held=held, others=others, wanted=call)
    work = assumed(calls=1, prompt_tokens=0, completion_tokens=call, source="")
    training = total(held) + others + total(computing_parts(config, sizes, forests, card=card, work=work))
    return max(training, serving)


def changes_that_fit(config: Config, card: Card, fits: Callable[[Config], bool]) -> Changes | None:
    """The fewest changes of settings with which the recipe fits; None if there are none. Among equally many, those that
    cost the least come first.
    """
    options = [[None, *((key, value) for value in values)] for key, values in _options(config, card).items()]

    def cost(choice: tuple[int, ...]) -> tuple[Any, ...]:
        """Number of changes; then the settings that change, the first of them first; then how much they change."""
        places = [place for place, value in enumerate(choice) if value]
        return len(places), places, choice

    for choice in sorted(itertools.product(*map(range, map(len, options))), key=cost)[1:]:
        chosen = [option[value] for option, value in zip(options, choice, strict=True)]
        changes = dict(change for change in chosen if change is not None)
        if fits(changed(config, changes)):
            return changes
    return None


def changed(config: Config, changes: Changes) -> Config:
    """The recipe with other settings."""
    tree = config.model_dump()
    for key, value in changes.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    return Config.model_validate(tree)


def overrides(changes: Changes) -> str:
    """The changes, as the command line takes them."""
    return "`" + " ".join(f"{key}={value}" for key, value in changes.items()) + "`"


def _options(config: Config, card: Card) -> Mapping[str, list[Any]]:
    """Settings that take less memory, from the one that costs least to the one that costs most, each with its values
    from large to small.
    """
    first, engine = next(iter(config.learners().values())), config.engine
    tokens = first.trainer.max_tokens
    embedded, owned = engine.name == "embedded", config.engine.owns_vllm
    options: dict[str, list[Any]] = {
        "trainer.checkpointing": ["on"] if first.trainer.checkpointing == "off" else [],
        "trainer.max_tokens": ["auto"] if tokens != "auto" else [],
        "engine.sleep": ["auto"] if engine.sleep == "off" and owned else [],
        "engine.cache_gib": ["auto"] if engine.cache_gib != "auto" and owned else [],
        "engine.slots": list(_halves(engine.slots, least=4)) if embedded else [],
        "model.dtype": ["bfloat16" if card.bfloat16 else "float16"] if first.model.dtype == "float32" else [],
        "model.lora_rank": [16] if first.model.lora_rank == 0 else [],
        "engine.max_length": list(_halves(engine.max_length, least=SHORTEST)),
    }
    return options


def _halves(value: int, *, least: int) -> Iterator[int]:
    """Half of a value, half of that, and so on."""
    while value // 2 >= least:
        value //= 2
        yield value
