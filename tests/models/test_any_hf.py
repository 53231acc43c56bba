"""`AnyHF` runs any Hugging Face decoder, and its folders stay ordinary Hugging Face folders."""

import json
import logging
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Phi3Config,
    Qwen3Config,
)
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from lightningrl.data.trie import build_trie
from lightningrl.errors import UserError
from lightningrl.models.any_hf import AnyHF
from lightningrl.models.base import PLAIN, Decoder, Style
from lightningrl.models.families import decoder_of, survey
from lightningrl.models.forest_attention import ForestAttention
from lightningrl.models.hf_attention import Unlike, mask_of
from lightningrl.models.hf_rows import rows_of
from lightningrl.models.load import export_folder, load_into, load_model, load_tokenizer
from lightningrl.models.tiny import write_model_folder
from tests.models.tiny_families import SIZES, WIDE, build


def line(model: Decoder, token_ids: Tensor) -> Tensor:
    """[N V] logits of one sequence [N]."""
    N = len(token_ids)
    attend = ForestAttention(
        np.array([0, N]),
        np.array([-1]),
        np.arange(N),
        heads=model.heads,
        kv_heads=model.kv_heads,
        dtype=model.dtype,
        device=model.device,
    )
    return model.logits(model.hidden(token_ids, torch.arange(N), attend))


IDS = torch.arange(20) * 7 % 48


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma2", "cohere2", "granite", "falcon_h1"])
def test_logits_have_a_familys_own_scale_and_cap_row_by_row(family: str) -> None:
    hf = build(family, dtype=torch.float32)
    expected = hf(IDS[None], use_cache=False).logits[0]
    model = decoder_of(hf)
    found = line(model, IDS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    hidden = torch.randn(6, 2, model.hidden_size)
    alone = torch.stack([model.logits(row) for row in hidden])
    torch.testing.assert_close(model.logits(hidden), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "mixtral", "gpt_oss", "falcon_h1"])
def test_a_folder_stays_an_ordinary_hugging_face_folder(family: str, tmp_path: Path) -> None:
    write_model_folder(tmp_path / "words", texts=["one two"], vocab_size=300)
    tokenizer = load_tokenizer(str(tmp_path / "words"))
    model = decoder_of(build(family, dtype=torch.float32))
    export_folder(model, tmp_path / "model", tokenizer=tokenizer)
    assert "lightningrl" not in (tmp_path / "model" / "config.json").read_text()
    with torch.no_grad():
        expected = line(model, IDS)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        torch.testing.assert_close(theirs(IDS[None], use_cache=False).logits[0], expected, rtol=1e-3, atol=1e-3)
        again = load_model(str(tmp_path / "model"))
        assert torch.equal(line(again, IDS), expected)
        for p in again.hf.parameters():
            p.zero_()
        assert load_into(again, str(tmp_path / "model")) is again
        assert torch.equal(line(again, IDS), expected)


def test_a_frozen_copy_has_tensors_of_its_own() -> None:
    model = decoder_of(build("gpt_oss", dtype=torch.float32))
    copied = model.frozen_copy()
    before = line(copied, IDS)
    assert not copied.trainable()
    assert torch.equal(before, line(model, IDS))
    with torch.no_grad():
        for p in model.hf.parameters():
            p += 0.1
    assert torch.equal(line(copied, IDS), before)
    assert not torch.equal(line(model, IDS), before)


def test_threads_that_share_a_model_keep_their_attention_apart() -> None:
    model = decoder_of(build("gemma3_text", dtype=torch.float32))
    N = len(IDS)
    mixed: list[str] = []

    def run(sign: float) -> None:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style = PLAIN) -> Tensor:
            return torch.full((N, q.shape[1], v.shape[2]), sign)

        first = model.hidden(IDS, torch.arange(N), attend)
        for _ in range(30):
            if not torch.equal(model.hidden(IDS, torch.arange(N), attend), first):
                mixed.append(f"{sign}")

    with torch.no_grad():
        threads = [threading.Thread(target=run, args=(sign,)) for sign in (-1.0, 1.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not mixed


def test_a_model_that_runs_by_rows_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = decoder_of(build("mamba2"))
        line(model, IDS)
        line(model, IDS)
    assert [record.message for record in caplog.records] == [
        "`mamba2`: each call is trained as a row, shared prefixes included: it has layers of type `linear_attention`"
    ]
    assert model.no_cache == "it has layers of type `linear_attention`"


def test_attention_in_chunks_is_no_window() -> None:
    config = Llama4TextConfig(**WIDE, attention_chunk_size=64, num_local_experts=2, intermediate_size_mlp=40)
    model = decoder_of(Llama4ForCausalLM(config))
    assert isinstance(model, AnyHF)
    assert model.shape.by_rows == "it has layers of type `chunked_attention`"
    with pytest.raises(Unlike, match="neither causal nor within a window"):
        mask_of(mask_function=chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.long)), local_size=64)
    assert mask_of(mask_function=sliding_window_causal_mask_function(64), local_size=64).window == 64


def test_attention_that_selects_tokens_of_long_rows_is_refused() -> None:
    for config, what in (
        (DogeConfig(**SIZES, keep_window_size=16), "keep_window_size"),
        (Qwen3Config(**WIDE, index_topk=16), "index_topk"),  # pyright: ignore[reportCallIssue]
        (Qwen3Config(**WIDE, layer_types=["full_attention", "indexed_attention"]), "indexed_attention"),
    ):
        with pytest.raises(UserError, match=f"(?s){config.model_type}` are not supported.*{what}.*hint:"):
            survey(AutoModelForCausalLM.from_config(config))


def test_rotary_angles_that_change_with_the_length_bound_it() -> None:
    rotary = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 16,
    }
    config = Phi3Config(**SIZES, rope_parameters=rotary, original_max_position_embeddings=16)
    model = decoder_of(AutoModelForCausalLM.from_config(config))
    assert model.max_length == 16
    line(model, IDS[:16])
    with pytest.raises(UserError, match=r"(?s)beyond `16` tokens.*hint:"):
        line(model, IDS[:17])


def test_rows_are_the_paths_of_a_forest() -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 3, rng.integers(1, 9)).astype(np.int32) for _ in range(30)]
    trie = build_trie(sequences, tails=[1] * len(sequences))
    rows = [trie.token_ids[row].tolist() for row in rows_of(trie.positions)]
    whole = {tuple(s.tolist()) for s in sequences}
    leaves = {s for s in whole if not any(t[: len(s)] == s and t != s for t in whole)}
    assert {tuple(row) for row in rows} == leaves
    assert len(rows) == len(leaves)
    assert [len(row) for row in rows] == sorted(map(len, rows))


def test_a_mixture_routes_each_token_as_if_it_were_alone() -> None:
    """The bits of a token do not depend on how many others share its expert."""
    model = decoder_of(build("mixtral", dtype=torch.float32))
    mixture = model.hf.model.layers[0].mlp
    x = torch.randn(1, 64, model.hidden_size)
    with torch.inference_mode():
        whole = mixture(x)
        assert all(torch.equal(mixture(x[:, : 16 * n]), whole[:, : 16 * n]) for n in (1, 2, 3))


def test_names_in_a_config_do_not_decide(tmp_path: Path) -> None:
    """A model that says it is a Llama but has windows is not run as a dense one."""
    hf = build("mistral", dtype=torch.float32)
    hf.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["sliding_window"] == 3
    model = load_model(str(tmp_path / "model"))
    assert isinstance(model, AnyHF)
    assert model.shape.windows == (3, 3)
