"""An adapter on any family: on which layers, and the same as peft's own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, DogeConfig

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.models.base import Decoder
from lightningrl.models.families import decoder_of
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.models.lora import adaptable_layers, with_adapter
from lightningrl.models.tiny import write_model_folder
from lightningrl.trainer import conformance
from lightningrl.trainer.forward import forward
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Sampling
from tests.models.tiny_families import SIZES, build

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
LAYERS = {
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "mixtral": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "gpt_oss": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "gemma3_text": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "falcon_h1": {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "gate_proj", "up_proj", "down_proj"},
}


def test_routers_of_other_names_get_no_adapter() -> None:
    hf = AutoModelForCausalLM.from_config(DogeConfig(**SIZES, is_moe=True, num_experts=4, num_experts_per_tok=2))
    hf.get_decoder().layers[0].router = nn.Sequential(nn.Linear(32, 4))  # a router of several layers, as DBRX has it
    assert {"router_gate", "0"} <= {name.rpartition(".")[2] for name, m in hf.named_modules() if type(m) is nn.Linear}
    assert not {"router_gate", "0"} & {name.rpartition(".")[2] for name in adaptable_layers(hf)}


def learnt(model: Decoder) -> Decoder:
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.trainable().values():
            p += 0.1 * torch.randn(p.shape, generator=noise).to(p.dtype)
    return model


def trainer_of(model: Decoder) -> LocalTrainer:
    config = TrainerConfig(threads=1)
    return LocalTrainer(model, config=config, loss=LossConfig(), export=lambda model, path: None)


@pytest.mark.parametrize("family", list(LAYERS))
def test_an_adapter_is_on_every_linear_layer_but_routers(family: str) -> None:
    base = decoder_of(build(family, dtype=torch.float32))
    assert {name.rpartition(".")[2] for name in adaptable_layers(base.hf)} == LAYERS[family]
    model = with_adapter(base, rank=2)
    adapted = {name.split(".lora_")[0] for name in model.trainable()}
    assert adapted == set(adaptable_layers(base.hf))
    assert set(model.adapter.target_modules) == LAYERS[family]
    forest = build_forest(conformance.lessons(1))
    with torch.no_grad():
        assert torch.equal(forward(model, forest).logprobs, forward(base, forest).logprobs)  # B is zero at first


@pytest.mark.parametrize("family", list(LAYERS))
def test_an_adapter_equals_the_one_that_peft_reads_from_its_folder(family: str, tmp_path: Path) -> None:
    write_model_folder(tmp_path / "words", texts=["one two"], vocab_size=300)
    tokenizer = load_tokenizer(str(tmp_path / "words"))
    export_folder(decoder_of(build(family, dtype=torch.float32)), tmp_path / "base", tokenizer=tokenizer)
    model = learnt(with_adapter(load_model(str(tmp_path / "base")), rank=2))
    export_folder(model, tmp_path / "adapter", tokenizer=tokenizer)
    again = load_model(str(tmp_path / "adapter"))
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32), str(tmp_path / "adapter")
    )
    call = conformance.lessons(1)[0].transition
    ids = torch.tensor([[*call.prompt_ids.tolist(), *call.completion_ids.tolist()]])
    with torch.no_grad():
        logprobs = theirs(ids, use_cache=False).logits[0, len(call.prompt_ids) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(1, ids[0, len(call.prompt_ids) :, None])[:, 0].numpy()
    for each in (model, again):
        np.testing.assert_allclose(trainer_of(each).logprobs(call.prompt_ids, call.completion_ids), expected, atol=1e-4)


@pytest.mark.parametrize("family", ["phi3", "falcon_h1"])
def test_packing_does_not_change_the_gradient_of_an_adapter(family: str) -> None:
    base = build(family)
    model = learnt(with_adapter(decoder_of(base), rank=2))
    trainer, given = trainer_of(model), conformance.lessons(5, group_size=2)
    found: list[dict[str, torch.Tensor]] = []
    for forests in ([given], [[lesson] for lesson in given]):
        for lessons in forests:
            trainer.forward_backward(build_forest(lessons))
        found.append({name: p.grad.clone() for name, p in model.trainable().items() if p.grad is not None})
        trainer.optim_step(learning_rate=0.0)
    assert found[0].keys() == found[1].keys() == model.trainable().keys()
    # norms compute in float32
    assert max(float((a - found[1][name]).norm() / a.norm()) for name, a in found[0].items()) < 1e-4
    assert all(p.grad is None for p in base.parameters())


async def test_the_embedded_engine_serves_the_adapter_of_the_trainer() -> None:
    model = learnt(with_adapter(decoder_of(build("phi3", dtype=torch.float32)), rank=2))
    engine, prompt = EmbeddedEngine(model, slots=2, max_length=64), [5, 6, 7, 8]
    (delta,) = [d async for d in engine.generate(prompt, sampling=Sampling(max_tokens=9, seed=1), policy="policy")]
    await engine.close()
    found = trainer_of(model).logprobs(np.array(prompt, np.int32), np.array(delta.token_ids, np.int32))
    np.testing.assert_allclose(found, delta.logprobs, atol=1e-4)
