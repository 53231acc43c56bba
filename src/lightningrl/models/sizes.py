"""How many numbers does a model have, and which ones does a token compute? From its config.json alone.

The transformers module is made on torch's meta device, where tensors have shapes but no memory. So the count is exact
for every family, and takes a moment for any size. `known.json` has what decides the sizes of some public models, so
that they can be estimated without a network.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightningrl.errors import UserError
from lightningrl.models.footprint import Shape, shape_of
from lightningrl.models.load import ADAPTER, base_of, first_line, is_adapter, looks_local, no_folder

KNOWN = Path(__file__).with_name("known.json")
CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A model's numbers, counted."""

    shape: Shape
    parameters: int
    """All numbers; those that embeddings and LM head share count once."""
    computed: int
    """Numbers that each token is multiplied with: without embeddings and LM head, and of a mixture of experts only the
    share that a token is routed to.
    """
    adapted: int
    """Sum of inputs and outputs of all linear layers that an adapter adapts: its numbers per rank."""
    rank: int = 0
    """Rank of the adapter in the folder; 0: it holds none."""


def sizes_of(path: str, *, root: Path) -> Sizes:
    """The sizes of a model folder (relative to `root`) or hub id; of an adapter's folder, those of its base. Raises
    `UserError` if its configuration cannot be read.
    """
    beside = root / Path(path).expanduser()
    if beside.is_dir() and is_adapter(str(beside)):
        rank = json.loads((beside / ADAPTER).read_text(encoding="utf-8"))["r"]
        return replace(sizes_of(base_of(beside), root=beside), rank=rank)
    return _counted(_config(path, root=root))


def known_models() -> list[str]:
    """Hub ids of the models whose sizes need no network, one of each size."""
    return [entry["ids"][0] for entry in json.loads(KNOWN.read_text(encoding="utf-8"))]


def sizes_of_all(paths: Iterable[str], *, root: Path) -> dict[str, Sizes]:
    """Path → sizes."""
    return {path: sizes_of(path, root=root) for path in dict.fromkeys(paths)}


def _config(path: str, *, root: Path) -> Any:
    """The configuration in a folder, in the hub's cache, in `known.json`, or downloaded: the first that there is."""
    beside = root / Path(path).expanduser()
    if beside.is_dir():
        return _read(str(beside))
    if looks_local(path):
        raise no_folder(beside)
    try:
        return _read(str(Path(hf_hub_download(path, CONFIG, local_files_only=True)).parent))
    except (OSError, ValueError):  # not in the cache
        pass
    for entry in json.loads(KNOWN.read_text(encoding="utf-8")):
        if path in entry["ids"]:
            return AutoConfig.for_model(**entry["config"])
    try:
        return _read(str(Path(hf_hub_download(path, CONFIG)).parent))
    except (OSError, ValueError, HfHubHTTPError) as error:
        hint = "check the id and the network, or give a local folder"
        raise UserError(
            f"cannot get the config.json of `{path}` from the hub: {first_line(error)}", hint=hint
        ) from error


def _read(folder: str) -> Any:
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        hint = "a model folder holds a config.json that transformers can read"
        raise UserError(f"cannot read the configuration in `{folder}`: {first_line(error)}", hint=hint) from error


def _counted(config: Any) -> Sizes:
    try:
        with torch.device("meta"):
            hf: Any = AutoModelForCausalLM.from_config(config)
    except ValueError as error:  # not a language model
        hint = "`model.path` names a causal language model"
        raise UserError(
            f"cannot estimate a model of type `{config.model_type}`: {first_line(error)}", hint=hint
        ) from error
    head = hf.get_output_embeddings()
    apart = {id(p) for module in (hf.get_input_embeddings(), head) for p in module.parameters()}
    text = config.get_text_config()
    inside = set(hf.get_decoder().modules()) - {head}
    linear = [m for name, m in hf.named_modules() if type(m) is nn.Linear and m in inside and not _is_router(name)]
    return Sizes(
        shape=shape_of(config),
        parameters=sum(p.numel() for p in hf.parameters()),
        computed=sum(int(p.numel() * _share(text, name)) for name, p in hf.named_parameters() if id(p) not in apart),
        adapted=sum(m.in_features + m.out_features for m in linear),
    )


def _is_router(name: str) -> bool:
    """Whether a linear layer chooses experts: it gets no adapter (see `lora`)."""
    return name.rpartition(".")[2] in ("gate", "router", "shared_expert_gate")


def _share(config: Any, name: str) -> float:
    """The share of a parameter that one token computes: below 1 for experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((count for name in names if (count := getattr(config, name, None))), None)
    return config.num_experts_per_tok / experts if experts and ".experts." in name else 1.0
