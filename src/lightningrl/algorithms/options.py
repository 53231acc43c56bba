"""Bind the options of a recipe's credit. They are checked against its signature before anything runs."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from lightningrl import plugins
from lightningrl.algorithms.credit import Credit
from lightningrl.config import AlgorithmConfig
from lightningrl.errors import UserError, meant
from lightningrl.types import Trajectory

BoundCredit: TypeAlias = Callable[[Sequence[Trajectory]], list[Credit]]
ROOT = "root"
"""A parameter of this name is not an option: it gets the recipe's folder."""


def bound_credit(algorithm: AlgorithmConfig, *, root: Path | None = None) -> BoundCredit:
    """The recipe's credit with its options bound. Raises `UserError` for an unknown, missing or mistyped option."""
    credit = plugins.load(algorithm.credit, kind="credit", root=root)
    parameters = [p for p in inspect.signature(credit, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]
    options = {p.name: p for p in parameters if p.name != ROOT}
    given = dict(algorithm.credit_options)
    known = "known: " + ", ".join(f"`{name}`" for name in options) if options else "it has no options"
    for name in given:
        if name not in options:
            raise UserError(
                f"credit `{algorithm.credit}` has no option `{name}`", hint=meant(name, options) if options else known
            )
    for name, option in options.items():
        if name not in given and option.default is option.empty:
            raise UserError(
                f"credit `{algorithm.credit}` needs `{name}`",
                hint=f"set it: `algorithm.credit_options.{name}=…`; {known}",
            )
        if name in given and not _fits(given[name], option.annotation):
            raise UserError(
                f"`{name}` of credit `{algorithm.credit}` is `{given[name]}`",
                hint=f"it must be a {option.annotation.__name__}",
            )
    bound = partial(credit, **given, root=root) if any(p.name == ROOT for p in parameters) else partial(credit, **given)
    if ":" not in algorithm.credit:
        bound([])  # raises now, not after the first batch, if a number is out of range
    return bound


def discount_of(algorithm: AlgorithmConfig, *, root: Path | None = None) -> float:
    """The γ of the recipe's credit; 1 if it has none. Shaping must use the same γ.

    `gae_calls` counts steps over calls with a value, which shaping cannot know in advance, so only γ = 1 is allowed
    there.
    """
    options = inspect.signature(bound_credit(algorithm, root=root)).parameters
    discount = float(options["discount"].default) if "discount" in options else 1.0
    if algorithm.shaping == "potential" and algorithm.credit == "gae_calls" and discount != 1:
        message = f"`shaping` is `potential`, and credit `gae_calls` has `discount = {discount:g}`"
        raise UserError(message, hint='set `discount = 1`, or `shaping = "additive"`')
    return discount


def _fits(value: float | str, wanted: Any) -> bool:
    """Whether a value has the annotated type. Parameters without an annotation accept any value."""
    return not (wanted is float and isinstance(value, str)) and not (wanted is str and not isinstance(value, str))
