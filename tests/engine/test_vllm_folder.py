"""vLLM gets a folder with both embeddings where they are tied."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lightningrl.engine.vllm_folder import with_output_head


async def test_the_output_embeddings_are_those_of_the_input(model_folder: Path) -> None:
    async with with_output_head(model_folder) as whole:
        assert whole != model_folder
        head = load_file(whole / "lm_head.safetensors")
        weights = load_file(whole / "model.safetensors")
        assert head.keys() == {"lm_head.weight"} and "lm_head.weight" not in weights
        assert torch.equal(head["lm_head.weight"], weights["model.embed_tokens.weight"])
        assert {p.name for p in whole.iterdir()} == {p.name for p in model_folder.iterdir()} | {"lm_head.safetensors"}
    assert not whole.exists()


async def test_a_folder_in_several_files_gets_its_index_extended(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    tensors = {"model.embed_tokens.weight": torch.randn(7, 4).bfloat16(), "model.norm.weight": torch.ones(4)}
    files = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate(tensors, start=1)}
    for name, tensor in tensors.items():
        save_file({"other": torch.zeros(3), name: tensor}, folder / files[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    async with with_output_head(folder) as whole:
        assert torch.equal(
            load_file(whole / "lm_head.safetensors")["lm_head.weight"], tensors["model.embed_tokens.weight"]
        )
        index = json.loads((whole / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {**files, "lm_head.weight": "lm_head.safetensors"}
    assert json.loads((folder / "model.safetensors.index.json").read_text()) == {"weight_map": files}


async def test_a_folder_with_both_embeddings_is_used_as_it_is(tmp_path: Path) -> None:
    for name, tied, tensors in (
        ("untied", False, ["model.embed_tokens.weight"]),
        ("both", True, ["model.embed_tokens.weight", "lm_head.weight"]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
        save_file({tensor: torch.zeros(2, 2) for tensor in tensors}, folder / "model.safetensors")
        async with with_output_head(folder) as whole:
            assert whole == folder
