"""Loading and exporting Hugging Face folders; errors name what is wrong with a folder."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertLMHeadModel

from lightningrl.chat import ChatTemplate
from lightningrl.errors import UserError
from lightningrl.models.load import DTypeName, export_folder, is_here, load_into, load_model, load_tokenizer
from lightningrl.models.lora import with_adapter
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


def shard(folder: Path) -> None:
    """Put the weights into several files with an index."""
    hf = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    hf.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("files", ["one", "many"])
def test_load_into_gives_the_bits_of_a_new_model(folder: Path, dtype: DTypeName, files: str) -> None:
    if files == "many":
        shard(folder)
    model, fresh = build_model(load_model(str(folder)).vocab_size, seed=7), load_model(str(folder), dtype=dtype)
    model.hf.to(getattr(torch, dtype))
    load_into(model, str(folder))
    for (name, a), (_, b) in zip(model.hf.named_parameters(), fresh.hf.named_parameters(), strict=True):
        assert torch.equal(a, b), name


class Allocations(TorchDispatchMode):
    """Records the size of each tensor that an operation makes, unless it shares memory with an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {place for each in args if (place := _place(each))}
        self.sizes += [made.numel() for made in tree_leaves(out) if (place := _place(made)) and place not in given]
        return out


def _place(each: Any) -> int | None:
    storage = each.untyped_storage() if isinstance(each, torch.Tensor) else each
    return storage.data_ptr() if isinstance(storage, torch.UntypedStorage) else None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_into_makes_no_second_model(folder: Path, dtype: DTypeName) -> None:
    model = load_model(str(folder), dtype=dtype)
    with Allocations() as allocations:
        load_into(model, str(folder))
    assert allocations.sizes and max(allocations.sizes) == 1  # the smallest and the largest value of each tensor


def test_load_into_copies_nothing_of_a_folder_with_values_that_are_not_finite(folder: Path) -> None:
    model, broken = load_model(str(folder)), build_model(load_model(str(folder)).vocab_size, seed=7)
    before = [p.detach().clone() for p in model.hf.parameters()]
    with torch.no_grad():
        broken.hf.model.norm.weight[3] = float("nan")
    export_folder(broken, folder, tokenizer=load_tokenizer(str(folder)))
    with pytest.raises(UserError, match=r"(?s)`model.norm.weight` in .* not finite.*hint:"):
        load_into(model, str(folder))
    assert all(torch.equal(a, b) for a, b in zip(before, model.hf.parameters(), strict=True))


@pytest.mark.parametrize("lost", ["a shard", "the index"])
def test_load_into_names_a_folder_whose_shards_are_incomplete(folder: Path, lost: str) -> None:
    model = load_model(str(folder))
    shard(folder)
    if lost == "a shard":
        min(folder.glob("*.safetensors")).unlink()
    else:
        (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match=r"(?s)cannot load a model from .*hint:"):
        load_into(model, str(folder))


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


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", lambda content: content[: len(content) // 2], "bytes, its header says 1,"),
        ("model.safetensors", lambda content: content + b"more", "bytes, its header says 1,"),
        (
            "model.safetensors",
            lambda content: content[:100],
            "is no safetensors file, or the beginning of one: 100 bytes",
        ),
        ("model.safetensors", lambda content: b"", "is no safetensors file, or the beginning of one: 0 bytes"),
        (
            "model.safetensors",
            lambda content: LFS_POINTER,
            "model.safetensors` is a git-LFS pointer, not the file itself",
        ),
        ("tokenizer.json", lambda content: LFS_POINTER, "tokenizer.json` is a git-LFS pointer, not the file itself"),
        (
            "config.json",
            lambda content: content.replace(b'"hidden_size": 96', b'"hidden_size": 48'),
            "config.json asks for",
        ),
        (
            "config.json",
            lambda content: content.replace(b'"num_hidden_layers": 3', b'"num_hidden_layers": "x"'),
            "cannot load a model",
        ),
    ],
    ids=[
        "cut off",
        "too long",
        "cut off in the header",
        "empty",
        "pointer",
        "pointer beside",
        "other sizes",
        "nonsense",
    ],
)
def test_a_damaged_folder_is_refused_with_a_reason(
    folder: Path, name: str, content: Callable[[bytes], bytes], said: str
) -> None:
    before = (folder / name).read_bytes()
    (folder / name).write_bytes(content(before))
    assert (folder / name).read_bytes() != before
    with pytest.raises(UserError, match=f"(?s){said}.*hint:"):
        load_model(str(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder: Path, value: float) -> None:
    model = load_model(str(folder))
    with torch.no_grad():
        model.hf.model.layers[1].mlp.up_proj.weight[3, 5] = value
    export_folder(model, folder, tokenizer=load_tokenizer(str(folder)))
    with pytest.raises(UserError, match=r"(?s)`model.layers.1.mlp.up_proj.weight` in .* not finite.*hint:"):
        load_model(str(folder))


def test_an_adapter_that_is_cut_off_or_not_finite_is_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer, adapted = load_tokenizer(str(folder)), with_adapter(load_model(str(folder)), rank=2)
    next(p for p in adapted.hf.parameters() if p.requires_grad).data[0, 0] = float("nan")
    export_folder(adapted, tmp_path / "adapter", tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"(?s)lora_A.weight` in .* not finite"):
        load_model(str(tmp_path / "adapter"))
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UserError, match="bytes, its header says"):
        load_model(str(tmp_path / "adapter"))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"a": [1]}', b"\xff\xfe", LFS_POINTER],
    ids=["empty", "cut off", "other", "binary", "pointer"],
)
def test_a_broken_tokenizer_is_refused_with_a_reason(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"(?s)cannot load a tokenizer.*hint:"):
        load_tokenizer(str(folder))
    with pytest.raises(UserError, match=r"(?s)tokenizer.json` cannot be read: .*hint:"):
        ChatTemplate.load(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_file_that_is_not_text_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b'{"\xff')
    with pytest.raises(UserError, match=f"(?s){name}` cannot be read: .*hint:"):
        ChatTemplate.load(folder)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_model_files_have_the_permissions_of_the_umask(folder: Path, tmp_path: Path, umask: int, mode: int) -> None:
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    before = os.umask(umask)
    try:
        export_folder(model, tmp_path / "out", tokenizer=tokenizer)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {mode}


def test_a_model_that_is_not_causal_is_refused_by_name(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "initializer_range": 0.3,
    }
    BertLMHeadModel(BertConfig(**sizes, vocab_size=20, pad_token_id=0)).save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError, match=r"`bert` are not supported: a token depends on later ones"):
        load_model(str(tmp_path / "bert"))


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(UserError, match="cannot load a tokenizer"):
        load_tokenizer(str(folder))


def test_a_hub_id_is_here_when_all_of_its_weights_are_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached, revision = tmp_path / "models--nobody--tiny", "0" * 40
    snapshot = cached / "snapshots" / revision
    assert not is_here("nobody/tiny", root=tmp_path)
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text("{}")
    assert not is_here("nobody/tiny", root=tmp_path), "only its configuration was looked at"
    (snapshot / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    (snapshot / "1.safetensors").touch()
    assert not is_here("nobody/tiny", root=tmp_path), "the download was interrupted"
    (snapshot / "2.safetensors").touch()
    assert is_here("nobody/tiny", root=tmp_path)
    assert is_here("models--nobody--tiny", root=tmp_path) and not is_here("./nobody", root=tmp_path)
