"""`lightningrl doctor`: checks that this machine has everything that a run needs."""

import os
import shutil
import socket
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightningrl.cli.check import Check
from lightningrl.cli.console import say
from lightningrl.cli.extras import install, packages, version_of
from lightningrl.cli.hosted_checks import recipe_check, service_checks
from lightningrl.config import Config
from lightningrl.engine.vllm_package import CPU_PACKAGE, TESTED, installed, is_tested
from lightningrl.errors import UserError
from lightningrl.recipe import load_config, make_config
from lightningrl.runner import isolation

MIN_FREE_BYTES = 1 << 30
GIB = 1 << 30
NO_RECIPE: dict[str, Any] = {"name": "doctor", "agent": {"entry": "agent:run"}, "model": {"path": "", "lora_rank": 16}}
"""Settings that a recipe must have, which names no model."""
MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "dim")}


def checks(config: Config | None = None) -> Iterator[Check]:
    """Run all checks. They change nothing. `config`: a recipe that may name another Python for vLLM, or a service that
    computes in place of this machine.
    """
    ok = sys.version_info >= (3, 11)
    yield Check(name="python", ok=ok, found=sys.version.split()[0], hint="" if ok else "install Python 3.11 or newer")
    yield from (_package(name, extra="train") for name in packages("train"))
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    yield Check(
        name="cores",
        ok=cores >= 2,
        found=str(cores),
        hint="" if cores >= 2 else "set `agent.workers=1 trainer.threads=1`",
    )
    free = shutil.disk_usage(".").free
    hint = "" if free > MIN_FREE_BYTES else "free at least 1 GiB of disk space"
    yield Check(name="disk", ok=free > MIN_FREE_BYTES, found=f"{free / GIB:.0f} GiB free", hint=hint)
    ok = sqlite3.sqlite_version_info >= (3, 24)  # ON CONFLICT
    yield Check(name="sqlite", ok=ok, found=sqlite3.sqlite_version, hint="" if ok else "install SQLite 3.24 or newer")
    yield _loopback()
    yield sandbox_check()
    if config is not None and config.backend == "tinker":
        if config.agent.reward:  # only a recipe has one
            yield recipe_check(config)
        yield from service_checks(config)
        return
    yield _gpu()
    yield vllm_check(config.vllm_python if config else "", has_gpu=_sees_gpu())
    yield _fits()
    yield from (_package(name, extra="recipes", wanted_by="lightningrl demo") for name in packages("recipes"))


def examined(recipe: str | None, overrides: Sequence[str], *, backend: str | None) -> Config | None:
    """The settings to check. `recipe` may hold an override, if there is no recipe. None: only this machine."""
    given = list(overrides)
    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        recipe, given = None, [recipe, *given]
    if backend is not None:
        given.append(f"backend={backend}")
    if recipe is not None:
        return load_config(Path(recipe), given)
    return make_config(deepcopy(NO_RECIPE), given, folder=Path.cwd(), where="the command line") if given else None


def show(found: Sequence[Check], console: Console) -> None:
    """Print a line for each check, then each hint once."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in found:
        table.add_row(Text(*MARKS[check.ok]), check.name, Text(check.found, overflow="fold"))
    console.print(table)
    for hint in dict.fromkeys(check.hint for check in found if check.hint):
        names = ", ".join(check.name for check in found if check.hint == hint)
        say(console, ("hint: ", "yellow"), f"{names}: {hint}")


def _package(name: str, *, extra: str, wanted_by: str = "") -> Check:
    """Check for a package. `wanted_by` is the only command that needs it; empty: every run needs it."""
    found = version_of(name)
    if found is not None:
        return Check(name=name, ok=True, found=found)
    missing = f"missing; only `{wanted_by}` needs it" if wanted_by else "missing"
    return Check(name=name, ok=None if wanted_by else False, found=missing, hint=install(extra))


def _loopback() -> Check:
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        return Check(name="loopback", ok=False, found=str(error), hint="allow this process to listen on 127.0.0.1")
    return Check(name="loopback", ok=True, found="can listen")


def sandbox_check() -> Check:
    """Sandboxes are optional: only `agent.isolation` needs them."""
    try:
        isolation.check()
    except UserError as error:
        return Check(name="sandbox", ok=None, found=f'none for `agent.isolation = "bwrap"`: {error.message}')
    return Check(name="sandbox", ok=True, found='can be made, for `agent.isolation = "bwrap"`')


def _gpu() -> Check:
    """GPUs that torch sees, and the device that `trainer.device = "auto"` takes. A GPU is optional: the embedded engine
    and the trainer run on the CPU, too.
    """
    if version_of("torch") is None:
        return Check(name="gpu", ok=None, found="unknown without torch")
    try:
        from lightningrl.models.devices import INSTALL, built_for, device_of, devices, memory_used  # loads torch
    except (ImportError, OSError) as error:  # OSError: a CUDA library is missing
        hint = "reinstall torch: https://pytorch.org/get-started/locally"
        return Check(name="gpu", ok=False, found=f"torch cannot be loaded: {str(error).splitlines()[0]}", hint=hint)
    seen, build = devices(), built_for()
    if seen:
        each = [
            f"{one.name}, {free / GIB:.1f} of {one.memory_bytes / GIB:.1f} GiB free, "
            f"{'bfloat16' if one.bfloat16 else 'no bfloat16'}"
            for number, one in enumerate(seen)
            for free in [one.memory_bytes - memory_used(number)]
        ]
        found = f"{build}: {'; '.join(each)}; training runs on `{device_of('auto')}`"
        return Check(name="gpu", ok=True, found=found)
    driver = shutil.which("nvidia-smi") or shutil.which("rocm-smi")
    if driver and build is None:
        found = "not usable: this build of torch is for the CPU only; training runs on the CPU"
        return Check(name="gpu", ok=None, found=found, hint=INSTALL)
    found = f"none (torch is built for {build or 'the CPU only'}); training runs on the CPU"
    return Check(name="gpu", ok=None, found=found)


def vllm_check(python: str, *, has_gpu: bool) -> Check:
    """The vLLM that a run starts: in the environment of `python`, or of this Python if that is empty."""
    where = f"in the Python `{python}`" if python else "in this Python"
    try:
        package = installed(python)
    except UserError as error:
        return Check(name="vllm", ok=False, found=error.message, hint=error.hint or "")
    if package is None:
        needs = "only `engine.name=vllm` without `engine.urls` needs it"
        return Check(name="vllm", ok=None, found=f"none {where}; {needs}", hint=install("gpu") if has_gpu else "")
    found = f"{package.name} {package.version} {where}"
    if (package.name == CPU_PACKAGE) == has_gpu:
        found += ", which does not use the GPU" if has_gpu else ", which needs a GPU"
        return Check(name="vllm", ok=None, found=found, hint=install("gpu") if has_gpu else "")
    if not is_tested(package.version):
        return Check(name="vllm", ok=None, found=f"{found}; tested are {TESTED[0]} to {TESTED[1]}")
    return Check(name="vllm", ok=True, found=found)


def _sees_gpu() -> bool:
    try:
        from lightningrl.models.devices import devices  # loads torch
    except (ImportError, OSError):
        return False
    return bool(devices())


def _fits() -> Check:
    """The largest known models that this machine can train, by the estimator."""
    missing = [name for name in packages("train") if version_of(name) is None]
    if missing:
        return Check(name="fits", ok=None, found=f"unknown without {missing[0]}")
    try:
        from lightningrl.estimate.largest import RANK, card_here, largest  # loads torch and transformers
    except (ImportError, OSError):
        return Check(name="fits", ok=None, found="unknown, as torch cannot be loaded")
    card = card_here()
    adapter, whole = largest(card, rank=RANK), largest(card, rank=0)
    found = f"with an adapter up to {adapter or 'no known model'}, with all weights up to {whole or 'no known model'}"
    slow = "" if card.is_gpu else "; on a CPU, only models of a few million parameters learn in minutes"
    return Check(name="fits", ok=True if adapter else None, found=f"{found} (estimated){slow}")
