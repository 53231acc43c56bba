"""All words of the tasks. Splits hold out combinations of words, never a word."""

from typing import Literal, TypeAlias

Form: TypeAlias = Literal["same", "upper", "code"]

CHILDREN = ("book", "song", "film", "game", "boat", "plane", "horse", "bike")
"""Tables that refer to other tables."""

PARENTS = ("author", "singer", "team", "club", "farm", "shop", "school", "museum")
"""Tables that others refer to."""

LABELS = ("name", "title", "label", "nickname")
"""Columns with unique values. No question mentions a value of theirs."""

TEXTS: tuple[tuple[tuple[str, str], tuple[str, ...]], ...] = (
    (("city", "town"), ("paris", "rome", "oslo", "cairo", "lima")),
    (("color", "paint"), ("orange", "blue", "green", "black", "white")),
    (("status", "state"), ("ready", "closed", "waiting", "lost", "sold")),
    (("genre", "style"), ("jazz", "opera", "comedy", "drama", "poetry")),
    (("material", "fabric"), ("wood", "steel", "glass", "cotton", "silk")),
    (("country", "nation"), ("france", "norway", "egypt", "peru", "japan")),
)
"""Two names for one column, and its possible values."""

INTEGERS: tuple[tuple[str, str], ...] = (
    ("price", "cost"),
    ("rating", "score"),
    ("weight", "mass"),
    ("size", "area"),
    ("speed", "pace"),
    ("power", "strength"),
)
"""Two names for one column of numbers."""

NUMBERS = range(1, 60)
"""The values of number columns."""


def stored(word: str, form: Form) -> str:
    """A word as the database spells it: `paris`, `PARIS` or `PAR`."""
    return {"same": word, "upper": word.upper(), "code": word[:3].upper()}[form]
