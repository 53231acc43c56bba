"""The vLLM engine passes the checks for all engines, and names what a server lacks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lightningrl.config import EngineConfig
from lightningrl.engine import http_completions
from lightningrl.engine.base import Delta, Engine, EngineBusy, EngineSetup, Unanswerable, affinity, fresh, on_server
from lightningrl.engine.conformance import CHECKS, LOAD_CHECKS, Conformance
from lightningrl.engine.vllm import VLLMEngine
from lightningrl.errors import EngineError, UserError
from lightningrl.types import Sampling, Weights
from tests.engine.upstream import Upstream, running

TEXTS = {i: f"<{i}>" for i in range(60)}
ABOUT = Conformance(policy="policy", vocab_size=60)


def setup_of(*urls: str, folder: Path = Path("."), max_length: int = 64, policy: str = "policy") -> EngineSetup:
    return EngineSetup(
        policy=policy,
        config=EngineConfig(name="vllm", urls=list(urls), max_length=max_length),
        folder=folder,
        dtype="float32",
        decode=lambda ids: "".join(TEXTS[i] for i in ids),
        turn_end_id=2,
    )


@contextlib.asynccontextmanager
async def serving(*upstreams: Upstream, **setup: Any) -> AsyncIterator[VLLMEngine]:
    async with contextlib.AsyncExitStack() as stack:
        urls = [(await stack.enter_async_context(running(upstream))).url for upstream in upstreams]
        engine = VLLMEngine(setup_of(*urls, **setup))
        stack.push_async_callback(engine.close)
        yield engine


async def ask(engine: Engine, prompt: list[int] | None = None, *, stream: bool = False, **sampling: Any) -> list[Delta]:
    wanted = Sampling(**{"max_tokens": 8, "seed": 1, **sampling})
    return [
        delta
        async for delta in engine.generate(prompt or ABOUT.prompt(20), sampling=wanted, policy="policy", stream=stream)
    ]


async def until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("burst", [1, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_vllm_engine_conforms(check: Any, burst: int) -> None:
    async with serving(Upstream(texts=TEXTS, burst=burst)) as engine:
        await check(engine, ABOUT)


async def test_the_vllm_engine_conforms_in_front_of_several_servers(two_versions: tuple[Weights, Weights]) -> None:
    async with serving(*(Upstream(texts=TEXTS) for _ in range(3))) as engine:
        for check in (*LOAD_CHECKS, *CHECKS):
            await check(engine, replace(ABOUT, weights=two_versions))


@pytest.fixture
def two_versions(tmp_path: Path) -> tuple[Weights, Weights]:
    """The servers here answer as the bytes of the folder say."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        save_file({"model.norm.weight": np.full(4, len(name), np.float32)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    one, other = (
        Weights(policy="policy", version=version, uri=str(tmp_path / name))
        for version, name in enumerate(("one", "other"), start=1)
    )
    return one, other


@pytest.mark.parametrize("check", LOAD_CHECKS, ids=lambda check: check.__name__)
async def test_the_vllm_engine_serves_what_it_has_loaded(check: Any, two_versions: tuple[Weights, Weights]) -> None:
    async with serving(Upstream(texts=TEXTS)) as engine:
        await check(engine, replace(ABOUT, weights=two_versions))


async def test_events_that_arrive_together_are_one_delta() -> None:
    async with serving(Upstream(texts=TEXTS, eos=-1, burst=1000)) as engine:
        deltas = await ask(engine, stream=True, max_tokens=40)
        assert sum(len(delta.token_ids) for delta in deltas) == 40
        assert len(deltas) <= 3


async def test_a_request_sets_everything_that_server_defaults_could_change() -> None:
    upstream = Upstream(texts=TEXTS)
    async with serving(upstream) as engine:
        await ask(
            engine,
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            seed=2**64 - 1,
            stop=("no",),
            stop_token_ids=(5, 6),
            top_logprobs=3,
            max_tokens=1000,
        )
        sent = upstream.asked[-1]
        assert sent == {
            "model": "served",
            "prompt": ABOUT.prompt(20),
            "max_tokens": 64 - 20,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 3,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "seed": 2**63 - 1,
            "stop": ["no"],
            "stop_token_ids": [5, 6],
        }
        await ask(engine, grammar="start: /a/")
        assert upstream.asked[-1]["structured_outputs"] == {"grammar": "start: /a/"}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cancelled_generation_is_cancelled_on_the_server(stream: bool) -> None:
    upstream = Upstream(texts=TEXTS, eos=-1, step_s=0.2)
    async with serving(upstream, max_length=512) as engine:
        task = asyncio.create_task(ask(engine, stream=stream, max_tokens=400))
        await until(lambda: upstream.running == 1 and len(upstream.asked) > 1)
        task.cancel()
        await until(lambda: upstream.running == 0)
        assert upstream.cancelled == 1
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.pause(timeout_s=1.0)


async def test_connections_are_not_capped() -> None:
    upstream = Upstream(texts=TEXTS, eos=-1, step_s=20.0)
    async with serving(upstream) as engine:
        tasks = [asyncio.create_task(ask(engine, max_tokens=8)) for _ in range(256)]
        await until(lambda: upstream.running == 256)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("refuse", "kind", "says"),
    [
        ((429, {"Retry-After": "7"}, b'{"error": {"message": "too many"}}'), EngineBusy, "too many"),
        ((503, {}, b"overloaded"), EngineBusy, "overloaded"),
        ((400, {}, b'{"error": {"message": "that is too long", "code": 400}}'), Unanswerable, "400: that is too long"),
        ((404, {}, b'{"detail": "Not Found"}'), Unanswerable, "404: Not Found"),
        ((500, {}, b"\xff\xfe"), EngineError, "500"),
        ((307, {"Location": "http://other:8000/v1"}, b""), EngineError, "it redirects to `http://other:8000/v1`"),
        ((200, {}, b"<html>"), EngineError, "cannot be read"),
        ((200, {}, b'{"choices": []}'), EngineError, "incomplete completion"),
        (
            (200, {}, b'{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [null]}}]}'),
            EngineError,
            "cannot be read",
        ),
        ((200, {}, b'{"choices": [{"text": "x", "logprobs": {"token_logprobs": [-1]}}]}'), EngineError, "no token ids"),
        (
            (200, {}, b'{"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1]}}]}'),
            EngineError,
            "`2` tokens and `1` logprobs",
        ),
    ],
)
async def test_an_error_quotes_the_servers_message(refuse: Any, kind: type[EngineError], says: str) -> None:
    upstream = Upstream(texts=TEXTS)
    async with serving(upstream) as engine:
        await ask(engine)
        upstream.refuse = refuse
        with pytest.raises(EngineError) as raised:
            await ask(engine)
        assert type(raised.value) is kind and says in str(raised.value)
        if isinstance(raised.value, EngineBusy):
            assert raised.value.retry_after_s == (7.0 if refuse[0] == 429 else 1.0)
        upstream.refuse = None
        assert await ask(engine)


async def test_an_error_in_the_middle_of_a_stream_is_an_error() -> None:
    upstream = Upstream(texts=TEXTS)
    async with serving(upstream) as engine:
        await ask(engine)
        events = b'data: {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-1.5]}}]}\n\ndata: '
        upstream.refuse = (200, {}, events + b'{"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n')
        with pytest.raises(EngineError, match="out of memory"):
            await ask(engine, stream=True)
        upstream.refuse = (200, {}, events + b"[DONE]\n\n")
        with pytest.raises(EngineError, match="without a finish reason"):
            await ask(engine, stream=True)


async def test_an_event_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_completions, "EVENT_LIMIT", 2**10)
    upstream = Upstream(texts=TEXTS)
    async with serving(upstream) as engine:
        assert len(await ask(engine, stream=True)) > 0
        upstream.refuse = (200, {}, b"data: " + b"." * 2**12)
        with pytest.raises(EngineError, match="an event of more than `1024` bytes"):
            await ask(engine, stream=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_that_breaks_is_an_error(stream: bool) -> None:
    upstream = Upstream(texts=TEXTS, eos=-1)
    async with serving(upstream) as engine:
        await ask(engine)
        upstream.break_after = 3
        with pytest.raises(EngineError, match="broke off"):
            await ask(engine, stream=stream)


async def test_a_server_that_is_not_there_is_named() -> None:
    engine = VLLMEngine(setup_of("http://127.0.0.1:1/v1/"))
    with pytest.raises(EngineError, match=r"cannot reach `http://127.0.0.1:1`"):
        await ask(engine)
    await engine.close()


@pytest.mark.parametrize(("urls", "says"), [((), "no servers"), (("localhost:8000",), "not the address of a server")])
def test_settings_without_servers_are_refused(urls: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        VLLMEngine(setup_of(*urls))


async def test_unscaled_logprobs_are_refused_before_the_first_answer() -> None:
    async with serving(Upstream(texts=TEXTS, processed_logprobs=False)) as engine:
        with pytest.raises(EngineError, match="another distribution") as raised:
            await ask(engine)
        assert "--logprobs-mode processed_logprobs" in str(raised.value)


@pytest.mark.parametrize("page", [b"<html>It works!</html>", b"[1]", b"\xff", b""])
async def test_a_server_that_lists_no_models_but_something_else_is_refused(page: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page))
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    engine = VLLMEngine(setup_of(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"))
    with pytest.raises(EngineError, match="cannot be read") as raised:
        await ask(engine)
    assert "`engine.name`" in str(raised.value)
    await engine.close()
    listening.close()


async def test_a_server_with_a_shorter_context_is_refused() -> None:
    async with serving(Upstream(texts=TEXTS, max_model_len=32)) as engine:
        with pytest.raises(EngineError, match="takes `32` tokens"):
            await ask(engine)


async def test_a_prompt_that_does_not_fit_is_refused() -> None:
    async with serving(Upstream(texts=TEXTS)) as engine:
        with pytest.raises(EngineError, match="does not fit"):
            await ask(engine, ABOUT.prompt(64))


@pytest.mark.parametrize("stream", [True, False])
async def test_closing_ends_running_and_waiting_generations(stream: bool) -> None:
    upstream = Upstream(texts=TEXTS, eos=-1, step_s=0.05)
    async with serving(upstream, max_length=512) as engine:
        runs = asyncio.create_task(ask(engine, stream=stream, max_tokens=400))
        await until(lambda: upstream.running == 1 and len(upstream.asked) > 1)
        with pytest.raises(EngineError, match="still run"):
            await engine.pause(timeout_s=0.05)
        waits = asyncio.create_task(ask(engine))
        await asyncio.sleep(0.05)
        await engine.close()
        for task in (runs, waits):
            with pytest.raises(EngineError, match="closed"):
                await asyncio.wait_for(task, 1.0)


async def test_a_kept_connection_that_the_server_has_closed_costs_nothing() -> None:
    """The first request on each connection is answered; a second one meets a closed door."""
    upstream = Upstream(texts=TEXTS)
    async with running(upstream):
        host, port = upstream.url.removeprefix("http://").split(":")
        kept: list[int] = []

        async def door(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inside, out = await asyncio.open_connection(host, int(port))
            out.write(await reader.read(2**16))
            await asyncio.sleep(0.05)
            writer.write(await inside.read(2**16))
            kept.append(len(await reader.read(2**16)))
            out.close()
            writer.close()

        server = await asyncio.start_server(door, "127.0.0.1", 0)
        engine = VLLMEngine(setup_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        try:
            for _ in range(3):
                assert await ask(engine)
        finally:
            await engine.close()
            server.close()
        assert any(kept), "no connection was used twice, so nothing was tried"


def of(count: int) -> list[Upstream]:
    return [Upstream(texts=TEXTS, eos=-1) for _ in range(count)]


async def test_a_rollout_stays_on_one_server() -> None:
    upstreams = of(4)
    async with serving(*upstreams) as engine:
        places = []
        for rollout in range(24):
            token = affinity.set(f"rollout-{rollout}")
            before = [len(u.asked) for u in upstreams]
            for turn in range(3):
                await ask(engine, ABOUT.prompt(8 + 8 * turn, salt=turn), max_tokens=1)
            affinity.reset(token)
            used = [i for i, u in enumerate(upstreams) if len(u.asked) - before[i] >= 3]
            assert sum(len(u.asked) for u in upstreams) - sum(before) - 3 in (0, 4), "servers are looked at once"
            assert len(used) == 1
            places += used
        assert set(places) == {0, 1, 2, 3}


async def test_a_generation_goes_to_the_server_that_is_asked_for() -> None:
    upstreams = of(3)
    async with serving(*upstreams) as engine:
        await ask(engine, max_tokens=1)
        for number in (2, 0, 1, 1):
            before = [len(u.asked) for u in upstreams]
            place = on_server.set(number)
            await ask(engine, max_tokens=1)
            on_server.reset(place)
            assert [len(u.asked) - b for u, b in zip(upstreams, before, strict=True)] == [
                int(i == number) for i in range(3)
            ]


async def test_without_affinity_prompts_with_one_prefix_go_to_one_server() -> None:
    upstreams = of(3)
    async with serving(*upstreams, max_length=512) as engine:
        await ask(engine, max_tokens=1)
        before = [len(u.asked) for u in upstreams]
        for length in (260, 280, 300):
            await ask(engine, ABOUT.prompt(length), max_tokens=1)
        assert sorted(len(u.asked) - b for u, b in zip(upstreams, before, strict=True)) == [0, 0, 3]


async def test_an_overloaded_server_is_passed_over() -> None:
    upstreams = [Upstream(texts=TEXTS, eos=-1, step_s=0.2) for _ in range(3)]
    async with serving(*upstreams) as engine:
        tasks = [asyncio.create_task(ask(engine, max_tokens=8)) for _ in range(30)]  # all start alike
        await until(lambda: sum(u.running for u in upstreams) == 30, timeout_s=10.0)
        assert max(u.running for u in upstreams) <= 1 + 2 * 30 / 3, "at most twice its share"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def weights_of(folder: Path, *, version: int = 1, policy: str = "policy") -> Weights:
    return Weights(policy=policy, version=version, uri=str(folder))


async def test_every_server_loads_new_weights_with_the_output_head_named(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-00001"
    folder.symlink_to(model_folder)
    upstreams = of(2)
    async with serving(*upstreams) as engine:
        before = await ask(engine)
        await engine.pause()
        await engine.load(weights_of(folder))
        await engine.resume()
        after = await ask(engine)
        assert [delta.policy_version for delta in before + after] == [0, 1]
        assert before[0].token_ids != after[0].token_ids
        for upstream in upstreams:
            assert {"model.safetensors", "lm_head.safetensors", "config.json"} <= upstream.loaded[0].keys()
    assert [p.name for p in model_folder.parent.iterdir() if p.name.startswith(".")] == [], "nothing is left behind"


async def test_weights_that_cannot_be_loaded_are_refused(model_folder: Path, tmp_path: Path) -> None:
    async with serving(Upstream(texts=TEXTS)) as engine:
        with pytest.raises(EngineError, match="while generations run"):
            await engine.load(weights_of(model_folder))
        await engine.pause()
        with pytest.raises(EngineError, match="not `other`"):
            await engine.load(weights_of(model_folder, policy="other"))
        with pytest.raises(EngineError, match="no weights"):
            await engine.load(weights_of(tmp_path))
        assert engine.version == 0
    async with serving(Upstream(texts=TEXTS, dev_mode=False)) as engine:
        await engine.pause()
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.load(weights_of(model_folder))
    async with serving(Upstream(texts=TEXTS, reset=False)) as engine:
        await engine.pause()
        with pytest.raises(EngineError, match="prefix cache"):
            await engine.load(weights_of(model_folder))


def adapter_of(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(content)
    return folder


def lora(folder: Path, *, version: int = 1, policy: str = "policy") -> Weights:
    return Weights(policy=policy, version=version, uri=str(folder), kind="lora")


async def answer_of(engine: Engine, policy: str) -> Delta:
    (delta,) = [
        d async for d in engine.generate(ABOUT.prompt(20), sampling=Sampling(max_tokens=8, seed=1), policy=policy)
    ]
    return delta


async def take(engine: Engine, weights: Weights) -> None:
    await engine.pause()
    await engine.load(weights)
    await engine.resume()


async def test_one_server_holds_an_adapter_for_each_policy_and_no_old_ones(tmp_path: Path) -> None:
    names = ("planner", "solver", "critic")
    upstream = Upstream(texts=TEXTS, lora_room=3)
    async with running(upstream), contextlib.AsyncExitStack() as stack:
        engines = {name: VLLMEngine(setup_of(upstream.url, policy=name)) for name in names}
        for engine in engines.values():
            stack.push_async_callback(engine.close)
        base = {(await answer_of(engines[name], name)).token_ids for name in names}
        assert len(base) == 1, "before the first publication everybody speaks as the base"
        for version in (1, 2):
            for name, engine in engines.items():
                await take(
                    engine,
                    lora(adapter_of(tmp_path / f"{name}-{version}", f"{name} {version}"), version=version, policy=name),
                )
            answers = [await answer_of(engines[name], name) for name in names]
            assert len({*base, *(a.token_ids for a in answers)}) == 4
            assert {a.policy_version for a in answers} == {version}
            assert sorted(held.partition("-")[0] for held in upstream.adapters) == sorted(
                f"{name}@{version}" for name in names
            )
        assert upstream.loaded == [], "the base is left alone"


async def test_an_adapters_name_is_a_hash_so_that_a_resumed_run_finds_it(tmp_path: Path) -> None:
    upstream = Upstream(texts=TEXTS, lora_room=8)
    one, other = adapter_of(tmp_path / "one", "1"), adapter_of(tmp_path / "other", "2")
    async with running(upstream):
        for folder in (one, one, other):  # a run; the same again, after it was killed; another run that has come as far
            engine = VLLMEngine(setup_of(upstream.url))
            await take(engine, lora(folder))
            assert upstream.asked[-1]["model"] == "served", "the server was looked at"
            await answer_of(engine, "policy")
            assert upstream.adapters[upstream.asked[-1]["model"]]
            await take(engine, lora(folder))
            await engine.close()
        assert len(upstream.adapters) == 2


async def test_an_adapter_that_a_run_left_in_another_folder_is_loaded_anew(tmp_path: Path) -> None:
    """vLLM reads an adapter again when it has put it aside. If its folder is gone then, the server dies."""
    upstream = Upstream(texts=TEXTS, lora_room=8)
    async with running(upstream):
        for folder in (adapter_of(tmp_path / "one", "1"), adapter_of(tmp_path / "copy", "1")):
            engine = VLLMEngine(setup_of(upstream.url))
            await take(engine, lora(folder))
            await engine.close()
            assert list(upstream.adapters) == list(upstream.roots)
            assert set(upstream.roots.values()) == {str(folder)}


async def test_every_server_takes_the_adapter(tmp_path: Path) -> None:
    upstreams = [Upstream(texts=TEXTS, lora_room=1) for _ in range(2)]
    async with serving(*upstreams) as engine:
        await take(engine, lora(adapter_of(tmp_path / "one", "1")))
        await take(engine, lora(adapter_of(tmp_path / "two", "2"), version=2))
        assert [len(upstream.adapters) for upstream in upstreams] == [1, 1]
        assert upstreams[0].adapters == upstreams[1].adapters
        assert (await ask(engine))[0].policy_version == 2


async def test_an_adapter_that_the_server_reads_from_another_folder_is_refused(tmp_path: Path) -> None:
    async with serving(Upstream(texts=TEXTS, lora_room=1, swapped="/elsewhere")) as engine:
        await engine.pause()
        with pytest.raises(EngineError, match=r"serves another adapter as `policy@1-.*`: the one in `/elsewhere`"):
            await engine.load(lora(adapter_of(tmp_path / "one", "1")))


@pytest.mark.parametrize("kind", ["full", "lora"])
async def test_weights_are_not_loaded_into_a_server_of_another_dtype(
    kind: str, two_versions: tuple[Weights, Weights], tmp_path: Path
) -> None:
    weights = two_versions[0] if kind == "full" else lora(adapter_of(tmp_path / "adapter", "1"))
    upstream = Upstream(texts=TEXTS, lora_room=1, dtype="float16")
    async with serving(upstream) as engine:
        await engine.pause()
        with pytest.raises(EngineError, match="computes in `float16`, the trainer in `float32`"):
            await engine.load(weights)
    assert not upstream.loaded and not upstream.adapters


async def test_a_fresh_generation_shares_no_keys_and_values() -> None:
    upstream = Upstream(texts=TEXTS)
    async with serving(upstream) as engine:
        await ask(engine)
        token = fresh.set(True)
        await ask(engine)
        await ask(engine)
        fresh.reset(token)
        await ask(engine)
    salts = [asked.get("cache_salt") for asked in upstream.asked[1:]]  # the first asks whether logprobs are right
    assert salts[0] is None and salts[3] is None and salts[1] and salts[2] and salts[1] != salts[2]


async def test_adapters_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    async with serving(Upstream(texts=TEXTS, lora_room=0)) as engine:
        await engine.pause()
        with pytest.raises(EngineError, match="no weights"):
            await engine.load(lora(tmp_path))
        with pytest.raises(EngineError, match="cannot be loaded"):
            await engine.load(lora(adapter_of(tmp_path / "one", "1")))
        assert engine.version == 0
    async with serving(Upstream(texts=TEXTS)) as engine:
        await engine.pause()
        with pytest.raises(EngineError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            await engine.load(lora(tmp_path / "one"))
