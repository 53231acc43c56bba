"""What is anything called? A name is two parts; which names are held out follows from a hash of the whole, so that no part is new to anybody."""

import zlib
from collections.abc import Mapping
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["person", "town", "firm"]

PARTS: Mapping[Kind, tuple[str, str]] = {
    "person": (
        "ada amos ben beth carl cleo dan dora emil eva finn gia hugo ida jon kira leo mira nils olga paul quin rosa sam tara uma vera walt yara zeno",
        "adler bauer clark cohen drake dunn ellis engel frost grant hale irwin jonas kern lang moss nolan otto pike quist reed shaw tate unger voss "
        "webb yates york zander zorn",
    ),
    "town": (
        "north south east west upper lower little great grey white black green silver iron oak elm pine birch maple willow",
        "ford ham mill field bridge gate haven hill wood port side well cross bay dale moor lake cliff marsh glen",
    ),
    "firm": (
        "apex bolt cobalt delta echo falcon gamma helix indigo jade kappa lotus metro nova omega pixel quartz rapid solar titan",
        "works labs foods tools lines media motors paper rail textiles toys glass bank press steel energy crafts farms games optics",
    ),
}
"""First and second parts of the names of each kind. No part is in two of the lists, nor among the words of passages and questions."""

HELDOUT_SHARE = 5
"""One in this many is held out."""


def names(kind: Kind, *, heldout: bool) -> list[str]:
    """All names of a kind that belong to the split."""
    first, second = PARTS[kind]
    combined = (f"{a} {b}" for a in first.split() for b in second.split())
    return [name for name in combined if is_heldout(name) == heldout]


def is_heldout(structure: str) -> bool:
    return zlib.crc32(structure.encode()) % HELDOUT_SHARE == 0
