"""Hugging Face folders in, Hugging Face folders out; what is wrong with a folder is said in words."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from lightningrl.errors import UserError
from lightningrl.models.load import export_folder, load_into, load_model, load_tokenizer
from lightningrl.models.tiny import build_model, write_model_folder

TEXTS = ["SELECT name FROM city WHERE name = 'Paris';", "How many people live in Paris?"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model_folder(tmp_path / "model", texts=TEXTS, vocab_size=330)
    return tmp_path / "model"


def test_an_exported_folder_is_an_ordinary_hugging_face_folder(folder: Path) -> None:
    hf = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert hf.config.model_type == "qwen3"
    assert hf.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.chat_template


def test_weights_survive_export_and_load_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder))
    export_folder(model, tmp_path / "again", tokenizer=load_tokenizer(str(folder)))
    again = load_model(str(tmp_path / "again"))
    for (name, a), (_, b) in zip(model.hf.named_parameters(), again.hf.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_export_replaces_a_folder_and_leaves_nothing_beside_it(folder: Path) -> None:
    other = build_model(load_model(str(folder)).vocab_size, seed=7)
    export_folder(other, folder, tokenizer=load_tokenizer(str(folder)))
    assert torch.equal(load_model(str(folder)).hf.lm_head.weight, other.hf.lm_head.weight)
    assert os.listdir(folder.parent) == ["model"]


def test_a_failed_export_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        export_folder(build_model(300), tmp_path / "model", tokenizer=None)
    assert os.listdir(tmp_path) == []


def test_load_into_changes_the_shared_parameters_in_place(folder: Path) -> None:
    model = build_model(load_model(str(folder)).vocab_size, seed=7)
    weight = model.hf.lm_head.weight
    load_into(model, str(folder))
    assert model.hf.lm_head.weight is weight
    assert torch.equal(weight, load_model(str(folder)).hf.lm_head.weight)


def test_load_into_refuses_weights_of_another_shape(folder: Path) -> None:
    with pytest.raises(UserError, match="do not fit"):
        load_into(build_model(400), str(folder))


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(UserError, match=r"(?s)no model folder at `/no/such`.*hint:"):
        load_model("/no/such")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"(?s)cannot load a model from .*hint:"):
        load_model(str(folder))


def test_weights_that_lack_a_layer_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 4
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"lack `model.layers.3"):
        load_model(str(folder))


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match=r"`gpt2` are not supported"):
        load_model(str(tmp_path / "gpt2"))


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(UserError, match="cannot load a tokenizer"):
        load_tokenizer(str(folder))
