"""Which engine answers for each policy? Engines are made here, where a run is put together."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightningrl import plugins
from lightningrl.chat import ChatTemplate
from lightningrl.config import BackendName, Config
from lightningrl.engine.base import Engine, EngineSetup
from lightningrl.engine.probe import SERVED_GAP
from lightningrl.engine.vllm_fleet import Fleet
from lightningrl.engine.vllm_owned import OwnedVLLM
from lightningrl.errors import LightningError, UserError
from lightningrl.gateway.routing import FROZEN, frozen
from lightningrl.gateway.scripted import ScriptedEngine
from lightningrl.hosted.adapters import RemoteModel, RemotePolicy
from lightningrl.hosted.kept import RECORD, Saved, read_saved
from lightningrl.hosted.service import Service, name_of
from lightningrl.trainer.base import TRAINER

MODEL_FILES = ("config.json", "adapter_config.json")


def model_paths(config: Config) -> dict[str, str]:
    """Each policy that needs an engine → its model, as the recipe names it (a folder or a hub id)."""
    weights = sorted({route.weights for route in config.routes if route.policy == FROZEN})
    learning = {name: learner.model.path for name, learner in config.learners().items()}
    return learning | {frozen(path): path or config.model.path for path in weights}


def check_served(config: Config) -> None:
    """Raises `UserError` if a policy needs other weights than the one model of the servers. A server holds one model,
    and adapters of all policies beside it.
    """
    if not (config.engine.urls or config.engine.owns_vllm):
        return
    learners, paths = config.learners(), model_paths(config)
    first = next(iter(learners))
    adapters = all(learner.model.lora_rank for learner in learners.values())
    for policy, path in paths.items():
        if policy == first or (path == paths[first] and adapters):
            continue
        hints: list[str] = []
        if path == paths[first]:
            hints.append("set `model.lora_rank=16`: one server then has the model and the adapters of all policies")
        if policy not in learners:
            hints.append("start a server for it, name it in `[upstreams.NAME]`, and route to `upstreams.NAME`")
        elif not hints:
            hints.append(
                "give all policies the same `model.path` and `model.lora_rank=16`, or set `engine.name=embedded`"
            )
        message = f"engine `{config.engine.name}` serves one model, but a route also needs `{policy}`"
        raise UserError(message, hint="; or ".join(hints))


def make_engines(
    config: Config,
    folders: Mapping[str, Path],
    *,
    template: ChatTemplate,
    models: Mapping[str, Any] | None = None,
    fleet: Fleet | None = None,
    root: Path | None = None,
) -> dict[str, Engine]:
    """Make the engine of each policy. `folders`: model path → folder. `models`: policy → the model that a trainer in
    this process updates. See `make_engine` for the rest.
    """
    check_served(config)
    models = models or {}
    service = next((model.service for model in models.values() if isinstance(model, RemotePolicy)), None)
    return {
        policy: make_engine(
            config,
            policy,
            folder=folders[path],
            template=template,
            model=models.get(policy),
            service=service,
            fleet=fleet,
            root=root,
        )
        for policy, path in model_paths(config).items()
    }


def make_engine(
    config: Config,
    policy: str,
    *,
    folder: Path,
    template: ChatTemplate,
    model: Any = None,
    service: Service | None = None,
    fleet: Fleet | None = None,
    root: Path | None = None,
) -> Engine:
    """Make the engine that answers for `policy` from the model in `folder`.

    A trainer in this process updates `model`; None: the engine loads `folder` itself. `service`: the session in which a
    hosted backend answers without a `model`; None: one of its own. `fleet`: the vLLM servers that
    the run owns. A plugin named by `engine.name` is imported from `root`; None: the recipe's folder.
    """
    learners = config.learners()
    learner = learners.get(policy, config)
    setup = EngineSetup(
        policy=policy,
        config=config.engine,
        folder=folder,
        dtype=learner.model.dtype,
        device=learner.trainer.device,
        decode=template.decode,
        turn_end_id=template.turn_end_id,
        model=model,
    )
    if model is None and config.backend == "tinker":
        setup = replace(setup, model=_untrained(config, policy, folder, near=SERVED_GAP[setup.dtype], service=service))
    if fleet is not None:
        return OwnedVLLM(setup, fleet=fleet, learns=policy in learners)
    return load_engine(setup, template=template, root=root or config.root)


def _untrained(config: Config, policy: str, folder: Path, *, near: float, service: Service | None) -> RemoteModel:
    """What answers at a service from `folder`, a version that it keeps or one of its models."""
    base = name_of(config, model_paths(config)[policy])
    return RemoteModel(service or Service(config.service), base=base, near=near, begin=kept_at_service(folder))


def kept_at_service(folder: Path) -> Saved | None:
    """The version that a service keeps for `folder`, a checkpoint or an exported adapter; None: it keeps none. Raises
    `UserError` for a checkpoint that was not finished.
    """
    saved = read_saved(folder / TRAINER) or read_saved(folder)
    if saved is not None and not saved.state:
        raise UserError(f"the checkpoint `{folder}` was not finished", hint="give an earlier one")
    return saved


def has_weights(folder: Path, *, backend: BackendName) -> bool:
    """Whether a backend can answer from a folder, a model or a checkpoint."""
    return any((folder / name).is_file() for name in (MODEL_FILES if backend == "local" else (RECORD,)))


def final_weights(folder: Path) -> Path:
    """The folder of the final weights, if `folder` is that of a run; otherwise `folder`."""
    return folder / "model" if (folder / "model").is_dir() else folder


def check_weights(folder: Path, *, backend: BackendName) -> None:
    """Raises `UserError` if `has_weights` does not hold."""
    if has_weights(folder, backend=backend):
        return
    if backend == "tinker":
        hint = "give a checkpoint of a run at this service; for a model folder, set `backend=local`"
        raise UserError(f"the service keeps nothing for `{folder}`", hint=hint)
    hint = "give a model folder (with a config.json), or the folder of a finished run"
    if has_weights(folder, backend="tinker"):
        hint = "its weights are at a service: set `backend=tinker`, or give the exported adapter, the run's `model`"
    raise UserError(f"no model at `{folder}`", hint=hint)


def load_engine(setup: EngineSetup, *, template: ChatTemplate, root: Path) -> Engine:
    """Import `engine.name` and call it. Under `pkg.module:attr` a class is an engine, any other callable a script."""
    name = setup.config.name
    try:
        plugin = plugins.load(name, kind="engine", root=root)
    except LightningError:
        raise
    except Exception as error:  # importing user code may raise anything
        message = f"engine `{name}` cannot be imported: `{type(error).__name__}`: {error}"
        raise UserError(message, hint=f"try `python -c 'import {name.partition(':')[0]}'`") from error
    if ":" not in name or isinstance(plugin, type):
        return plugin(setup)
    if not callable(plugin):
        hint = "name a class (an engine) or a function (a script)"
        raise UserError(f"engine `{name}` is a `{type(plugin).__name__}`", hint=hint)
    return ScriptedEngine(plugin, template, policy=setup.policy, name=name)
