"""Faults of a real vLLM are seen after a publication and named, at small and large learning rates.

The faults are put between the engine and its servers: a request that is not sent, or sent with another folder.
"""

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.proof import OTHER, Arm, DTypeName, Fault, mix, run
from lightningrl.config import EngineConfig
from lightningrl.engine.base import Engine, EngineSetup
from lightningrl.engine.vllm import VLLMEngine
from lightningrl.types import Weights
from tests_vllm.conftest import Models, serving

pytestmark = pytest.mark.timeout(600)
ROOM = 256
"""Most tokens of a request: as the servers are started."""


@pytest.fixture(scope="module")
def narrow_url(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server in bfloat16."""
    with serving(models.first, tmp_path_factory.mktemp("narrow") / "log.txt", "--dtype", "bfloat16") as url:
        yield url


@pytest.fixture(scope="module")
def raw_url(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server that reports raw logprobs."""
    flags = ("--logprobs-mode", "raw_logprobs")
    with serving(models.first, tmp_path_factory.mktemp("raw") / "log.txt", *flags) as url:
        yield url


def engine_of(url: str, model: Path, *, dtype: str) -> VLLMEngine:
    config = EngineConfig(name="vllm", urls=[url], max_length=ROOM)
    setup = EngineSetup(
        policy="policy", config=config, folder=model, dtype=dtype, decode=lambda ids: "", turn_end_id=None
    )
    return VLLMEngine(setup)


def faulty(url: str, arm: Arm, model: Path, folder: Path, *, since: int = 1) -> Engine:
    """An engine whose requests are not all sent as they should be, from version `since` on."""
    engine = engine_of(url, model, dtype=arm.dtype)
    pool = engine._completions.pool  # pyright: ignore[reportPrivateUsage]  the fault
    send = pool.post

    async def post(server: Any, path: str, payload: Any = None, **options: Any) -> bytes:
        if path == "/reset_prefix_cache" and arm.fault == "cache":
            return b'{"success": true}'
        if path == "/collective_rpc":
            whole = Path(payload["kwargs"]["weights_path"])
            wrong = _version(whole.name) >= since
            if wrong and arm.fault == "old":
                return b"{}"
            if wrong and arm.fault == "half":
                mixed = folder / f"mixed-{whole.name}"
                mix(whole, _copied(folder / "before", None), mixed)
                payload = {**payload, "kwargs": {"weights_path": str(mixed)}}
            else:
                _copied(folder / "before", whole)
        if path == "/v1/load_lora_adapter" and arm.fault == "adapter" and _version(payload["lora_path"]) >= since:
            payload = {**payload, "lora_path": str(folder / OTHER)}
        return await send(server, path, payload, **options)

    pool.post = post
    return engine


def _version(path: str) -> int:
    """`…/step-00003` → 3; 0 for a path without a version."""
    found = re.search(r"step-(\d+)", path)
    return int(found[1]) if found else 0


def _copied(copy: Path, folder: Path | None) -> Path:
    """`copy`, with the files of `folder`: a folder with the output head exists only while it is loaded."""
    if folder is not None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy, ignore=lambda _, names: [name for name in names if name == "trainer"])
    return copy


def seen(url: str, models: Models, arm: Arm, *, steps: int, seed: int = 0, since: int = 1) -> tuple[int | None, str]:
    """The version at which the engine was accused, and of what. The server then has its first weights again."""

    def serve(arm: Arm, model: Path, folder: Path) -> Engine:
        return faulty(url, arm, model, folder, since=since)

    async def restored() -> dict[str, Any]:
        try:
            return await run(arm, seed=seed, steps=steps, model=models.first, serve=serve)
        finally:
            await restore(url, models, dtype=arm.dtype)

    found = asyncio.run(restored())
    return found["version"], found["error"] or ""


async def restore(url: str, models: Models, *, dtype: str) -> None:
    engine = engine_of(url, models.first, dtype=dtype)
    try:
        await engine.pause()
        await engine.load(Weights(policy="policy", version=0, uri=str(models.first)))
    finally:
        await engine.close()


SAYS = {
    "old": "still serves the old weights",
    "half": "a mixture of old and new weights",
    "adapter": "serves another adapter",
    "cache": "keys and values",
}


SINCE = [1, 2]
"""At version 1, checksums see a fault (vLLM 0.32); at version 2, only probes do."""


@pytest.mark.parametrize("since", SINCE)
@pytest.mark.parametrize("rate", [1e-6, 1e-4])
@pytest.mark.parametrize("fault", ["old", "cache", "half"])
def test_faults_are_seen_at_once_in_float32(fault: Fault, rate: float, since: int, models: Models, url: str) -> None:
    arm = Arm(fault=fault, rate=rate, dtype="float32")
    version, error = seen(url, models, arm, steps=since, seed=since, since=since)
    assert version == (1 if fault == "cache" else since) and SAYS[fault] in error


@pytest.mark.parametrize("since", SINCE)
@pytest.mark.parametrize("rate", [1e-6, 1e-4])
@pytest.mark.parametrize("fault", ["old", "cache"])
def test_faults_are_seen_at_once_in_bfloat16(
    fault: Fault, rate: float, since: int, models: Models, narrow_url: str
) -> None:
    arm = Arm(fault=fault, rate=rate, dtype="bfloat16")
    version, error = seen(narrow_url, models, arm, steps=since, seed=since, since=since)
    assert version == (1 if fault == "cache" else since) and SAYS[fault] in error


@pytest.mark.parametrize("since", SINCE)
def test_half_of_the_tensors_are_seen_in_bfloat16(since: int, models: Models, narrow_url: str) -> None:
    arm = Arm(fault="half", rate=1e-4, dtype="bfloat16")
    version, error = seen(narrow_url, models, arm, steps=4, since=since)
    assert version is not None and version >= since
    assert SAYS["half"] in error or "or a part of them" in error, "checksums see the embeddings alone on CPUs"


@pytest.mark.parametrize("rate", [1e-6, 1e-4])
def test_another_adapter_is_seen_at_the_first_version(rate: float, models: Models, narrow_url: str) -> None:
    version, error = seen(narrow_url, models, Arm(fault="adapter", rate=rate, dtype="bfloat16", rank=8), steps=1)
    assert version == 1 and SAYS["adapter"] in error


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_dtype_is_named_before_the_first_step(
    dtype: DTypeName, rank: int, models: Models, url: str, narrow_url: str
) -> None:
    wrong, theirs = (narrow_url, "bfloat16") if dtype == "float32" else (url, "float32")
    found = asyncio.run(
        run(
            Arm(fault="none", rate=1e-6, dtype=dtype, rank=rank),
            seed=0,
            steps=1,
            model=models.first,
            serve=lambda arm, model, folder: faulty(wrong, arm, model, folder),
        )
    )
    assert found["version"] == 0 and f"computes in `{theirs}`, the trainer in `{dtype}`" in found["error"]


def test_raw_logprobs_are_named_before_the_first_step(models: Models, raw_url: str) -> None:
    arm = Arm(fault="none", rate=1e-6, dtype="float32")
    serve = lambda arm, model, folder: faulty(raw_url, arm, model, folder)  # noqa: E731
    found = asyncio.run(run(arm, seed=0, steps=1, model=models.first, serve=serve))
    assert found["version"] == 0 and "logprobs of another distribution" in found["error"]


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("rate", [1e-6, 1e-4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_healthy_server_is_not_accused(
    dtype: DTypeName, rate: float, rank: int, models: Models, url: str, narrow_url: str
) -> None:
    server = url if dtype == "float32" else narrow_url
    assert seen(server, models, Arm(fault="none", rate=rate, dtype=dtype, rank=rank), steps=4) == (None, "")
