"""Which loggers does a run have, and how do they begin and end with it?"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lightningrl import plugins
from lightningrl.config import Config
from lightningrl.loggers.base import Logger, Outcome, Run
from lightningrl.loggers.follow import Follower, Say
from lightningrl.loggers.notes import Notes
from lightningrl.look.redaction import redacted

CLOSE_S = 15.0
"""Time for all loggers together to finish after the end of the run, in seconds."""


def make_loggers(config: Config) -> dict[str, Logger]:
    """Name → logger. Raises `UserError` for an unknown name, a package that is missing, or a service without its key.
    Nothing is sent yet.
    """
    return {name: plugins.load(name, kind="logger", root=config.root)() for name in config.loggers}


@contextmanager
def shown_by(
    loggers: Mapping[str, Logger], config: Config, folder: Path, *, say: Say, close_s: float = CLOSE_S
) -> Iterator[None]:
    """Log the run in `folder` while the block runs. It is complete if the block does not raise."""
    followers = [Follower(name, logger, _run(name, config, folder), say=say) for name, logger in loggers.items()]
    for follower in followers:
        follower.start()
    try:
        yield
    except Exception as error:
        _end(followers, Outcome(ending="failed", result={}, error=str(error)), say=say, close_s=close_s)
        raise
    except BaseException:  # a signal
        _end(followers, Outcome(ending="stopped", result={}, error=""), say=say, close_s=close_s)
        raise
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    _end(followers, Outcome(ending="complete", result=result, error=""), say=say, close_s=close_s)


def _run(name: str, config: Config, folder: Path) -> Run:
    return Run(
        name=folder.resolve().name,
        project=config.name,
        folder=folder.resolve(),
        settings=redacted(config),
        notes=Notes(folder, name),
    )


def _end(followers: list[Follower], outcome: Outcome, *, say: Say, close_s: float) -> None:
    deadline = time.monotonic() + close_s
    for follower in followers:
        follower.end(outcome)
    for follower in followers:
        if not follower.wait(timeout_s=max(0.0, deadline - time.monotonic())):
            say(f"`{follower.name}` did not finish within {close_s:g} s; hint: `--resume` sends the rest")
