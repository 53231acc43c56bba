"""The sizes of a model follow from its config.json: no weights, no network."""

import json
import logging
import socket
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import http_backoff
from transformers import MixtralConfig, Qwen3Config

from lightningrl.errors import UserError
from lightningrl.models.families import decoder_of
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.models.lora import with_adapter
from lightningrl.models.sizes import sizes_of
from tests.models.tiny_families import FLAT, ROWS, build

PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
}
"""Parameters that the models' own pages state."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_models_are_counted_without_a_network(name: str) -> None:
    assert sizes_of(name, root=Path()).parameters == PUBLISHED[name]


def test_the_counts_are_those_of_the_loaded_model(model_folder: Path, tmp_path: Path) -> None:
    sizes, model = sizes_of(str(model_folder), root=Path()), load_model(str(model_folder))
    own = sum(p.numel() for p in model.hf.parameters())
    assert (sizes.parameters, sizes.rank) == (own, 0)
    assert sizes.computed == own - model.vocab_size * model.hidden_size
    adapted = with_adapter(model, rank=3)
    assert 3 * sizes.adapted == sum(p.numel() for p in adapted.trainable().values())
    export_folder(adapted, tmp_path / "adapter", tokenizer=load_tokenizer(str(model_folder)))
    found = sizes_of("adapter", root=tmp_path)
    assert (found.rank, found.parameters) == (3, own)


def test_a_token_computes_its_share_of_the_experts(tmp_path: Path) -> None:
    config = MixtralConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        vocab_size=100,
        num_local_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    config.save_pretrained(tmp_path)
    sizes = sizes_of(str(tmp_path), root=Path())
    experts = 2 * 8 * 3 * 32 * 64
    assert sizes.computed == sizes.parameters - 2 * 100 * 32 - experts * 6 // 8
    assert sizes.shape.intermediate == 2 * 64


@pytest.mark.parametrize("family", FLAT | ROWS)
def test_every_family_is_counted(family: str, tmp_path: Path) -> None:
    hf = build(family, dtype=torch.float32)
    hf.config.save_pretrained(tmp_path)
    sizes = sizes_of(str(tmp_path), root=Path())
    assert sizes.parameters == sum(p.numel() for p in hf.parameters()) > sizes.computed > 0


@pytest.mark.parametrize("family", ["mistral", "gemma2", "phi3", "olmo3", "cohere2"])
def test_the_adapter_of_other_families_is_counted(family: str, tmp_path: Path) -> None:
    hf = build(family, dtype=torch.float32)
    hf.config.save_pretrained(tmp_path)
    adapter = with_adapter(decoder_of(hf), rank=3).trainable().values()
    assert 3 * sizes_of(str(tmp_path), root=Path()).adapted == sum(p.numel() for p in adapter)


def test_a_folder_without_a_model_and_an_unknown_kind_of_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)no model folder at `.*nowhere`.*hint:"):
        sizes_of("./nowhere", root=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(UserError, match=r"(?s)cannot read the configuration.*hint:"):
        sizes_of(".", root=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip_vision_model"}))
    with pytest.raises(UserError, match=r"(?s)cannot estimate a model of type `clip_vision_model`.*hint:"):
        sizes_of(".", root=tmp_path)


def test_a_folder_comes_before_a_public_model_of_that_name(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen" / "Qwen3-0.6B"
    Qwen3Config(num_hidden_layers=1).save_pretrained(folder)
    assert sizes_of("Qwen/Qwen3-0.6B", root=tmp_path).shape.layers == 1


def test_retries_of_downloads_print_nothing(caplog: pytest.LogCaptureFixture) -> None:
    library = logging.getLogger("huggingface_hub")
    library.addHandler(caplog.handler)
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Exception, match="refused"):
            http_backoff("HEAD", url, max_retries=1, base_wait_time=0.01)
    finally:
        library.removeHandler(caplog.handler)
    assert not caplog.records
