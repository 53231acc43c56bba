"""Checks before a run starts: that names in the recipe exist, servers answer, memory suffices, and there are tasks.

Code that makes tasks may warn with `warnings.warn("text\nhint: what to do")`, for example about a line that it skips.
Each warning is shown once.
"""

import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from lightningrl import plugins
from lightningrl.algorithms.options import discount_of
from lightningrl.cli.console import say
from lightningrl.cli.hosted_checks import check_service
from lightningrl.config import Config
from lightningrl.data.tasks import asked, derived_seed, in_both_splits, load_tasks
from lightningrl.engine.vllm_flags import check_flags
from lightningrl.engine.vllm_package import require
from lightningrl.engines import check_served, model_paths
from lightningrl.errors import UserError, meant
from lightningrl.health import DISJOINT

CONNECT_S = 10.0
"""Timeout for a connection to a server."""
SHOWN = 5
"""Number of warnings that are shown; the others are counted."""
EXAMPLE = 200
"""Number of characters of a task that are shown."""
PORTS = {"http": 80, "https": 443}
NEEDS = {
    "vllm": "start vLLM there, on a machine with a GPU (docs/engines.md); without a GPU, "
    "use `engine.name=embedded` and a small model",
}
"""Engine → hint if its server cannot be reached."""


def check_names(config: Config) -> None:
    """Raises `UserError` for the first unknown implementation, or for options that a credit does not take."""
    _check_name("engine", config.engine.name, key="engine.name", root=config.root)
    for index, rule in enumerate(config.air):
        _check_name("air", rule.rule, key=f"air.{index}.rule", root=config.root)
    for index, name in enumerate(config.loggers):
        _check_name("logger", name, key=f"loggers.{index}", root=config.root)
    policies = {f"policies.{name}.": learner for name, learner in config.learners().items()} if config.policies else {}
    for section, learner in {"": config, **policies}.items():
        _check_name("trainer", learner.trainer.name, key=f"{section}trainer.name", root=config.root)
        _check_name("advantage", learner.algorithm.advantage, key=f"{section}algorithm.advantage", root=config.root)
        _check_name("credit", learner.algorithm.credit, key=f"{section}algorithm.credit", root=config.root)
    for section, learner in (policies or {"": config}).items():
        with _naming(f"{section}algorithm.credit_options"):
            discount_of(learner.algorithm, root=config.root)


def _check_name(kind: str, name: str, *, key: str, root: Path) -> None:
    """Load `pkg.module:attr`. Built-in names are only looked up, as some are slow to load."""
    if name in plugins.names(kind):
        return
    if ":" not in name:
        hint = f"{meant(name, plugins.names(kind))}; or `pkg.module:attr`"
        raise UserError(f"unknown {kind} `{name}` in `{key}`", hint=hint)
    with _naming(key):
        plugins.load(name, kind=kind, root=root)


@contextmanager
def _naming(key: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"`{key}`: {error.message}", hint=error.hint) from error


def check_servers(config: Config) -> None:
    """Raises `UserError` for the first server in `engine.urls` that takes no connection, if the run is to start its own
    vLLM and none is installed, or if the servers cannot answer for all policies. The embedded engine has no server.
    A hosted backend has one service: see `hosted_checks`.
    """
    if config.engine.name == "embedded":
        return
    if config.backend == "tinker":
        check_service(config)
        return
    check_served(config)
    if config.engine.owns_vllm:
        check_flags(config.engine.flags)
        require(config.vllm_python)
    for url in config.engine.urls:
        try:
            parts = urlsplit(url)
            address = (parts.hostname or "", parts.port or PORTS.get(parts.scheme, 80))
            socket.create_connection(address, timeout=CONNECT_S).close()
        except ValueError as error:
            hint = "write it as `http://host:port`"
            raise UserError(f"`{url}` in `engine.urls` is not the address of a server", hint=hint) from error
        except OSError as error:
            hint = NEEDS.get(config.engine.name, "start it, or name another in `engine.urls`")
            missing = f"no server for engine `{config.engine.name}` at `{url}`"
            raise UserError(f"{missing}: {error.strerror or error}", hint=hint) from error


def check_device(config: Config) -> None:
    """Raises `UserError` if a policy asks for a GPU that this machine lacks. A hosted backend needs none."""
    if config.backend == "tinker":
        return
    gpus = {learner.trainer.device for learner in config.learners().values()} - {"auto", "cpu"}
    if gpus:
        from lightningrl.models.devices import device_of  # loads torch

        for name in sorted(gpus):
            device_of(name)


def check_memory_of(config: Config, *, training: bool = True) -> None:
    """Raises `UserError` for a recipe that this machine's memory cannot train, or not even hold if there is no
    `training`. Loads torch, but no weights. With a hosted backend, no model is on this machine.
    """
    if config.backend == "tinker":
        return
    from lightningrl.estimate import check_memory
    from lightningrl.estimate.answering import check_held
    from lightningrl.estimate.machine import this_machine
    from lightningrl.models.sizes import sizes_of_all

    sizes, card = sizes_of_all(model_paths(config).values(), root=config.root), this_machine(config, timed=False)
    (check_memory if training else check_held)(config, sizes, card)


def check_tasks(config: Config, splits: Sequence[str], *, console: Console) -> None:
    """Raises `UserError` for a split without tasks. If both splits are needed, warns of tasks that are in both."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            for split in splits:
                load_tasks(config.tasks, split, seed=config.tasks.seed, count=1, root=config.root)
            if {"train", "heldout"} <= set(splits):
                _warn_of_shared(config)
        finally:
            _show(list(dict.fromkeys(str(warning.message) for warning in caught)), console)


def _warn_of_shared(config: Config) -> None:
    """Warn of tasks in both splits. Of a function, only the tasks of the first step are checked; the metric
    `tasks/heldout` counts the others.
    """
    first = derived_seed(config.seed, "train", 0)
    shared = in_both_splits(config.tasks, seed=first, count=config.loop.tasks_per_step, root=config.root)
    if shared:
        example = asked(shared[0]).decode()
        if len(example) > EXAMPLE:
            example = f"{example[:EXAMPLE]}…"
        warnings.warn(
            f"{len(shared)} held-out tasks are also training tasks, such as `{example}`\nhint: {DISJOINT}", stacklevel=2
        )


def _show(messages: Sequence[str], console: Console) -> None:
    told = [message.partition("\nhint: ") for message in messages]
    for text, _, _ in told[:SHOWN]:
        say(console, ("warning: ", "bold yellow"), text)
    if len(told) > SHOWN:
        say(console, ("warning: ", "bold yellow"), f"… and {len(told) - SHOWN:,} more of this kind")
    for hint in dict.fromkeys(hint for _, _, hint in told if hint):
        say(console, ("hint: ", "yellow"), hint)
