"""The embedded engine, beyond the checks for all engines: prefix reuse, shared weights, cancellation, failures."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lightningrl.engine import base
from lightningrl.engine.base import Delta
from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.errors import EngineError, UserError
from lightningrl.models.load import export_folder
from lightningrl.models.tiny import build_model, build_tokenizer
from lightningrl.types import Sampling, Weights

PROMPT = [(i * i * 7 + i) % 300 for i in range(40)]


async def ask(engine: EmbeddedEngine, prompt: list[int], *, sampling: Sampling) -> Delta:
    (delta,) = [d async for d in engine.generate(prompt, sampling=sampling, policy="policy")]
    return delta


async def test_prompts_that_arrive_together_are_computed_once() -> None:
    engine = EmbeddedEngine(build_model(300), slots=16, max_length=64)
    await engine.pause()
    asking = [asyncio.create_task(ask(engine, PROMPT, sampling=Sampling(max_tokens=4, seed=i))) for i in range(8)]
    await asyncio.sleep(0.05)
    await engine.resume()
    answers = await asyncio.gather(*asking)
    assert len({a.token_ids for a in answers}) > 1
    assert (
        engine.statistics.prompt_tokens_computed == 40 + 7
    )  # the last token of each is computed again, to sample from
    assert engine.statistics.prompt_tokens_reused == 7 * 39
    await engine.close()


async def test_the_next_turn_computes_only_what_is_new() -> None:
    engine = EmbeddedEngine(build_model(300), slots=2, max_length=128)
    first = await ask(engine, PROMPT, sampling=Sampling(max_tokens=10, seed=1))
    before = engine.statistics.prompt_tokens_computed
    await ask(engine, [*PROMPT, *first.token_ids, 5, 6, 7], sampling=Sampling(max_tokens=2, seed=1))
    # the last sampled token was never read by the model, so its keys and values are missing too
    assert engine.statistics.prompt_tokens_computed - before == 3 + 1
    await engine.close()


async def test_conversations_stay_cached_as_long_as_there_are_rows() -> None:
    engine = EmbeddedEngine(build_model(300), slots=4, max_length=64)
    prompts = [[salt, *PROMPT] for salt in range(8)]  # rows are twice the slots
    for prompt in prompts:
        await ask(engine, prompt, sampling=Sampling(max_tokens=2, seed=1))
    before = engine.statistics.prompt_tokens_computed
    for prompt in prompts:
        await ask(engine, prompt, sampling=Sampling(max_tokens=2, seed=2))
    assert engine.statistics.prompt_tokens_computed - before == 8
    await engine.close()


async def test_a_fresh_generation_computes_its_whole_prompt_and_gives_equal_bits() -> None:
    engine, sampling = EmbeddedEngine(build_model(300), slots=2, max_length=64), Sampling(max_tokens=4, seed=1)
    first = await ask(engine, PROMPT, sampling=sampling)
    token = base.fresh.set(True)
    again = await ask(engine, PROMPT, sampling=sampling)
    base.fresh.reset(token)
    assert again == first
    assert (engine.statistics.prompt_tokens_computed, engine.statistics.prompt_tokens_reused) == (80, 0)
    await ask(engine, PROMPT, sampling=sampling)
    assert engine.statistics.prompt_tokens_reused == 39
    await engine.close()


async def test_a_trainers_update_is_served_and_clears_the_cache() -> None:
    model, sampling = build_model(300), Sampling(max_tokens=8, seed=1)
    engine = EmbeddedEngine(model, slots=2, max_length=64, shared=True)
    old = await ask(engine, PROMPT, sampling=sampling)
    await engine.pause()
    with torch.no_grad():
        for parameter in model.hf.parameters():
            parameter.mul_(1.01)
    await engine.load(Weights(policy="policy", version=1, uri=""))
    await engine.resume()
    new = await ask(engine, PROMPT, sampling=sampling)
    assert (old.policy_version, new.policy_version) == (0, 1)
    assert engine.statistics.prompt_tokens_reused == 0
    fresh = EmbeddedEngine(model, slots=2, max_length=64)
    expected = await ask(fresh, PROMPT, sampling=sampling)
    assert new.logprobs == expected.logprobs != old.logprobs
    await engine.close()
    await fresh.close()


async def test_a_folder_loads_into_a_running_engine(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["SELECT name FROM city"], vocab_size=300)
    model, other = build_model(len(tokenizer), seed=1), build_model(len(tokenizer), seed=2)
    export_folder(other, tmp_path / "weights", tokenizer=tokenizer)
    engine, prompt = EmbeddedEngine(model, slots=2, max_length=64), PROMPT
    prompt = [t % len(tokenizer) for t in PROMPT]
    with pytest.raises(EngineError, match="`pause`"):
        await engine.load(Weights(policy="policy", version=3, uri=str(tmp_path / "weights")))
    await engine.pause()
    with pytest.raises(UserError, match="no model folder"):
        await engine.load(Weights(policy="policy", version=3, uri=str(tmp_path / "nothing")))
    await engine.load(Weights(policy="policy", version=3, uri=str(tmp_path / "weights")))
    await engine.resume()
    mine = await ask(engine, prompt, sampling=Sampling(max_tokens=8, seed=1))
    reference = EmbeddedEngine(other, slots=2, max_length=64)
    assert mine.policy_version == 3
    assert mine.logprobs == (await ask(reference, prompt, sampling=Sampling(max_tokens=8, seed=1))).logprobs
    await engine.close()
    await reference.close()


async def test_a_stop_string_ends_the_answer_even_across_tokens() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"

    def decode(ids: list[int]) -> str:
        return "".join(letters[t % 26] for t in ids)

    engine = EmbeddedEngine(build_model(300), slots=2, max_length=64, decode=decode)
    free = await ask(engine, PROMPT, sampling=Sampling(max_tokens=20, seed=1))
    stop = decode(list(free.token_ids))[9:12]
    ended = await ask(engine, PROMPT, sampling=Sampling(max_tokens=20, seed=1, stop=("nowhere!", stop)))
    assert ended.token_ids == free.token_ids[:12]
    assert ended.finish_reason == "stop"
    await engine.close()


async def test_a_completion_ends_where_its_row_is_full() -> None:
    engine = EmbeddedEngine(build_model(300), slots=2, max_length=64)
    answer = await ask(engine, PROMPT, sampling=Sampling(max_tokens=1000, seed=1))
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 64 - 40
    with pytest.raises(EngineError, match=r"(?s)`64` tokens does not fit in `64`.*hint:"):
        await ask(engine, [1] * 64, sampling=Sampling())
    for prompt in ([], [300], [-1]):
        with pytest.raises(EngineError):
            await ask(engine, prompt, sampling=Sampling())
    with pytest.raises(EngineError, match="stop strings need"):
        await ask(engine, PROMPT, sampling=Sampling(stop=("x",)))
    await engine.close()


async def test_a_client_that_leaves_cancels_its_generation() -> None:
    engine = EmbeddedEngine(build_model(300), slots=2, max_length=4096)
    for _ in range(3):
        task = asyncio.create_task(ask(engine, PROMPT, sampling=Sampling(max_tokens=4000, seed=1)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    started = time.monotonic()
    await engine.pause(timeout_s=10.0)
    assert time.monotonic() - started < 1.0
    sampled = engine.statistics.tokens_sampled
    assert 0 < sampled < 3 * 2000
    await asyncio.sleep(0.1)
    assert engine.statistics.tokens_sampled == sampled
    await engine.close()


async def test_a_failing_step_is_an_engine_error_for_all_and_the_next_request_is_served() -> None:
    model = build_model(300, layers=1)
    engine = EmbeddedEngine(model, slots=2, max_length=64)
    expected = await ask(engine, PROMPT, sampling=Sampling(max_tokens=4, seed=1))
    norm, model.hf.model.norm = model.hf.model.norm, None
    asking = [ask(engine, [i, *PROMPT], sampling=Sampling(max_tokens=4)) for i in range(4)]
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(a) for a in answers] == [EngineError] * 4
    model.hf.model.norm = norm
    assert await ask(engine, PROMPT, sampling=Sampling(max_tokens=4, seed=1)) == expected
    await engine.close()


async def test_a_lost_device_closes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    model = build_model(300, layers=1)
    engine = EmbeddedEngine(model, slots=2, max_length=64)
    model.hf.model.norm = None
    monkeypatch.setattr(engine._scheduler.cache, "reset", lost)
    async with asyncio.timeout(60):
        for expected in ("generation aborted", "closed"):
            with pytest.raises(EngineError, match=expected):
                await ask(engine, PROMPT, sampling=Sampling(max_tokens=4))
        await engine.close()


async def test_nan_logits_end_the_completion_as_an_error() -> None:
    model = build_model(300, layers=1)
    with torch.no_grad():
        model.hf.model.norm.weight.fill_(torch.nan)
    engine = EmbeddedEngine(model, slots=2, max_length=64)
    answer = await ask(engine, PROMPT, sampling=Sampling(max_tokens=4, seed=1))
    assert answer.finish_reason == "error"
    await engine.close()


async def test_closing_the_engine_ends_running_and_waiting_generations() -> None:
    engine = EmbeddedEngine(build_model(300), slots=1, max_length=4096)
    asking = [asyncio.create_task(ask(engine, PROMPT, sampling=Sampling(max_tokens=4000, seed=i))) for i in range(3)]
    await asyncio.sleep(0.1)
    await engine.close()
    for task in asking:
        with pytest.raises(EngineError, match="closed"):
            await task


async def test_a_pause_that_times_out_is_an_error() -> None:
    engine = EmbeddedEngine(build_model(300), slots=1, max_length=4096)
    task = asyncio.create_task(ask(engine, PROMPT, sampling=Sampling(max_tokens=4000, seed=1)))
    await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match="still run"):
        await engine.pause(timeout_s=0.05)
    task.cancel()
    await engine.close()


async def test_the_engines_thread_count_binds_no_other_thread() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    engine = EmbeddedEngine(build_model(300), slots=1, max_length=64, threads=1)
    await ask(engine, PROMPT, sampling=Sampling(max_tokens=4, seed=1))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    await engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
async def test_the_decoding_thread_has_a_lower_priority() -> None:
    engine = EmbeddedEngine(build_model(300, seed=0), policy="late")
    try:
        await engine.resume()  # the thread has begun
        [decoder] = [thread.native_id for thread in threading.enumerate() if thread.name == "engine-late"]
        assert decoder is not None
        assert os.getpriority(os.PRIO_PROCESS, decoder) > os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    finally:
        await engine.close()


def test_a_slot_longer_than_the_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"`engine.max_length` is 5000"):
        EmbeddedEngine(build_model(300), max_length=5000)
