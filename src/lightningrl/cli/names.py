"""Is everything there that a recipe names? Asked before a run begins: one that broke off at its first step would have
cost minutes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightningrl import plugins
from lightningrl.algorithms.options import discount_of
from lightningrl.config import Config
from lightningrl.errors import UserError, meant


def check_names(config: Config) -> None:
    """Raises `UserError` for the first name of an implementation that nobody knows, or a credit that is given other
    options than it takes.
    """
    _check("engine", config.engine.name, key="engine.name", root=config.root)
    for index, rule in enumerate(config.air):
        _check("air", rule.rule, key=f"air.{index}.rule", root=config.root)
    policies = {f"policies.{name}.": learner for name, learner in config.learners().items()} if config.policies else {}
    for section, learner in {"": config, **policies}.items():
        _check("trainer", learner.trainer.name, key=f"{section}trainer.name", root=config.root)
        _check("advantage", learner.algorithm.advantage, key=f"{section}algorithm.advantage", root=config.root)
        _check("credit", learner.algorithm.credit, key=f"{section}algorithm.credit", root=config.root)
    for section, learner in (policies or {"": config}).items():
        with _said_of(f"{section}algorithm.credit_options"):
            discount_of(learner.algorithm, root=config.root)


def _check(kind: str, name: str, *, key: str, root: Path) -> None:
    """A recipe's own function is loaded; what is built in is there, and may be slow to load."""
    if name in plugins.names(kind):
        return
    if ":" not in name:
        raise UserError(
            f"unknown {kind} `{name}` in `{key}`", hint=f"{meant(name, plugins.names(kind))}; or `pkg.module:attr`"
        )
    with _said_of(key):
        plugins.load(name, kind=kind, root=root)


@contextmanager
def _said_of(key: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"`{key}`: {error.message}", hint=error.hint) from error
