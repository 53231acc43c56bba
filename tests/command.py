"""Runs the command line in a new process, forked from one that has already imported torch and transformers.

A run without a step takes 8 seconds of CPU in a fresh interpreter and 1.8 in a forked one, and sixty tests run a
command. Tests about signals, terminals and imports start fresh interpreters.
"""

import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from tempfile import TemporaryDirectory

IMPORTED = [
    "pytest",  # the main module of the process that runs the tests
    "matplotlib.figure",
    "peft",
    "transformers.models.qwen3.modeling_qwen3",
    "lightningrl.cli.evaluate",
    "lightningrl.cli.train",
    "lightningrl.cli.warmstart",
    "lightningrl.engine.embedded",
    "lightningrl.models.load",
    "lightningrl.serve",
    "lightningrl.trainer.local",
]

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(IMPORTED)


def run_command(
    *arguments: str, cwd: Path, timeout_s: float = 500.0, env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run `lightningrl ARGUMENTS` in the folder `cwd`. `env` is the whole environment; None: that of this process."""
    with TemporaryDirectory() as folder:
        said, complained = Path(folder) / "stdout", Path(folder) / "stderr"
        process = forks.Process(target=_command, args=(arguments, cwd, dict(env or os.environ), said, complained))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutExpired(arguments, timeout_s, said.read_bytes(), complained.read_bytes())
        return CompletedProcess(arguments, process.exitcode, said.read_text(), complained.read_text())


def _command(arguments: tuple[str, ...], cwd: Path, env: dict[str, str], said: Path, complained: Path) -> None:
    """Run the command in the new process."""
    from lightningrl.cli import main

    for path, descriptor in ((said, 1), (complained, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))  # as `python -m` does
    sys.argv = ["lightningrl", *arguments]
    sys.exit(main())
