"""Tests that need a GPU: `make gpu`. Without one they are skipped, unless `--device cpu` runs their code on the CPU."""

import importlib

import pytest
import torch

from lightningrl.errors import UserError
from lightningrl.models import varlen_attention
from lightningrl.models.devices import device_of, set_up
from tests.conftest import model_folder  # noqa: F401  a fixture


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="where models live")


@pytest.fixture(scope="session", autouse=True)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where models live. Float32 products are computed in float32, without TF32."""
    try:
        found = device_of("cuda" if request.config.getoption("--device") == "cuda" else "cpu")
    except UserError as error:
        pytest.skip(f"needs a GPU: {error}")
    set_up([found])
    return found


@pytest.fixture
def flash(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device, if torch has its flash-attention kernel there. On a CPU, the kernel is emulated."""
    if device.type == "cpu":
        importlib.import_module("tests.models.kernel")  # registers the emulation
        monkeypatch.setattr(varlen_attention, "has_flash", lambda device: True)
    elif not varlen_attention.has_flash(device):
        pytest.skip(f"torch {torch.__version__} has no flash-attention kernel for `{device}`")
    return device
