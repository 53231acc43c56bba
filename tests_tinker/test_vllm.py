"""vLLM serves the adapter that was trained at a service, from its exported folder."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from lightningrl.config import LossConfig, ServiceConfig, TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.hosted.adapters import RemotePolicy
from lightningrl.hosted.service import Service
from lightningrl.models.load import export_folder
from lightningrl.models.tiny import build_model, build_tokenizer
from lightningrl.trainer.tinker import TinkerTrainer
from lightningrl.types import Doubles
from tests.conftest import TEXTS
from tests_tinker.server import Server, free_port
from tests_tinker.test_faults import taught
from tests_vllm.conftest import HEAD_SIZE, PYTHON, serving

pytestmark = pytest.mark.skipif(not Path(PYTHON).exists(), reason="needs a vLLM: `make test-vllm` installs one")
TOKENS = np.arange(5, 45, dtype=np.int32)
RANK = 4
NEAR = 1e-4
"""In nats. The update moves log-probabilities by more than 0.1."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One of a model whose heads are as large as vLLM's attention on CPUs needs them."""
    tokenizer = build_tokenizer(TEXTS, vocab_size=300)
    sizes = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 128, "head_size": HEAD_SIZE}
    model = build_model(len(tokenizer), **sizes, eos_token_id=tokenizer.eos_token_id)
    export_folder(model, tmp_path / "base", tokenizer=tokenizer)
    server = Server(folder=tmp_path / "server", model=tmp_path / "base", port=free_port())
    try:
        server.start()
        yield server
    finally:
        server.kill()


def looked_up(url: str, model: str) -> Doubles:
    """vLLM's log-probabilities of `TOKENS`, without the first."""
    asked = {"model": model, "prompt": TOKENS.tolist(), "max_tokens": 1, "prompt_logprobs": 0}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=120).raise_for_status().json()
    beside = answer["choices"][0]["prompt_logprobs"]
    return np.array([line[str(token)]["logprob"] for token, line in zip(TOKENS[1:], beside[1:], strict=True)])


def test_vllm_computes_what_the_service_computes(server: Server, tmp_path: Path) -> None:
    service = Service(ServiceConfig(url=server.url, timeout_s=300))
    policy = RemotePolicy(service, base=str(server.model), rank=RANK, seed=0, near=NEAR)
    tokenizer = build_tokenizer(TEXTS, vocab_size=300)
    trainer = TinkerTrainer(policy, config=TrainerConfig(), loss=LossConfig(), tokenizer=tokenizer)
    trainer.forward_backward(build_forest(taught()))
    trainer.optim_step(learning_rate=0.05)
    trainer.export(tmp_path / "adapter")
    there = trainer.logprobs(TOKENS[:1], TOKENS[1:])
    service.close()
    flags = ("--lora-modules", f"adapter={tmp_path / 'adapter'}")
    with serving(server.model, tmp_path / "vllm.txt", *flags) as url:
        trained, untrained = looked_up(url, "adapter"), looked_up(url, str(server.model))
    np.testing.assert_allclose(trained, there, atol=NEAR)
    assert np.abs(untrained - there).max() > 0.1
