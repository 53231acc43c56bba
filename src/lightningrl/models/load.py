"""Load models from Hugging Face folders or hub ids, and export them as Hugging Face folders.

A folder with an `adapter_config.json` holds an adapter and names its base model.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import logging as hub_logging
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from lightningrl.errors import UserError
from lightningrl.models.base import Decoder
from lightningrl.models.dense import DenseModel
from lightningrl.models.devices import CPU
from lightningrl.models.families import decoder_of
from lightningrl.models.folder import check_files, whole_folder
from lightningrl.models.tensors import read, stored_in, weight_files

transformers_logging.disable_progress_bar()  # the library never prints
transformers_logging.set_verbosity_error()  # missing weights and wrong shapes are errors here
hub_logging.set_verbosity_error()  # it would tell of every retry; what fails in the end is an error here

ADAPTER = "adapter_config.json"
WEIGHTS = "*.safetensors"
FILES = ["*.json", WEIGHTS, "*.jinja", "*.txt"]
"""What is downloaded of a hub id."""
DTypeName: TypeAlias = Literal["float32", "bfloat16", "float16", "float64"]


def local_folder(path: str, *, root: Path, weights: bool = True) -> str:
    """The model's folder on this machine: `path` relative to `root`, or the files of a hub id, downloaded once. Without
    `weights`, only its tokenizer and configuration.
    """
    beside = root / Path(path).expanduser()
    if beside.is_dir():
        if weights:
            check_files(beside)
        return str(beside)
    if looks_local(path):
        raise no_folder(beside)
    try:
        return snapshot_download(path, allow_patterns=FILES if weights else [name for name in FILES if name != WEIGHTS])
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UserError(
            f"cannot get `{path}` from the hub: {first_line(error)}",
            hint="check the id and the network, or give a local folder",
        ) from error


def is_here(path: str, *, root: Path) -> bool:
    """Whether `local_folder` finds the weights without a download: in a folder, or all of them in the hub's cache."""
    if (root / Path(path).expanduser()).is_dir():
        return True
    if looks_local(path):
        return False
    try:
        files = weight_files(Path(snapshot_download(path, allow_patterns=FILES, local_files_only=True)))
    except (OSError, ValueError):  # nothing of it is in the cache
        return False
    return bool(files) and all(file.is_file() for file in files)


def load_model(path: str, *, dtype: DTypeName = "float32", device: torch.device = CPU) -> Decoder:
    """The causal LM in a local folder or of a hub id. Tensors go from the file to `device` one by one, without a model
    on the host in between. Raises `UserError` if it cannot be loaded.
    """
    if looks_local(path) and not Path(path).is_dir():
        raise no_folder(Path(path))
    if is_adapter(path):
        from lightningrl.models.lora import load_adapter  # peft takes 1.5 s to import

        return load_adapter(load_model(base_of(Path(path)), dtype=dtype, device=device), Path(path))
    if Path(path).is_dir():
        check_files(Path(path))
    try:
        return decoder_of(_checked(path, dtype, device).eval())
    except UserError:
        raise
    except Exception as error:
        hint = (
            "a model folder holds config.json, model.safetensors and the tokenizer's files; "
            "a hub id needs the network once"
        )
        raise UserError(f"cannot load a model from `{path}`: {first_line(error)}", hint=hint) from error


def _checked(path: str, dtype: DTypeName, device: torch.device) -> Any:
    """The transformers module. Raises `UserError` where transformers would use random weights: missing or misshapen."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=getattr(torch, dtype),
        device_map={"": device},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    (hf, info), hint = loaded, "export the folder again, or check what config.json says"
    if info["mismatched_keys"]:
        name, found, wanted = min(info["mismatched_keys"])
        raise UserError(
            f"`{name}` in `{path}` has the shape {list(found)}, config.json asks for {list(wanted)}", hint=hint
        )
    if info["missing_keys"]:
        raise UserError(f"the weights in `{path}` lack `{min(info['missing_keys'])}`", hint=hint)
    check_finite(hf.named_parameters(), path)
    return hf


def load_tokenizer(path: str) -> Any:
    """The `transformers` tokenizer of a model folder or hub id."""
    hint = "put tokenizer.json and tokenizer_config.json beside the weights"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise UserError(f"cannot load a tokenizer from `{path}`: {first_line(error)}", hint=hint) from error
    if len(tokenizer) < 2:  # without its files, transformers makes an empty one
        raise UserError(f"cannot load a tokenizer from `{path}`: there is none", hint=hint)
    return tokenizer


def check_finite(tensors: Iterable[tuple[str, Tensor]], path: str) -> None:
    """Raises `UserError` for the first tensor with NaN or infinity; generations would fail without a reason."""
    for name, tensor in tensors:
        if not all(math.isfinite(extreme) for extreme in torch.aminmax(tensor.detach())):  # keeps NaN; no copies
            raise UserError(
                f"`{name}` in `{path}` holds values that are not finite",
                hint="copy or download the model again; was its training sound?",
            )


def misfit(mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str | None:
    """The first name, in alphabetical order, that only one side has or whose shapes differ. None: they fit."""
    wrong = (k for k in {*mine, *other} if k not in mine or k not in other or mine[k].shape != other[k].shape)
    return min(wrong, default=None)


def is_adapter(path: str) -> bool:
    return (Path(path) / ADAPTER).is_file()


@torch.no_grad()
def load_into(model: Decoder, path: str) -> Decoder:
    """Copy a folder's weights into the parameters of `model`, in place: all that share them see the new values.

    Returns the model to use. An adapter is copied into the adapter of `model`; if `model` has none, the result is a new
    model with one, over the unchanged tensors of `model`.
    """
    if is_adapter(path):
        from lightningrl.models.lora import load_adapter, load_adapter_into

        if model.adapter is None:
            return load_adapter(model, Path(path))
        load_adapter_into(model, Path(path))
        return model
    if model.adapter is not None:
        raise UserError(
            f"the weights in `{path}` are no adapter", hint="serve weights that were trained from the same model"
        )
    if _stream_into(model, Path(path)):
        return model
    other = load_model(path, dtype=_dtype_name(model.dtype)).hf.state_dict()
    mine = model.hf.state_dict()
    if wrong := misfit(mine, other):
        raise UserError(
            f"the weights in `{path}` do not fit the model: `{wrong}`",
            hint="serve weights that were trained from the same model",
        )
    for name, value in mine.items():
        value.copy_(other[name])
    return model


def _stream_into(model: Decoder, folder: Path) -> bool:
    """Copy the folder's tensors into those of `model`, one at a time. False, and nothing is copied, unless they fit one
    for one: `load_model` then says why, or converts them (some families have other tensors in files than in memory).
    """
    if not isinstance(model, DenseModel) or not folder.is_dir():
        return False
    check_files(folder)
    try:
        stored = stored_in(*weight_files(folder))
    except (OSError, ValueError, LookupError):
        return False
    mine = dict(model.hf.named_parameters())  # a tied tensor once, as in a file
    if {name: tuple(p.shape) for name, p in mine.items()} != {name: t.shape for name, t in stored.items()}:
        return False
    check_finite(read(stored), str(folder))  # all of them first, so that nothing is copied from a damaged folder
    for name, tensor in read(stored):
        mine[name].copy_(tensor)
    return True


def export_folder(model: Decoder, path: Path, *, tokenizer: Any) -> None:
    """Write weights, configuration and tokenizer as a Hugging Face folder, complete or absent. With an adapter,
    only the adapter is written.
    """
    with whole_folder(path) as draft:
        if model.adapter is None:
            model.hf.save_pretrained(draft)
        else:
            from lightningrl.models.lora import save_adapter

            save_adapter(model, draft)
        tokenizer.save_pretrained(draft)


def base_of(folder: Path) -> str:
    """The base model of an adapter: a folder (relative to the adapter's), or a hub id."""
    file = folder / ADAPTER
    try:
        named = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"cannot read `{file}`: {first_line(error)}", hint="give a folder that peft has written"
        ) from error
    if not named:
        raise UserError(f"`{file}` does not say which model it adapts", hint="put it into `base_model_name_or_path`")
    beside = folder / named
    return str(beside) if beside.is_dir() else named


def no_folder(path: Path) -> UserError:
    """The error for a path without a model."""
    hint = "give a Hugging Face folder or a hub id such as `Qwen/Qwen3-0.6B`"
    return UserError(f"no model folder at `{path}`", hint=hint)


def looks_local(path: str) -> bool:
    """Whether a path names a folder, not a hub id."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or path.endswith("/")


def first_line(error: Exception) -> str:
    """The first line of an error's text, with the error's type unless it is an `OSError` or `ValueError`."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {line}"


def _dtype_name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")
