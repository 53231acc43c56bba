"""Which device a setting names, and what the error says where there is none."""

import os

import pytest
import torch

from lightningrl.errors import UserError
from lightningrl.models.devices import CPU, FIRST_GPU, device_of, set_up

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_the_cpu_can_always_be_named() -> None:
    assert device_of("cpu") == CPU


def test_auto_is_the_gpu_where_there_is_one() -> None:
    assert device_of("auto") == (FIRST_GPU if torch.cuda.is_available() else CPU)


@without_gpu
def test_a_build_without_cuda_says_which_build_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match="this build of torch is for the CPU only") as caught:
        device_of("cuda")
    hint = caught.value.hint or ""
    assert "install torch's build for your GPU" in hint and 'trainer.device = "cpu"' in hint


@without_gpu
def test_a_build_with_cuda_that_sees_no_gpu_names_driver_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(UserError, match=r"torch \(built for CUDA 13.0\) sees no GPU") as caught:
        device_of("cuda:1")
    assert caught.value.message.startswith("`trainer.device` is `cuda:1`, but")
    hint = caught.value.hint or ""
    assert all(word in hint for word in ("nvidia-smi", "driver", "CUDA_VISIBLE_DEVICES"))


def test_a_gpu_computes_float32_in_float32_and_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")  # as NVIDIA's containers do
    try:
        set_up([FIRST_GPU])
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cudnn.allow_tf32 is False
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
