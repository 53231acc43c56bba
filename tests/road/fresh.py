"""The wheel of this repository in a fresh venv, with the extras that a user may choose."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = "torch>=2.9,<2.14"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
INSTALL = ("install", "-qq", "--no-compile")


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None, exit_code: int = 0) -> str:
    """What the command prints, stderr included if it is to fail. Another exit code ends this program."""
    print("$", shlex.join(map(str, command)), flush=True)
    began = time.monotonic()
    errors = subprocess.STDOUT if exit_code else None
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
    )
    print(done.stdout, f"  ({time.monotonic() - began:.0f} s)", sep="", flush=True)
    if done.returncode != exit_code:
        sys.exit(f"exit code {done.returncode}: {shlex.join(map(str, command))}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    run(*PIP, "wheel", "-q", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    [wheel] = folder.glob("lightningrl-*.whl")
    return wheel


def install(wheel: Path, extras: str, *, folder: Path) -> Mapping[str, str]:
    """Make a venv in `folder` with the wheel and `extras`, e.g. `[train]`. Returns environment variables for it."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    pip = (*PIP, "--python", python, *INSTALL)
    if extras:
        run(*pip, TORCH, cwd=folder)  # on its own line, pip picks the build that fits its settings: here the CPU's
    run(*pip, f"{wheel}{extras}", cwd=folder)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    return {**env, "PATH": f"{python.parent}{os.pathsep}{env['PATH']}"}
