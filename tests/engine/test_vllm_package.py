"""Which vLLM is installed, in this Python or in another one."""

import sys
from pathlib import Path

import pytest

from lightningrl.engine.vllm_package import PACKAGES, Package, installed, require
from lightningrl.errors import UserError


def other_python(folder: Path, *packages: tuple[str, str]) -> str:
    """A Python that has nothing but these packages."""
    for name, version in packages:
        info = folder / "packages" / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "packages"} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("name", PACKAGES)
def test_the_vllm_of_another_python_is_found_without_importing_it(name: str, tmp_path: Path) -> None:
    python = other_python(tmp_path, (name, "0.31.7"), ("torch", "2.13.0"))
    assert installed(python) == require(python) == Package(name=name, version="0.31.7")


def test_a_python_without_vllm_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    python = other_python(tmp_path, ("torch", "2.13.0"))
    assert installed(python) is None
    with pytest.raises(UserError) as refused:
        require(python)
    assert refused.value.message == f"vLLM is not installed in the Python of `engine.python` (`{python}`)"
    assert f"`{python} -m pip install 'vllm>=0.30,<0.33'`" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("program", "reason"), [("/nowhere/python", "No such file"), ("/bin/false", "does not answer like a Python")]
)
def test_what_is_no_python_is_refused(program: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"`engine.python` is `{program}`, which cannot be run: .*{reason}"):
        installed(program)


def test_this_python_is_asked_if_none_is_named() -> None:
    assert installed("") == installed(sys.executable)
