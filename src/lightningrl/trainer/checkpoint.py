"""Checkpoints: weights, moments and counters in one folder of safetensors and JSON. Training resumes bit for bit."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightningrl.errors import UserError
from lightningrl.models.folder import whole_folder
from lightningrl.models.tensors import Stored, read, stored_in

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of each parameter."""


def save(
    path: Path,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.AdamW,
    *,
    reference: Mapping[str, Tensor],
    counters: Mapping[str, float],
) -> None:
    """Write a folder, complete or absent, in place of one of that name. `reference`: frozen weights."""
    moments = {
        f"{key}/{name}": optimizer.state[p][key]
        for name, p in parameters.items()
        if p in optimizer.state
        for key in MOMENTS
    }
    with whole_folder(path) as draft:
        save_file({name: p.detach().contiguous() for name, p in parameters.items()}, draft / "weights.safetensors")
        save_file({name: m.contiguous() for name, m in moments.items()}, draft / "moments.safetensors")
        if reference:
            save_file({name: p.contiguous() for name, p in reference.items()}, draft / "reference.safetensors")
        (draft / "trainer.json").write_text(json.dumps(dict(counters)), encoding="utf-8")


def load(
    path: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.AdamW, *, reference: Mapping[str, Tensor]
) -> dict[str, float]:
    """Read a folder into `parameters`, `optimizer` and `reference`, in place. Returns the counters."""
    if not (path / "trainer.json").is_file():
        raise UserError(f"no checkpoint at `{path}`", hint="give a folder that training has saved")
    weights = _fitting(path, "weights.safetensors", parameters)
    first = _fitting(path, "reference.safetensors", reference) if reference else {}
    optimizer.state.clear()
    with torch.no_grad():
        for name, tensor in read(weights):
            parameters[name].copy_(tensor)
        for name, tensor in read(first):
            reference[name].copy_(tensor)
    for name, tensor in read(stored_in(path / "moments.safetensors")):
        key, _, of = name.partition("/")
        p = parameters[of]
        optimizer.state[p] = {**optimizer.state[p], key: tensor.to(p.device, copy=True)}
    return json.loads((path / "trainer.json").read_text(encoding="utf-8"))


def _fitting(path: Path, name: str, parameters: Mapping[str, Tensor]) -> dict[str, Stored]:
    """The tensors of a file. Raises `UserError` unless they fit the parameters one for one."""
    if not (path / name).is_file():
        raise UserError(
            f"the checkpoint `{path}` has no `{name}`", hint="resume with the loss that the run started with"
        )
    stored = stored_in(path / name)
    if {key: t.shape for key, t in stored.items()} != {key: tuple(p.shape) for key, p in parameters.items()}:
        raise UserError(
            f"the checkpoint `{path}` is of another model", hint="resume with the model that the run started from"
        )
    return stored
