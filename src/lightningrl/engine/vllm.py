"""An engine over vLLM servers: token ids in; sampled token ids and their log-probabilities out, over HTTP.

docs/engines.md says how to start a server. Before the first generation the engine checks that prompts fit, and that
log-probabilities belong to the distribution that is sampled from. Each server loads weights from a folder that it can
read.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence, Set
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from lightningrl.engine.base import Delta, EngineSetup, Top, Unanswerable, check_policy, fresh
from lightningrl.engine.http import Pool, Server, decoded
from lightningrl.engine.http_completions import (
    Choice,
    Completion,
    Completions,
    Kind,
    Request,
    Tokens,
    likeliest,
    models_in,
)
from lightningrl.engine.probe import is_certain
from lightningrl.engine.vllm_folder import with_output_head
from lightningrl.engine.vllm_weights import WeightCheck
from lightningrl.errors import EngineError
from lightningrl.types import Sampling, Weights

FLAG = "--logprobs-mode processed_logprobs"
DEV_MODE = "start vLLM with the environment variable `VLLM_SERVER_DEV_MODE=1`: only then can weights be loaded"
LORA_MODE = (
    "start vLLM with `--enable-lora`, a sufficient `--max-lora-rank`, "
    "and the environment variable `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`"
)
ROOM = "start vLLM with a `--max-loras` of at least the number of policies"
NEEDED = {"full": "config.json", "lora": "adapter_config.json"}
"""Kind of weights → the file that its folder must have."""
LARK = "grammars need `--structured-outputs-config.backend guidance` on the server"
TOKEN_ID = "token_id:"
"""vLLM's prefix of a token id in place of the token's text."""
PROBE_IDS = [1, 2, 3, 5, 8]
"""Prompt of the check of a server; every vocabulary has these ids."""


class _Structured(msgspec.Struct):
    grammar: str


class _Body(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A completion request. It sets everything that a server's `generation_config` could change otherwise."""

    model: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int
    return_token_ids: bool
    return_tokens_as_token_ids: bool = False
    """Report the likeliest tokens by id: without this they come as text, which is not unique."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = False
    structured_outputs: _Structured | None = None
    cache_salt: str | None = None
    """Requests with different salts do not share keys and values."""


class _Logprobs(msgspec.Struct):
    token_logprobs: tuple[float, ...]


class _TopLogprobs(msgspec.Struct):
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    """Token → log-probability, for the sampled token and the likeliest ones."""


class _Reset(msgspec.Struct):
    success: bool


class _ModelConfig(msgspec.Struct, frozen=True):
    dtype: str = ""
    """`torch.bfloat16`; empty: not reported."""


class _Config(msgspec.Struct, frozen=True):
    model_config: _ModelConfig = _ModelConfig()


class _Info(msgspec.Struct):
    vllm_config: _Config = _Config()


_encode = msgspec.json.Encoder().encode
_info = msgspec.json.Decoder(_Info)
_plain = msgspec.json.Decoder(list[Completion[_Logprobs]])
_reset = msgspec.json.Decoder(_Reset)
_with_top = msgspec.json.Decoder(list[Completion[_TopLogprobs]])


class VLLMEngine:
    """An `Engine` over the servers at `engine.urls`."""

    def __init__(self, setup: EngineSetup) -> None:
        self._max_length = setup.config.max_length
        kind = Kind(
            name="vllm",
            encode=lambda request: _encode(_body(request)),
            decoder=lambda sampling: _with_top if sampling.top_logprobs else _plain,
            tokens=_tokens,
            check=self._check,
            refused=lambda sampling: LARK if sampling.grammar else None,
        )
        self._completions = Completions(setup, kind=kind)
        self._dtype, self._loaded = setup.dtype, False
        self._checks: dict[str, WeightCheck] = {}
        """Server URL → the check that it loads all weights."""
        self._adapters: dict[str, str] = {}
        """Server URL → name of this policy's adapter on it."""

    @property
    def version(self) -> int:
        return self._completions.version

    def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        return self._completions.generate(prompt_ids, sampling=sampling, policy=policy, stream=stream)

    async def load(self, weights: Weights) -> None:
        """Have every server read the folder `weights.uri` and drop its prefix cache.

        A server holds the adapters of several policies. Its prefix cache tells adapters apart by name, so no two
        adapters ever have one name.
        """
        self.check_load(weights)
        completions = self._completions
        await completions.check()
        if not self._loaded:
            await _all(self._check_dtype(server) for server in completions.pool.servers)
        await self._load_into(completions.pool.servers, weights)
        self._loaded = True
        completions.version = weights.version

    def check_load(self, weights: Weights) -> None:
        """Raises `EngineError` if these weights cannot be loaded now, whatever the servers do."""
        gate = self._completions.gate
        gate.refuse_if_closed()
        check_policy(weights.policy, served=self._completions.policy)
        if not gate.drained:
            raise EngineError("weights cannot change while generations run", hint="`pause` the engine first")
        folder = Path(weights.uri).resolve()
        if not (folder / NEEDED[weights.kind]).is_file():
            raise EngineError(
                f"no weights that vLLM can load at `{folder}`", hint="publish a Hugging Face folder, or an adapter's"
            )

    async def check(self) -> None:
        """Check the servers now, not before the first generation. Raises `EngineError` if one is unfit."""
        await self._completions.check()

    async def restore(self, weights: Weights | None, urls: Set[str]) -> None:
        """Serve the same weights again from servers that have been restarted since; None: the model's own."""
        for url in urls:
            self._adapters.pop(url, None)
            self._checks.pop(url, None)
        await self._completions.check_again(urls)
        if weights is not None:
            await self._load_into([s for s in self._completions.pool.servers if s.url in urls], weights)

    async def _load_into(self, servers: Sequence[Server], weights: Weights) -> None:
        folder = Path(weights.uri).resolve()
        if weights.kind == "lora":
            name = f"{weights.policy}@{weights.version}-{await asyncio.to_thread(_digest, folder)}"
            await _all(self._load_adapter(server, folder, name) for server in servers)
        else:
            async with with_output_head(folder) as whole:
                await _all(self._load(server, folder, whole) for server in servers)

    async def pause(self, *, timeout_s: float = 60.0) -> None:
        await self._completions.gate.pause(timeout_s=timeout_s)

    async def resume(self) -> None:
        self._completions.gate.resume()

    async def close(self) -> None:
        await self._completions.close()

    async def _load(self, server: Server, folder: Path, whole: Path) -> None:
        """`whole`: the folder as vLLM needs it."""
        pool = self._completions.pool
        hint = f"{DEV_MODE}; it must see the folder under the same path"

        async def reload() -> None:
            payload = {"method": "reload_weights", "kwargs": {"weights_path": str(whole)}}
            await pool.post(server, "/collective_rpc", payload, hint=hint)

        check = self._checks.setdefault(server.url, WeightCheck(pool, server))
        await check.load(folder, reload)
        reset = await pool.post(server, "/reset_prefix_cache", hint=hint)
        if not decoded(server, reset, _reset).success:
            raise EngineError(
                f"`{server.url}` cannot reset its prefix cache, which belongs to other weights",
                hint="is the server used by something else?",
            )

    async def _load_adapter(self, server: Server, folder: Path, name: str) -> None:
        """Unload the old adapter, then load the new one: a server has room for one adapter per policy."""
        pool, old = self._completions.pool, self._adapters.get(server.url)
        if old == name:
            return
        if old is not None:
            await pool.post(server, "/v1/unload_lora_adapter", {"lora_name": old}, hint=ROOM)
            del self._adapters[server.url]
        roots = {model.id: model.root for model in models_in(server, await pool.get(server, "/v1/models"))}
        if name in roots and roots[name] != str(folder):  # left by a run that was killed; its folder may be gone
            await pool.post(server, "/v1/unload_lora_adapter", {"lora_name": name}, hint=ROOM)
            del roots[name]
        if name not in roots:
            payload = {"lora_name": name, "lora_path": str(folder)}
            await pool.post(
                server,
                "/v1/load_lora_adapter",
                payload,
                hint=f"{LORA_MODE}; it must see the folder under the same path",
            )
            await self._check_root(server, name, folder)
        self._adapters[server.url] = name
        self._completions.use_model(server, name)

    async def _check_root(self, server: Server, name: str, folder: Path) -> None:
        """Raises `Unanswerable` if the server says that it has read the adapter from another folder."""
        served = models_in(server, await self._completions.pool.get(server, "/v1/models"))
        root = next((model.root for model in served if model.id == name), None)
        if root is not None and Path(root) != folder:
            raise Unanswerable(
                f"`{server.url}` serves another adapter as `{name}`: the one in `{root}`, not in `{folder}`",
                hint="is the server used by something else? restart it",
            )

    async def _check_dtype(self, server: Server) -> None:
        """Raises `Unanswerable` if the server computes in another dtype than the trainer. Only in dev mode does it say
        in which.
        """
        answer = await self._completions.pool.get(server, "/server_info?config_format=json", absent=b"{}")
        dtype = decoded(server, answer, _info).vllm_config.model_config.dtype.removeprefix("torch.")
        if dtype and dtype != self._dtype:
            raise Unanswerable(
                f"`{server.url}` computes in `{dtype}`, the trainer in `{self._dtype}`",
                hint=f"start vLLM with `--dtype {self._dtype}`, or set `model.dtype`",
            )

    async def _check(self, pool: Pool, server: Server) -> str:
        """The name of the server's model. Raises `EngineError` if the model's context is too short, or if its
        log-probabilities are not those of the distribution that is sampled from.
        """
        hint = "is this vLLM? for other servers there is `engine.name=relay`"
        models = models_in(server, await pool.get(server, "/v1/models", hint=hint))
        if not models:
            raise EngineError(f"`{server.url}` serves no model", hint=hint)
        model = models[0]
        if model.max_model_len is not None and model.max_model_len < self._max_length:
            message = (
                f"`{server.url}` takes `{model.max_model_len}` tokens, `engine.max_length` is `{self._max_length}`"
            )
            raise EngineError(message, hint="lower `engine.max_length`, or start vLLM with a larger `--max-model-len`")
        # raw logprobs are neither scaled nor masked, and logits are no logprobs
        if not is_certain(await self._certain_logprob(pool, server, model.id)):
            hint = f"start vLLM with `{FLAG}`"
            raise EngineError(
                f"`{server.url}` reports logprobs of another distribution than the one it samples from", hint=hint
            )
        return model.id

    async def _certain_logprob(self, pool: Pool, server: Server, model: str) -> float:
        """The reported log-probability of a token sampled with `top_k=1`."""
        sampling = Sampling(top_k=1, seed=0)
        request = Request(model=model, prompt=PROBE_IDS, max_tokens=1, sampling=sampling, stream=False)
        (answer,) = decoded(server, b"[%b]" % await pool.complete(server, _encode(_body(request))), _plain)
        logprobs = _tokens(list(answer.choices), request).logprobs
        if not logprobs:
            raise EngineError(
                f"`{server.url}` reports no logprobs", hint="does it answer `logprobs` on `/v1/completions`?"
            )
        return logprobs[0]


async def _all(loads: Iterable[Awaitable[None]]) -> None:
    """Wait until all have ended, then raise the first error: no load may go on in the background."""
    results = await asyncio.gather(*loads, return_exceptions=True)
    for result in results:
        if result is not None:
            raise result


def _digest(folder: Path) -> str:
    """Hash of an adapter's files, for its name. Another adapter under the same name would reuse its prefix cache."""
    return blake2b(b"".join(file.read_bytes() for file in sorted(folder.glob("adapter_*"))), digest_size=6).hexdigest()


def _body(request: Request) -> _Body:
    sampling = request.sampling
    return _Body(
        model=request.model,
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logprobs=sampling.top_logprobs,
        return_token_ids=True,
        return_tokens_as_token_ids=sampling.top_logprobs > 0,
        seed=None if sampling.seed is None else sampling.seed % 2**63,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        stream=request.stream,
        structured_outputs=None if sampling.grammar is None else _Structured(sampling.grammar),
        cache_salt=secrets.token_hex(8) if fresh.get() else None,
    )


def _tokens(choices: list[Choice[Any]], request: Request) -> Tokens:
    ids: list[tuple[int, ...]] = []
    logprobs_of: list[Any] = []
    for choice in choices:
        if choice.token_ids is None or choice.logprobs is None:
            what = "token ids" if choice.token_ids is None else "logprobs"
            raise EngineError(
                f"the server reports no {what}",
                hint="vLLM does since 0.10.2; for other servers there is `engine.name=relay`",
            )
        ids.append(choice.token_ids)
        logprobs_of.append(choice.logprobs)
    count = request.sampling.top_logprobs
    top: tuple[Top, ...] | None = None
    if count:
        places = chain.from_iterable(logprobs.top_logprobs for logprobs in logprobs_of)
        top = tuple(likeliest(place, count=count, id_of=_id) for place in places)
    if len(logprobs_of) == 1:
        return Tokens(token_ids=ids[0], logprobs=logprobs_of[0].token_logprobs, top=top)
    return Tokens(
        token_ids=tuple(chain.from_iterable(ids)),
        logprobs=tuple(chain.from_iterable([logprobs.token_logprobs for logprobs in logprobs_of])),
        top=top,
    )


def _id(token: str) -> int:
    return int(token.removeprefix(TOKEN_ID))
