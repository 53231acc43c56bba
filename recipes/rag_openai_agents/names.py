"""The names of people, towns and firms. A name has two parts. A hash of the whole name decides whether it is held out,
so every part occurs in training.
"""

import zlib
from collections.abc import Mapping
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["person", "town", "firm"]

PARTS: Mapping[Kind, tuple[str, str]] = {
    "person": (
        "ada amos anna beth boris carl clara cleo dan dora edgar emil enid eva felix finn gia greta gus hanna hugo "
        "ida ines jack jon judith kira kurt lena leo lucy marc mira nadia nils nora olga otis paul petra quin ralph "
        "rita rosa sam seth sofia tara theo tilda uma urban vera victor walt wanda xenia yara yves zeno zora",
        "abel adler bauer becker bishop bloom clark cohen conrad dietz drake dunn ellis engel evans fabian fischer "
        "frost grant gruber hale hoffman irwin jansen jonas keller kern klein lang larsen lorenz maier moss murphy "
        "nagel nolan norris olsen otto parker pike quist ramsey reed roth sachs shaw simon tanner tate unger vogel "
        "voss wagner webb yates york zander ziegler zorn",
    ),
    "town": (
        "north south east west upper lower little grand grey white black green silver golden iron copper oak elm "
        "pine birch maple willow ash cedar hazel rose thorn stone sand clay snow rain wolf fox bear hawk raven swan "
        "otter badger",
        "ford ham mill field bridge gate haven hill wood port side well cross bay dale moor lake cliff marsh glen "
        "croft wick combe hurst leigh stead worth mouth pool brook burn fell ridge vale heath grove meadow holm "
        "ness thorpe",
    ),
    "firm": (
        "apex argon atlas bolt cobalt comet delta drift echo ember falcon fathom gamma garnet helix hydra indigo "
        "ivory jade jet kappa krypton lotus lunar metro mono nova nimbus omega onyx pixel prism quartz quantum "
        "rapid rocket solar sigma titan turbo",
        "works labs foods tools lines media motors paper rail textiles toys glass bank press steel energy crafts "
        "farms games optics cables ceramics clocks engines fabrics furniture gears lamps leather machines maps "
        "metals mining oils paints pumps robots sails ships tyres",
    ),
}
"""First and second parts of the names of each kind. No part is in two lists, or a word of a passage or question."""

HELDOUT_SHARE = 5
"""One name in this many is held out."""


def names(kind: Kind, *, heldout: bool) -> list[str]:
    """All names of a kind that belong to the split."""
    first, second = PARTS[kind]
    combined = (f"{a} {b}" for a in first.split() for b in second.split())
    return [name for name in combined if is_heldout(name) == heldout]


def is_heldout(structure: str) -> bool:
    return zlib.crc32(structure.encode()) % HELDOUT_SHARE == 0
