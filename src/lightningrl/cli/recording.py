"""What does a recorded run need to be played back without its model? The settings of its gateway, and its tokenizer.

`lightningrl run` writes the settings to `recording.toml`; a training run has them in its `config.toml`.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.recipe import make_config
from lightningrl.replays.tokenizer import tokenizer_folder
from lightningrl.store import open_records
from lightningrl.store.place import found_at
from lightningrl.types import Call

FILE = "recording.toml"
SETTINGS = "config.toml"
KEPT: dict[str, Any] = {
    "name": True,
    "model": {"path"},
    "engine": {"max_length"},
    "gateway": {"history", "strict"},
    "agent": {"env", "may_reward"},
    "routes": True,
    "upstreams": True,
    "policies": True,
}
"""The settings that answers follow from."""
PROGRAM = ["CMD"]
"""In place of the recorded command, which may have secrets in it. It is not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cassette:
    """A recorded run that answers in place of a model."""

    folder: Path
    url: str
    """Of its store."""
    config: Config
    """The settings of the run that answers follow from. There are no upstreams: nothing is asked of them."""
    template: Path
    """Folder of the tokenizer and chat template."""


def save_recording(config: Config, folder: Path, *, template: Path) -> None:
    """Write the settings of a run into its folder. `template`: folder of the tokenizer and chat template."""
    tree = _kept(config)
    tree["model"]["path"] = str(template.resolve())
    (folder / FILE).write_text(tomli_w.dumps(tree), encoding="utf-8")


def cassette_at(path: Path) -> Cassette:
    """The recording in the folder of a run, or beside its store. Raises `UserError` if something of it is missing."""
    file, url = found_at(path)
    config = _settings(file.parent)
    template = tokenizer_folder(config, file.parent)
    return Cassette(folder=file.parent, url=url, config=config.model_copy(update={"upstreams": {}}), template=template)


async def calls_of(recording: Cassette) -> list[Call]:
    """All complete calls of all attempts, in the order in which they began. Raises `UserError` if there are none.

    A call that a branch has played back is left out if the call itself is there.
    """
    records = await open_records(recording.url)
    try:
        rollouts = await records.rollouts()
        attempts = await records.attempts([rollout.id for rollout in rollouts])
        calls = await records.calls([attempt.id for attempt in attempts])
    finally:
        await records.close()
    branches = {rollout.id for rollout in rollouts if rollout.branch is not None}
    of_branches = {attempt.id for attempt in attempts if attempt.rollout_id in branches}
    there = {call.id for call in calls}
    again = {call.id for call in calls if call.attempt_id in of_branches and call.replays in there}
    complete = [call for call in calls if call.capture != "incomplete" and call.id not in again]
    if not complete:
        hint = "give a run whose agent has called a model: `lightningrl rollouts RUN` lists the calls"
        raise UserError(f"`{recording.folder}` has no complete call to play back", hint=hint)
    return sorted(complete, key=lambda call: call.started_at)


def _settings(folder: Path) -> Config:
    file = next((folder / name for name in (FILE, SETTINGS) if (folder / name).is_file()), None)
    if file is None:
        hint = "an older version recorded it: record it again with `lightningrl run`"
        raise UserError(f"`{folder}` has no {FILE}, which says how it was recorded", hint=hint)
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read `{file}`: {error}", hint="record it again with `lightningrl run`") from error
    config = make_config(tree, [], folder=folder, where=str(file))
    return make_config({**_kept(config), "root": str(config.root)}, [], folder=folder, where=str(file))


def _kept(config: Config) -> dict[str, Any]:
    tree = config.model_dump(mode="json", exclude_none=True, include=KEPT)
    return {**tree, "agent": {**tree["agent"], "command": PROGRAM}}
