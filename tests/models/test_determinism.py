"""Deterministic algorithms hold within a block, in any nesting, and not after it."""

import threading
from typing import Any

import pytest
import torch

from lightningrl.models.determinism import repeatable, undisturbed


def test_the_mode_holds_within_the_block_alone() -> None:
    with repeatable("warn"):
        with pytest.raises(ZeroDivisionError), repeatable("error"):
            assert torch.get_deterministic_debug_mode() == 2
            raise ZeroDivisionError
        assert torch.get_deterministic_debug_mode() == 1
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.get_deterministic_debug_mode() == 0


def test_new_tensors_are_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = torch.utils.deterministic
    monkeypatch.setattr(settings, "fill_uninitialized_memory", True)
    with repeatable("warn"):
        assert not settings.fill_uninitialized_memory
    assert settings.fill_uninitialized_memory


def test_other_threads_on_a_gpu_never_see_errors_set() -> None:
    seen: list[int] = []

    def compute() -> None:
        with undisturbed(torch.device("cuda")):
            seen.append(torch.get_deterministic_debug_mode())

    thread = threading.Thread(target=compute)
    with repeatable("warn"):
        with repeatable("error"):
            thread.start()
            thread.join(0.05)
            assert thread.is_alive() and not seen
        thread.join()
    assert len(seen) == 1 and seen[0] < 2
