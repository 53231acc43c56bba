"""LoRA adapters (arXiv 2106.09685): several policies share one frozen model, each with a small adapter of its own.

    y = W x + s B A x        W frozen; A random and B zero at first, so an adapter begins as the model itself;
                             s = alpha / rank

Every linear layer of the decoder's blocks has one, except for routers. The experts of a mixture whose matrices are one
tensor stay as they are.

The layers are peft's, so its folders can be read and written. A `DenseModel` does their arithmetic itself: one product
is added into the other's result, without the checks of a general layer (measured by benchmarks/adapter.py).

A and B are float32, whatever the dtype of W: updates at usual learning rates are far below the resolution of bfloat16
and would be rounded away. Products and files have the dtype of W.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from lightningrl.errors import UserError
from lightningrl.models.any_hf import AnyHF
from lightningrl.models.base import Decoder
from lightningrl.models.dense import DenseModel, Project, project
from lightningrl.models.folder import check_files
from lightningrl.models.load import check_finite, misfit

ROUTERS = ("gate", "shared_expert_gate")
"""Names of linear layers that choose or weigh experts, besides those with `router` in their names. vLLM adapts none of
them.
"""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = "default"
"""Name of the adapter within peft's layers."""


def with_adapter(model: Decoder, *, rank: int, seed: int = 0) -> Decoder:
    """A new model: the tensors of `model`, frozen from now on, and a trainable adapter on every layer of
    `adaptable_layers` (alpha = 2·rank). The same seed gives the same adapter; torch's global generator is left as it
    was.
    """
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=_targets(model.hf), task_type="CAUSAL_LM", inference_mode=False
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _adapted(model, config)


def load_adapter(model: Decoder, folder: Path) -> Decoder:
    """A new model: the tensors of `model`, frozen from now on, and the adapter in a folder. Raises `UserError`."""
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"cannot read `{folder / CONFIG}`: {error}",
            hint="give a folder that peft or `lightningrl export` has written",
        ) from error
    if not isinstance(config, LoraConfig) or config.modules_to_save:
        raise UserError(
            f"`{folder}` is more than a plain LoRA adapter",
            hint="train one with LoRA on the projections alone, or merge it",
        )
    config.inference_mode = False  # it may be trained further
    adapted = _adapted(model, config)
    load_adapter_into(adapted, folder)
    return adapted


@torch.no_grad()
def load_adapter_into(model: Decoder, folder: Path) -> None:
    """Copy the adapter in a folder into that of `model`, in place: all that share it see the new values."""
    check_files(folder)
    try:
        loaded = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot read `{folder / WEIGHTS}`: {error}",
            hint="an adapter's folder holds its configuration and its weights",
        ) from error
    mine = _tensors(model)
    if wrong := misfit(mine, loaded):
        raise UserError(
            f"the adapter in `{folder}` does not fit the model: `{wrong}`",
            hint="same base, same rank, same projections",
        )
    check_finite(loaded.items(), str(folder))
    for name, tensor in mine.items():
        tensor.copy_(loaded[name])


def save_adapter(model: Decoder, folder: Path) -> None:
    """Write an adapter as peft does, into an existing folder, and the generation configuration: stop tokens are then
    known without the base model.
    """
    base = model.hf.config.name_or_path
    settings = model.adapter.to_dict() | {
        "base_model_name_or_path": (str(Path(base).resolve()) if Path(base).is_dir() else base) or None,
        "inference_mode": True,
    }
    ordered = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    (folder / CONFIG).write_text(json.dumps(ordered, indent=2, sort_keys=True), encoding="utf-8")
    tensors = {name: tensor.detach().to(model.dtype).contiguous() for name, tensor in _tensors(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if model.hf.generation_config is not None:
        model.hf.generation_config.save_pretrained(folder)


def _adapted(model: Decoder, config: LoraConfig) -> Decoder:
    if model.adapter is not None:
        raise UserError(
            "the model has an adapter already",
            hint="give `lora_rank = 0` to keep training it, or name its base for a new one",
        )
    tensors = (*model.hf.parameters(), *model.hf.buffers())
    hf = copy.deepcopy(model.hf, {id(tensor): tensor for tensor in tensors})  # new modules around the same tensors
    try:
        inject_adapter_in_model(config, hf, adapter_name=NAME)
    except ValueError as error:  # no module to adapt
        raise UserError(
            f"the adapter does not fit the model: {error}", hint="give the adapter's own base model"
        ) from error
    _check(hf, adaptable_layers(model.hf))
    for layer in _layers(hf).values():
        for matrices in (layer.lora_A, layer.lora_B):
            matrices[NAME].to(torch.promote_types(model.dtype, torch.float32))
    if isinstance(model, AnyHF):
        return AnyHF(hf, shape=model.shape, adapter=config, base=model)
    return DenseModel(hf, project=_projection(hf), adapter=config, base=model)


def adaptable_layers(hf: Any) -> list[str]:
    """The names of the linear layers in the decoder's blocks, but for routers and the output of a Mamba's mixer, whose
    kernels take its matrix as it is (peft refuses it, too).
    """
    inside = set(hf.get_decoder().modules()) - {hf.get_output_embeddings()}
    linear = [name for name, module in hf.named_modules() if type(module) is nn.Linear and module in inside]
    mixers = {name.rpartition(".")[0] for name, _ in hf.named_modules() if name.endswith(".conv1d")}
    left_out = {f"{mixer}.out_proj" for mixer in mixers}
    return [name for name in linear if not _routes(name) and name not in left_out]


def _routes(name: str) -> bool:
    """Whether a layer is a router, or a part of one."""
    return any("router" in part or part in ROUTERS for part in name.split("."))


def _targets(hf: Any) -> list[str]:
    """The adaptable layers as peft's and vLLM's configurations name them: the last part, if that says which."""
    names = adaptable_layers(hf)
    if not names:
        raise UserError(
            f"models of type `{hf.config.model_type}` have no linear layers for an adapter",
            hint="set `model.lora_rank` to 0",
        )
    last = {name.rpartition(".")[2] for name in names}
    same = [name for name, _ in hf.named_modules() if name.rpartition(".")[2] in last]
    return sorted(last) if sorted(same) == sorted(names) else names


def _check(hf: Any, adaptable: list[str]) -> None:
    """Raises `UserError` for an adapter of other layers, or one that `_projection` would compute wrongly."""
    layers = _layers(hf)
    for name, parameter in hf.named_parameters():
        if not parameter.requires_grad:
            continue
        layer = layers.get(name.rsplit(".lora_", 1)[0])
        if (
            layer is None
            or name.rsplit(".lora_", 1)[0] not in adaptable
            or layer.lora_variant
            or layer.lora_bias[NAME]
            or layer.fan_in_fan_out
        ):
            raise UserError(
                f"`{name}` is more than a plain LoRA adapter",
                hint="train one with LoRA on the projections alone, or merge it",
            )


def _projection(hf: Any) -> Project:
    """A `Project` that looks up each layer's tensors in a table."""
    numbers = {
        layer: (base.weight, base.bias, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, layer.scaling[NAME])
        for layer in _layers(hf).values()
        for base in [layer.get_base_layer()]
    }

    def adapted(module: Any, x: Tensor) -> Tensor:
        known = numbers.get(module)
        if known is None:
            return project(module, x)
        weight, bias, down, up, scale = known
        if down.dtype != x.dtype:
            down, up = down.to(x.dtype), up.to(x.dtype)
        return F.linear(x, weight, bias).addmm_(F.linear(x, down), up.t(), alpha=scale)

    return adapted


def _layers(hf: Any) -> dict[str, Any]:
    return {name: module for name, module in hf.named_modules() if type(module) is Linear}


def _tensors(model: Decoder) -> dict[str, Tensor]:
    """The adapter's tensors by the names that peft gives them in a file."""
    return {
        f"base_model.model.{name}.{part}.weight": matrices[NAME].weight
        for name, layer in _layers(model.hf).items()
        for part, matrices in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
    }
