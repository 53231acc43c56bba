"""How long may a sequence be? The length up to which a token's rotary angles depend on its position alone.

Two kinds of rotary embeddings change the angles of all tokens once a pass has a longer sequence than they were trained
for: longrope (arXiv 2402.13753) and dynamic NTK. Engine and trainer see the same tokens in passes of different lengths,
so they agree below that length only.
"""

from typing import Any

UNLIMITED = 1 << 30
"""For a model that names no limit, such as a Mamba."""


def longest(config: Any) -> int:
    """The longest sequence, in tokens, that a model of this configuration (of Hugging Face) can have."""
    text = config.get_text_config()
    limit: int = getattr(text, "max_position_embeddings", None) or UNLIMITED
    for rotary in _rotaries(text):
        if rotary.get("rope_type") == "longrope":
            original = rotary.get("original_max_position_embeddings") or text.original_max_position_embeddings
            limit = min(limit, original)
    return limit


def depends_on_length(config: Any) -> bool:
    """Whether rotary angles change beyond `longest`."""
    kinds = {rotary.get("rope_type") for rotary in _rotaries(config.get_text_config())}
    return not kinds.isdisjoint({"longrope", "dynamic"})


def _rotaries(text: Any) -> list[dict[str, Any]]:
    """The parameters of each kind of rotary embedding; a model may have one for each type of layer."""
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]
