"""An adapter learns over frozen weights. peft reads its folder, and an adapter written by peft is read."""

import hashlib
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.errors import UserError
from lightningrl.models.base import PLAIN, Decoder, Style
from lightningrl.models.dense import DenseModel
from lightningrl.models.load import export_folder, load_into, load_model, load_tokenizer
from lightningrl.models.lora import with_adapter
from lightningrl.models.tiny import build_model
from lightningrl.trainer import conformance
from lightningrl.trainer.local import LocalTrainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks transformers for it

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = torch.arange(20) * 7 % 64


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor, _style: Style = PLAIN) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def logits(model: Decoder) -> Tensor:
    with torch.no_grad():
        return model.logits(model.hidden(IDS, torch.arange(len(IDS)), causal))


def hugging_face(hf: object) -> Tensor:
    with torch.no_grad():
        return hf(IDS[None]).logits[0]  # pyright: ignore[reportCallIssue]


def learnt(model: Decoder, *, seed: int = 0) -> Decoder:
    """The model with an adapter that is not zero."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.hf.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=chance, dtype=parameter.dtype)
    return model


def digest(model: Decoder) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.hf.parameters())).hexdigest()


def trainable(model: Decoder) -> dict[str, Tensor]:
    return {name: p for name, p in model.hf.named_parameters() if p.requires_grad}


def export(model: Decoder, path: Path, *, base: Path) -> None:
    export_folder(model, path, tokenizer=load_tokenizer(str(base)))


def test_an_adapter_shares_every_tensor_of_its_base_and_begins_as_the_base_itself() -> None:
    base = build_model(64)
    before, expected = digest(base), logits(base)
    one, two = with_adapter(base, rank=4, seed=1), with_adapter(base, rank=8, seed=2)
    shared = {id(p) for p in base.hf.parameters()}
    for model in (one, two):
        assert {id(p) for p in model.hf.parameters() if not p.requires_grad} == shared
        assert len(trainable(model)) == 2 * 7 * base.layers
        assert torch.equal(logits(model), expected)
    assert not {id(p) for p in trainable(one).values()} & {id(p) for p in trainable(two).values()}
    assert not trainable(base)
    assert digest(base) == before
    assert base.adapter is None


def test_the_same_seed_gives_the_same_adapter_and_disturbs_no_generator() -> None:
    base = build_model(64)
    before = torch.random.get_rng_state()
    a, b, c = (with_adapter(base, rank=4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert digest(a) == digest(b) != digest(c)


@pytest.mark.parametrize("config", [Qwen3Config(**SMALL, head_dim=8), Qwen2Config(**SMALL), LlamaConfig(**SMALL)])
def test_layer_by_layer_equals_peft(config: object) -> None:
    base = DenseModel(AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval())
    model = learnt(with_adapter(base, rank=4))
    torch.testing.assert_close(logits(model), hugging_face(model.hf), rtol=0, atol=1e-6)
    torch.testing.assert_close(logits(model), logits(DenseModel(model.hf)), rtol=0, atol=1e-12)  # called as modules
    assert (logits(model) - logits(base)).abs().max() > 1e-2


def test_the_base_can_be_used_without_the_adapter() -> None:
    base = build_model(64)
    before = logits(base)
    model = learnt(with_adapter(base, rank=4))
    assert model.base is base
    assert torch.equal(logits(base), before)
    assert not torch.equal(logits(model), logits(base))


def test_an_exported_adapter_is_an_ordinary_peft_folder(model_folder: Path, tmp_path: Path) -> None:
    model = learnt(with_adapter(load_model(str(model_folder)), rank=4))
    export(model, tmp_path / "adapter", base=model_folder)
    of_the_base = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert set(os.listdir(tmp_path / "adapter")) == {"adapter_config.json", "adapter_model.safetensors", *of_the_base}
    assert os.listdir(tmp_path) == ["adapter"]
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), str(tmp_path / "adapter"))
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    for hf in (by_peft, by_transformers):
        torch.testing.assert_close(hugging_face(hf), logits(model), rtol=0, atol=1e-5)


def test_an_adapter_survives_export_and_load_bit_for_bit_and_can_go_on_learning(
    model_folder: Path, tmp_path: Path
) -> None:
    model = learnt(with_adapter(load_model(str(model_folder)), rank=4))
    export(model, tmp_path / "adapter", base=model_folder)
    again = load_model(str(tmp_path / "adapter"))
    assert digest(again) == digest(model)
    assert trainable(again).keys() == trainable(model).keys()
    export(again, tmp_path / "again", base=model_folder)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()


def test_an_adapter_that_peft_has_written_is_read(model_folder: Path, tmp_path: Path) -> None:
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], use_rslora=True, init_lora_weights=False
    )
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    mine = load_model(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(mine), hugging_face(theirs.eval()), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    "change", [{"use_dora": True}, {"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["norm"]}]
)
def test_more_than_a_plain_adapter_is_refused(change: dict[str, object], model_folder: Path, tmp_path: Path) -> None:
    config = LoraConfig(**{"r": 3, "target_modules": ["q_proj"], **change})
    get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config).save_pretrained(
        str(tmp_path / "adapter"), save_embedding_layers=False
    )
    with pytest.raises(UserError, match=r"(?s)more than a plain LoRA adapter.*hint:"):
        load_model(str(tmp_path / "adapter"))


def test_the_base_is_found_beside_the_adapter(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "base").symlink_to(model_folder)
    model = learnt(with_adapter(load_model(str(tmp_path / "base")), rank=4))
    export(model, tmp_path / "adapter", base=model_folder)
    file = tmp_path / "adapter" / "adapter_config.json"
    for base, found in (("../base", True), ("../elsewhere", False), (None, False)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
        if found:
            assert torch.equal(logits(load_model(str(tmp_path / "adapter"))), logits(model))
        else:
            with pytest.raises(UserError, match=r"(?s)(no model folder at|does not say which model).*hint:"):
                load_model(str(tmp_path / "adapter"))


def test_load_into_changes_the_shared_adapter_in_place(model_folder: Path, tmp_path: Path) -> None:
    base = load_model(str(model_folder))
    model, other = with_adapter(base, rank=4), learnt(with_adapter(base, rank=4), seed=7)
    before = digest(base)
    export(other, tmp_path / "adapter", base=model_folder)
    places = [p.data_ptr() for p in model.hf.parameters()]
    assert load_into(model, str(tmp_path / "adapter")) is model
    assert [p.data_ptr() for p in model.hf.parameters()] == places
    assert torch.equal(logits(model), logits(other))
    bare = load_into(base, str(tmp_path / "adapter"))
    assert torch.equal(logits(bare), logits(other))
    assert digest(base) == before
    with pytest.raises(UserError, match="does not fit"):
        load_into(with_adapter(base, rank=5), str(tmp_path / "adapter"))
    with pytest.raises(UserError, match="are no adapter"):
        load_into(model, str(model_folder))
    with pytest.raises(UserError, match="has an adapter already"):
        with_adapter(model, rank=4)


def test_a_damaged_adapter_is_named(model_folder: Path, tmp_path: Path) -> None:
    export(with_adapter(load_model(str(model_folder)), rank=4), tmp_path / "adapter", base=model_folder)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"(?s)adapter_model.safetensors` is no safetensors file.*hint:"):
        load_model(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match=r"(?s)cannot read .*adapter_config.json.*hint:"):
        load_model(str(tmp_path / "adapter"))


@pytest.fixture
def make(model_folder: Path) -> conformance.Make:
    base, adapt = load_model(str(model_folder)), partial(export_folder, tokenizer=load_tokenizer(str(model_folder)))
    config = LossConfig(kl_coef=0.1)
    return lambda: LocalTrainer(
        with_adapter(base, rank=4, seed=1), config=TrainerConfig(threads=1), loss=config, export=adapt
    )


@pytest.mark.parametrize(
    "check", [c for c in conformance.CHECKS if "publish" not in c.__name__], ids=lambda check: check.__name__
)
def test_a_trainer_of_an_adapter_keeps_its_promises(check: object, make: conformance.Make, tmp_path: Path) -> None:
    check(make, tmp_path)  # pyright: ignore[reportCallIssue]


def test_the_reference_of_an_adapter_is_the_base_below_it(make: Callable[[], LocalTrainer]) -> None:
    trainer, forest = make(), build_forest(conformance.lessons(0))
    assert trainer.forward_backward(forest).metrics["loss/kl"] == 0.0
    conformance.step(trainer, 1)
    assert trainer.forward_backward(forest).metrics["loss/kl"] > 1e-5


def test_training_an_adapter_leaves_its_base_bit_for_bit(model_folder: Path, tmp_path: Path) -> None:
    base = load_model(str(model_folder))
    before = digest(base)
    model = with_adapter(base, rank=4, seed=1)
    untrained = digest(model)
    trainer = LocalTrainer(
        model, config=TrainerConfig(threads=1), loss=LossConfig(), export=partial(export, base=model_folder)
    )
    for seed in range(3):
        conformance.step(trainer, seed)
    assert digest(base) == before
    assert digest(model) != untrained
    assert all(p.grad is None for p in base.hf.parameters())
    trainer.save(tmp_path / "state")
    with safe_open(tmp_path / "state" / "weights.safetensors", "pt") as file:
        assert set(file.keys()) == set(trainable(model))
    trainer.publish(tmp_path / "adapter")
    assert digest(load_model(str(tmp_path / "adapter"))) == digest(model)


def test_forests_give_an_adapter_the_gradient_of_one_call_at_a_time() -> None:
    base = build_model(48, hidden=24, layers=2, heads=2, kv_heads=1, head_size=8, intermediate=40)
    base.hf.to(torch.float64)
    model = learnt(with_adapter(base, rank=3))
    trainer = LocalTrainer(model, config=TrainerConfig(threads=1), loss=LossConfig(), export=lambda model, path: None)
    given = conformance.lessons(5)
    found: list[dict[str, Tensor]] = []
    for forests in ([given], [[lesson] for lesson in random.Random(1).sample(given, len(given))]):
        for lessons in forests:
            trainer.forward_backward(build_forest(lessons))
        found.append({name: p.grad.clone() for name, p in model.hf.named_parameters() if p.grad is not None})
        model.hf.zero_grad()
    assert found[0].keys() == found[1].keys() == trainable(model).keys()
    assert max(float((a - found[1][name]).norm() / a.norm()) for name, a in found[0].items()) < 1e-12
