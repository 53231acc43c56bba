"""A server that does not load every tensor is seen by its checksums, at any learning rate."""

import hashlib
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import load_file, save_file

from lightningrl.engine.http import Pool
from lightningrl.engine.vllm_weights import WeightCheck, changed_tensors, kept, parts_of
from lightningrl.errors import EngineError

LAYER = "model.layers.0"
NAMES = tuple(
    f"{LAYER}.{name}.weight"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj", "input_layernorm")
)
QKV, DOWN, NORM = f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.mlp.down_proj.weight", NAMES[4]


@dataclass
class Checker:
    """A server's tensors, as vLLM names and joins them. It loads folders without the tensors in `skipped`."""

    skipped: Set[str] = frozenset()
    packed: Set[str] = frozenset()
    """Tensors without bytes of their own, as in vLLM for CPUs."""
    resets: int = 0
    asked: int = 0
    tensors: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def read(self, folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        q, k, v, down, norm = (stored[name] for name in NAMES)
        loaded = {QKV: np.concatenate([q, k, v]), DOWN: down, NORM: norm}
        self.tensors |= {name: value for name, value in loaded.items() if name not in self.skipped}

    def hashes(self) -> dict[str, str]:
        def digest(name: str) -> str:
            return hashlib.sha256(b"" if name in self.packed else self.tensors[name].tobytes()).hexdigest()

        return {f"dp0:pp0:pcp0:tp0:{name}": digest(name) for name in self.tensors}

    async def answer(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.asked += 1
        if asked["action"] == "reset":
            self.resets += 1
            self.tensors = {name: np.zeros_like(value) for name, value in self.tensors.items()}
            return web.json_response({"status": "reset"})
        if asked["action"] == "checksum":
            return web.json_response({"checksums": self.hashes()})
        wrong = sorted(name for name, digest in self.hashes().items() if asked["baseline"].get(name) != digest)
        return web.json_response({"match": not wrong, "mismatches": wrong})


@asynccontextmanager
async def checked(checker: Checker | None) -> AsyncIterator[WeightCheck]:
    """None: a server without the endpoint."""
    app = web.Application()
    if checker is not None:
        app.add_routes([web.post("/weight_checker", checker.answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    pool = Pool([f"http://{host}:{port}"], engine="vllm")
    try:
        yield WeightCheck(pool, pool.servers[0])
    finally:
        await pool.close()
        await runner.cleanup()


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """Folders; each differs from the one before in all matrices, and not in the norm."""
    rng = np.random.default_rng(0)
    folders = [tmp_path / f"step-{version}" for version in range(3)]
    for folder in folders:
        folder.mkdir()
        tensors = {name: rng.normal(size=(4, 4)).astype(np.float32) for name in NAMES[:4]}
        save_file(tensors | {NORM: np.ones(4, np.float32)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folders


async def load(checker: Checker, check: WeightCheck, *folders: Path) -> None:
    for folder in folders:

        async def read(folder: Path = folder) -> None:
            checker.read(folder)

        await check.load(folder, read)


async def test_a_server_that_loads_every_tensor_passes_and_is_asked_once_a_run(versions: list[Path]) -> None:
    checker = Checker()
    async with checked(checker) as check:
        await load(checker, check, *versions[:2])
        asked = checker.asked
        await load(checker, check, versions[2])
    assert (checker.resets, checker.asked) == (1, asked)
    np.testing.assert_array_equal(checker.tensors[DOWN], load_file(versions[2] / "model.safetensors")[DOWN])


async def test_a_tensor_that_is_never_written_is_named_at_the_first_load(versions: list[Path]) -> None:
    checker = Checker()
    checker.read(versions[0])
    checker.skipped = {DOWN}
    async with checked(checker) as check:
        with pytest.raises(EngineError, match=rf"does not load all tensors: zeros stay in `{DOWN}`"):
            await load(checker, check, versions[0])


@pytest.mark.parametrize("name", [QKV, DOWN])
async def test_a_tensor_that_keeps_its_old_values_is_named_at_the_second_load(name: str, versions: list[Path]) -> None:
    checker = Checker()
    async with checked(checker) as check:
        await load(checker, check, versions[0])
        checker.skipped = {name}
        with pytest.raises(
            EngineError, match=f"still serves a mixture of old and new weights: nothing has changed in `{name}`"
        ):
            await load(checker, check, versions[1])


async def test_a_server_that_loads_nothing_at_the_second_load_is_seen(versions: list[Path]) -> None:
    checker = Checker()
    async with checked(checker) as check:
        await load(checker, check, versions[0])
        checker.skipped = {QKV, DOWN, NORM}
        with pytest.raises(EngineError, match="still serves the old weights"):
            await load(checker, check, versions[1])


async def test_tensors_without_bytes_of_their_own_are_not_compared(versions: list[Path]) -> None:
    checker = Checker(packed={QKV, DOWN})
    async with checked(checker) as check:
        await load(checker, check, *versions)


async def test_a_step_that_changes_no_tensor_is_no_fault_and_the_next_one_is_checked(versions: list[Path]) -> None:
    checker = Checker()
    async with checked(checker) as check:
        await load(checker, check, versions[0], versions[0])
        checker.skipped = {DOWN}
        with pytest.raises(EngineError, match="a mixture of old and new weights"):
            await load(checker, check, versions[1])


async def test_servers_without_the_endpoint_are_loaded_all_the_same(versions: list[Path]) -> None:
    checker = Checker()
    async with checked(None) as check:
        await load(checker, check, *versions)
    assert checker.tensors


def test_folders_are_compared_byte_by_byte(versions: list[Path]) -> None:
    assert changed_tensors(versions[0], versions[1]) == set(NAMES[:4])
    assert changed_tensors(versions[0], versions[0]) == set()


def test_joined_tensors_have_the_parts_of_the_folder() -> None:
    assert parts_of(QKV) == set(NAMES[:3])
    assert parts_of(DOWN) == {DOWN}


def test_one_shard_of_a_tensor_may_stay_as_it_was() -> None:
    before = {"tp0:embed.weight": "a", "tp1:embed.weight": "b", "tp0:norm.weight": "c"}
    changed = {"embed.weight", "norm.weight"}
    assert kept(before, before | {"tp0:embed.weight": "A"}, changed=changed) == (["norm.weight"], ["embed.weight"])
    assert kept(before, before, changed=changed) == (["embed.weight", "norm.weight"], [])
