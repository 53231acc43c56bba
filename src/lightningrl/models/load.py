"""Where do weights come from, and where do they go? Hugging Face folders in (or hub ids), Hugging Face folders out."""

from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from lightningrl.errors import UserError
from lightningrl.models.dense import DenseModel, check_family
from lightningrl.models.folder import whole_folder

transformers_logging.disable_progress_bar()  # the library never prints

DTypeName: TypeAlias = Literal["float32", "bfloat16", "float64"]


def local_folder(path: str, *, root: Path) -> str:
    """Where the model is on this machine: a folder (relative to `root`), or a hub id's files, which are downloaded once."""
    beside = root / Path(path).expanduser()
    if beside.is_dir():
        return str(beside)
    if _looks_local(path):
        raise UserError(f"no model folder at `{beside}`", hint="give a Hugging Face folder or a hub id such as `Qwen/Qwen3-0.6B`")
    try:
        return snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"])
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UserError(
            f"cannot get `{path}` from the hub: {_first_line(error)}", hint="check the id and the network, or give a local folder"
        ) from error


def load_model(path: str, *, dtype: DTypeName = "float32") -> DenseModel:
    """The causal LM in a local folder, or behind a hub id. Raises `UserError` for whatever is wrong with it."""
    if _looks_local(path) and not Path(path).is_dir():
        raise UserError(f"no model folder at `{path}`", hint="give a Hugging Face folder or a hub id such as `Qwen/Qwen3-0.6B`")
    try:
        check_family(AutoConfig.from_pretrained(path))
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), output_loading_info=True)
    except (OSError, ValueError) as error:  # what transformers raises for missing files, unknown architectures and the hub being away
        hint = "a model folder holds config.json, model.safetensors and the tokenizer's files; a hub id needs the network once"
        raise UserError(f"cannot load a model from `{path}`: {_first_line(error)}", hint=hint) from error
    hf, info = loaded
    if info["missing_keys"]:  # transformers would go on with random numbers
        raise UserError(f"the weights in `{path}` lack `{min(info['missing_keys'])}`", hint="export the folder again, or check what config.json says")
    return DenseModel(hf.eval())


def load_tokenizer(path: str) -> Any:
    """The `transformers` tokenizer of a model folder or hub id."""
    hint = "put tokenizer.json and tokenizer_config.json beside the weights"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load a tokenizer from `{path}`: {_first_line(error)}", hint=hint) from error
    if len(tokenizer) < 2:  # transformers makes up an empty one when the files are missing but config.json is there
        raise UserError(f"cannot load a tokenizer from `{path}`: there is none", hint=hint)
    return tokenizer


@torch.no_grad()
def load_into(model: DenseModel, path: str) -> None:
    """Copy the weights of a folder into the parameters of `model`, in place: whoever shares them sees the new values."""
    other = load_model(path, dtype=_dtype_name(model.dtype)).hf.state_dict()
    mine = model.hf.state_dict()
    wrong = sorted(k for k in {*mine, *other} if k not in mine or k not in other or mine[k].shape != other[k].shape)
    if wrong:
        raise UserError(f"the weights in `{path}` do not fit the model: `{wrong[0]}`", hint="serve weights that were trained from the same model")
    for name, value in mine.items():
        value.copy_(other[name])


def export_folder(model: DenseModel, path: Path, *, tokenizer: Any) -> None:
    """Write weights, configuration and tokenizer as an ordinary Hugging Face folder. The folder is complete or absent, never half there."""
    with whole_folder(path) as draft:
        model.hf.save_pretrained(draft)
        tokenizer.save_pretrained(draft)


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or path.endswith("/")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _dtype_name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")
