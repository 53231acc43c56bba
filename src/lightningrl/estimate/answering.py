"""Does a device hold the models of a recipe, if they only answer?"""

from collections.abc import Mapping

from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.estimate.cards import GIB, Card
from lightningrl.estimate.parts import GRADIENTS, MOMENTS, RESERVED, engine_parts, held_parts, total
from lightningrl.models.sizes import Sizes


def check_held(config: Config, sizes: Mapping[str, Sizes], card: Card) -> None:
    """Raises `UserError` for models that the device cannot hold: those of the trainer before its first step, and what
    the embedded engine adds.
    """
    held = [part for part in held_parts(config, sizes) if part.name not in (GRADIENTS, MOMENTS)]
    needed = total(held) + total(engine_parts(config, sizes)) + RESERVED[card.kind]
    if needed > card.memory_bytes:
        have = f"`{card.name}` has {card.memory_bytes / GIB:.1f} GiB"
        hint = "choose a smaller model, fewer `engine.slots`, a smaller `engine.max_length`, or a larger device"
        raise UserError(f"`{config.name}` needs at least {needed / GIB:.1f} GiB to answer, and {have}", hint=hint)
