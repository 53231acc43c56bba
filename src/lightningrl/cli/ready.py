"""Can it start? Asked before anything is loaded: whether the engine's servers answer, and whether there are tasks.

Whatever makes tasks warns as Python does, `warnings.warn("text\nhint: what to do")`, of lines of a file that it leaves
out, say. It is shown once.
"""

import socket
import warnings
from collections.abc import Sequence
from urllib.parse import urlsplit

from rich.console import Console

from lightningrl.cli.console import say
from lightningrl.config import Config
from lightningrl.data.tasks import asked, derived_seed, in_both_splits, load_tasks
from lightningrl.errors import UserError

CONNECT_S = 10.0
"""What a server gets to take a connection."""
SHOWN = 5
"""Warnings that are shown word by word; of the others there is a count."""
EXAMPLE = 200
"""Characters of a task that are shown."""
DISJOINT = "held-out reward tells what was learnt only if held-out tasks are not trained on: give the splits inputs of their own"
PORTS = {"http": 80, "https": 443}
NEEDS = {
    "vllm": "start vLLM there, on a machine with a GPU (docs/engines.md); without one: `engine.name=embedded`, with a model that is small enough",
}
"""Engine → what to do if its server is not there."""


def check_servers(config: Config) -> None:
    """Raises `UserError` for the first server of the engine that takes no connection."""
    for url in config.engine.urls:
        try:
            parts = urlsplit(url)
            socket.create_connection(
                (parts.hostname or "", parts.port or PORTS.get(parts.scheme, 80)), timeout=CONNECT_S
            ).close()
        except ValueError as error:
            raise UserError(
                f"`{url}` in `engine.urls` is not the address of a server", hint="write it as `http://host:port`"
            ) from error
        except OSError as error:
            hint = NEEDS.get(config.engine.name, "start it, or name another in `engine.urls`")
            raise UserError(
                f"no server for engine `{config.engine.name}` at `{url}`: {error.strerror or error}", hint=hint
            ) from error


def check_tasks(config: Config, splits: Sequence[str], *, console: Console) -> None:
    """Raises `UserError` for a split that has no task. Where both splits are needed, says which tasks are in both."""
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
    """Of what a function makes, the tasks of the first step are looked at; the others are counted as they come
    (`tasks/heldout`).
    """
    first = derived_seed(config.seed, "train", 0)
    shared = in_both_splits(config.tasks, seed=first, count=config.loop.tasks_per_step, root=config.root)
    if shared:
        example = asked(shared[0]).decode()
        example = example if len(example) <= EXAMPLE else f"{example[:EXAMPLE]}…"
        warnings.warn(
            f"{len(shared)} held-out tasks are training tasks, too, such as `{example}`\nhint: {DISJOINT}", stacklevel=2
        )


def _show(messages: Sequence[str], console: Console) -> None:
    told = [message.partition("\nhint: ") for message in messages]
    for text, _, _ in told[:SHOWN]:
        say(console, ("warning: ", "bold yellow"), text)
    if len(told) > SHOWN:
        say(console, ("warning: ", "bold yellow"), f"… and {len(told) - SHOWN:,} more of this kind")
    for hint in dict.fromkeys(hint for _, _, hint in told if hint):
        say(console, ("hint: ", "yellow"), hint)
