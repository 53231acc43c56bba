"""Which weights answered a recorded call, and are they still there? The engines that answer the same calls afresh."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from lightningrl.chat import ChatTemplate
from lightningrl.checkpoints import damage
from lightningrl.config import Config
from lightningrl.engine.base import Engine
from lightningrl.engines import check_weights, final_weights, has_weights, make_engine, model_paths
from lightningrl.errors import UserError
from lightningrl.replays.recording import Course, Recording
from lightningrl.types import Call

WITHOUT = "`--checkpoint FOLDER` answers with another model, and `--answer` with `--no-engine` needs none"


@asynccontextmanager
async def engines_of(
    folders: Mapping[str, Path], run: Recording, template: ChatTemplate
) -> AsyncIterator[dict[str, Engine]]:
    """An engine for each policy. `folders`: of their weights."""
    async with AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        for policy, folder in folders.items():
            engines[policy] = make_engine(run.config, policy, folder=folder, template=template)
            stack.push_async_callback(engines[policy].close)
        yield engines


async def folders_of(run: Recording, trunk: Course, place: Call, *, checkpoint: Path | None) -> dict[str, Path]:
    """Policy → the folder of the weights with which it answered the trunk. `checkpoint`: a model folder, or the folder
    of a run, in their place. Raises `UserError` for weights that are gone, and for a `checkpoint` that nothing uses.
    """
    config, found = run.config, dict[str, Path]()
    scripted = ":" in config.engine.name
    if checkpoint is not None and (scripted or not any(call.policy in config.learners() for call in trunk.calls)):
        what = f"`{config.engine.name}` answers" if scripted else "no policy that learns answered this rollout"
        hint = "leave it out" + ("; `engine.name=embedded` answers with a model" if scripted else "")
        raise UserError(f"`--checkpoint` has no effect: {what}", hint=hint)
    for policy, path in model_paths(config).items():
        if scripted:
            found[policy] = config.root / path
        elif policy not in config.learners():
            found[policy] = _initial(config, path)
        elif checkpoint is not None:
            found[policy] = _inside(final_weights(checkpoint), policy, several=len(config.learners()) > 1).resolve()
            check_weights(found[policy], backend=config.backend)
        else:
            versions = [call.policy_version for call in trunk.calls if call.policy == policy]
            version = max(versions, default=place.policy_version)
            found[policy] = await _recorded(run, policy, version=version)
    return found


async def _recorded(run: Recording, policy: str, *, version: int) -> Path:
    """The folder of a version of a policy: its checkpoint, the run's result, or the model before training."""
    several = len(run.config.learners()) > 1
    checkpoint = _inside(run.folder / f"checkpoints/step-{version:05d}", policy, several=several)
    if damage(checkpoint, policy=policy, version=version) is None:
        return checkpoint
    latest = await run.records.weights(policy)
    result = _inside(run.folder / "model", policy, several=several)
    if latest is not None and latest.version == version and has_weights(result, backend=run.config.backend):
        return result
    if version == 0:
        return _initial(run.config, model_paths(run.config)[policy])
    kept = ", ".join(map(str, _kept(run.folder)))
    message = f"version {version} of `{policy}`, which answered, is gone: a run keeps its latest versions"
    raise UserError(message, hint=f"versions that are there: {kept}; {WITHOUT}")


def _inside(folder: Path, policy: str, *, several: bool) -> Path:
    return folder / policy if several else folder


def _initial(config: Config, path: str) -> Path:
    """The model before training."""
    from lightningrl.models.load import local_folder  # loads torch, as the engine does

    return Path(local_folder(path, root=config.root, weights=config.backend == "local"))


def _kept(folder: Path) -> list[int]:
    """The versions whose weights should be there: checkpoints, and the model before training."""
    names = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*")]
    return sorted({0} | {int(name) for name in names if name.isdecimal()})
