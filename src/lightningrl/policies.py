"""Which weights does each policy train, and with which trainer? Models and learners are made here."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from lightningrl import plugins
from lightningrl.config import Config
from lightningrl.data.tasks import derived_seed
from lightningrl.engine.base import Engine
from lightningrl.engine.probe import SERVED_GAP
from lightningrl.engines import kept_at_service
from lightningrl.hosted.adapters import RemotePolicy
from lightningrl.hosted.service import Service, name_of
from lightningrl.learner import Learner, needs_critic
from lightningrl.models.base import Decoder
from lightningrl.models.devices import device_of, set_up
from lightningrl.models.load import export_folder, load_model, load_tokenizer


def set_up_devices(config: Config) -> str:
    """Set this process up for the devices of all policies. Returns their names, e.g. `cuda:0`. Raises `UserError` for
    one that this machine lacks.
    """
    devices = {device_of(learner.trainer.device) for learner in config.learners().values()}
    set_up(devices)
    return ", ".join(sorted(f"`{device}`" for device in devices))


def remote_policies(config: Config, folders: Mapping[str, Path], *, service: Service) -> dict[str, RemotePolicy]:
    """Policy → its adapter at the service. `folders`: model path → folder. A folder that says where
    a service keeps its weights is where the policy begins.
    """
    found: dict[str, RemotePolicy] = {}
    for index, (name, learner) in enumerate(config.learners().items()):
        settings, folder = learner.model, folders[learner.model.path]
        found[name] = RemotePolicy(
            service,
            base=name_of(config, settings.path),
            rank=settings.lora_rank,
            seed=derived_seed(config.seed, "adapter", index) % 2**31,
            near=SERVED_GAP[settings.dtype],
            begin=kept_at_service(folder),
        )
    return found


def load_models(config: Config, folders: Mapping[str, Path]) -> dict[str, Decoder]:
    """Policy → its model, on the policy's device. LoRA adapters of one model share its frozen weights. `folders`: model
    path → folder.
    """
    bases: dict[tuple[str, str, str], Decoder] = {}
    models: dict[str, Decoder] = {}
    for index, (name, learner) in enumerate(config.learners().items()):
        settings = learner.model
        path, device = str(folders[settings.path]), device_of(learner.trainer.device)
        if settings.lora_rank == 0:
            models[name] = load_model(path, dtype=settings.dtype, device=device)
            continue
        from lightningrl.models.lora import with_adapter  # peft takes longer to import than everything else

        key = (path, settings.dtype, str(device))
        if key not in bases:
            bases[key] = load_model(path, dtype=settings.dtype, device=device)
        seed = derived_seed(config.seed, "adapter", index)
        models[name] = with_adapter(bases[key], rank=settings.lora_rank, seed=seed)
    return models


def make_learners(
    config: Config,
    models: Mapping[str, Decoder | RemotePolicy],
    engines: Mapping[str, Engine],
    folders: Mapping[str, Path],
    *,
    compute: Executor,
    folder: Path,
    servers: Sequence[str],
) -> tuple[Learner, ...]:
    """One learner for each policy, in the order of the recipe. `compute`, `folder`, `servers` as in `Learner`."""
    learners: list[Learner] = []
    for name, settings in config.learners().items():
        make_trainer = plugins.load(settings.trainer.name, kind="trainer", root=config.root)
        tokenizer = load_tokenizer(str(folders[settings.model.path]))
        if isinstance(models[name], RemotePolicy):
            trainer = make_trainer(models[name], config=settings.trainer, loss=settings.loss, tokenizer=tokenizer)
        else:
            trainer = make_trainer(
                models[name],
                config=settings.trainer,
                loss=settings.loss,
                export=partial(export_folder, tokenizer=tokenizer),
                critic=needs_critic(settings),
            )
        learner = Learner(
            name,
            settings,
            engine=engines[name],
            trainer=trainer,
            compute=compute,
            folder=folder,
            checkpoints="checkpoints/step-{:05d}" + (f"/{name}" if len(models) > 1 else ""),
            kind="full" if models[name].adapter is None else "lora",
            routes=config.routes,
            root=config.root,
            shares_weights=config.engine.name in ("embedded", "tinker"),
            servers=servers,
        )
        learners.append(learner)
    return tuple(learners)
