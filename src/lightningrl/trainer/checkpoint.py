"""How does training go on bit for bit? Weights, moments and counters in one folder of safetensors and JSON; complete or absent.

A folder is written beside its final place, flushed to disk, and renamed: a kill at any instant leaves the old one, or none, or the new one.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightningrl.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW remembers of each parameter."""


def save(path: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.AdamW, *, steps: int) -> None:
    """Write a folder, replacing one of that name."""
    aside = path.with_name(f".{path.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    moments = {f"{key}/{name}": optimizer.state[p][key] for name, p in parameters.items() if p in optimizer.state for key in MOMENTS}
    save_file({name: p.detach().contiguous() for name, p in parameters.items()}, aside / "weights.safetensors")
    save_file({name: m.contiguous() for name, m in moments.items()}, aside / "moments.safetensors")
    (aside / "trainer.json").write_text(json.dumps({"steps": steps}), encoding="utf-8")
    for file in aside.iterdir():
        _flush(file)
    _flush(aside)
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        aside.rename(path)
        shutil.rmtree(old)
    else:
        aside.rename(path)
    _flush(path.parent)


def load(path: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.AdamW) -> int:
    """Read a folder into `parameters` and `optimizer`, in place. Returns the number of updates made so far."""
    if not (path / "trainer.json").is_file():
        raise UserError(f"no checkpoint at `{path}`", hint="give a folder that training has saved")
    weights, moments = load_file(path / "weights.safetensors"), load_file(path / "moments.safetensors")
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    if {name: tuple(w.shape) for name, w in weights.items()} != shapes:
        raise UserError(f"the checkpoint `{path}` is of another model", hint="resume with the model that the run started from")
    optimizer.state.clear()
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(weights[name])
            if f"step/{name}" in moments:
                optimizer.state[p] = {key: moments[f"{key}/{name}"].clone() for key in MOMENTS}
    return int(json.loads((path / "trainer.json").read_text(encoding="utf-8"))["steps"])


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
