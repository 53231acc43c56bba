"""An engine in this process: one policy, decoded by one thread, over weights that a trainer may share without a copy.

`generate` (asyncio) → inbox → thread: scheduler → model runner → sampler → event loop. The sides share only the inbox
and a `cancelled` flag. A client is woken once, when its completion is complete; a streaming client at most once per
step.

torch's `set_num_threads` holds for the calling thread (a new thread starts with the value last set), so it does not
bind a trainer. Results are the same bit for bit, whatever else is served; this needs `threads=1` (see `attention`).
"""

import asyncio
import contextlib
import math
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Tokens
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from lightningrl.engine.base import Delta, EngineSetup, Unanswerable, check_policy, check_prompt, fresh, still_running
from lightningrl.engine.cache import ROWS_PER_SLOT, PrefixCache
from lightningrl.engine.grammar import Grammars
from lightningrl.engine.model_runner import ModelRunner
from lightningrl.engine.sampler import Sampled, Settings, prepare, sample, uniform
from lightningrl.engine.scheduler import Scheduler
from lightningrl.engine.sequence import Sequence
from lightningrl.engine.stop import StopFinder
from lightningrl.errors import EngineError, UserError
from lightningrl.models.base import Decoder
from lightningrl.models.determinism import undisturbed
from lightningrl.models.devices import device_of, set_up
from lightningrl.models.load import DTypeName, load_into, load_model
from lightningrl.types import FinishReason, Sampling, Weights

NICENESS = 10
"""Niceness of the decoding thread (Linux). Agents and the gateway go first while they can use a core; their requests
queue up meanwhile, and a token costs less the more are decoded together.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Counters of an engine since it was made."""

    tokens_sampled: int
    prompt_tokens_computed: int
    prompt_tokens_reused: int
    """Taken from the prefix cache."""
    steps: int
    busy_s: float
    """Seconds spent in steps."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Client:
    """The asyncio side of one generation. Only its event loop touches it."""

    loop: asyncio.AbstractEventLoop
    news: asyncio.Event = field(default_factory=asyncio.Event)
    pending: list[Delta] = field(default_factory=list[Delta])
    error: EngineError | None = None

    async def next(self) -> Delta:
        """All deltas since the last call, joined into one."""
        await self.news.wait()
        self.news.clear()
        if self.error is not None:
            raise self.error
        deltas, self.pending = self.pending, []
        if len(deltas) == 1:
            return deltas[0]
        return Delta(
            token_ids=tuple(t for d in deltas for t in d.token_ids),
            logprobs=tuple(p for d in deltas for p in d.logprobs),
            policy_version=deltas[-1].policy_version,
            finish_reason=deltas[-1].finish_reason,
            top=None if deltas[0].top is None else tuple(t for d in deltas for t in d.top or ()),
        )


class EmbeddedEngine:
    """Serves a model as `policy`, on the model's device."""

    def __init__(
        self,
        model: Decoder,
        *,
        policy: str = "policy",
        slots: int = 64,
        max_length: int = 1024,
        decode: Callable[[list[int]], str] | None = None,
        grammars: Grammars | None = None,
        version: int = 0,
        shared: bool = False,
        threads: int = 1,
    ) -> None:
        """Stop strings need `decode`; `Sampling.grammar` needs `grammars`. `shared`: a trainer in this process updates
        the parameters of `model` in place, so `load` reads nothing. The cache holds up to
        4·slots·max_length·layers·kv_heads·head_size numbers.
        """
        if model.no_cache is not None:
            raise UserError(
                f"the embedded engine cannot serve this model: {model.no_cache}",
                hint="serve it with vLLM: `engine.name=vllm`, see docs/engines.md",
            )
        if max_length > model.max_length:
            raise UserError(
                f"`engine.max_length` is {max_length}, the model's limit is `{model.max_length}`",
                hint="lower `engine.max_length`",
            )
        self.policy = policy
        self.version = version
        self.max_length = max_length
        self._model, self._shared, self._threads = model, shared, threads
        self._stop = StopFinder(decode) if decode is not None else None
        self._grammars = grammars
        cache = PrefixCache(
            rows=ROWS_PER_SLOT * slots,
            length=max_length,
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_size=model.head_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._scheduler = Scheduler(cache, slots=slots)
        self._runner = ModelRunner(model, cache)
        self._clients: dict[Sequence, _Client] = {}
        self._settings: Settings | None = None
        self._steps, self._sampled, self._busy_s = 0, 0, 0.0
        self._paused = self._closing = self._closed = False
        self._drained: list[Future[None]] = []
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"engine-{policy}", daemon=True)
        self._thread.start()

    @property
    def statistics(self) -> Statistics:
        scheduler = self._scheduler
        return Statistics(
            tokens_sampled=self._sampled,
            prompt_tokens_computed=scheduler.prompt_tokens_computed,
            prompt_tokens_reused=scheduler.prompt_tokens_reused,
            steps=self._steps,
            busy_s=self._busy_s,
        )

    # The asyncio side

    async def generate(
        self, prompt_ids: Tokens[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        """See `Engine.generate`. Raises `EngineError` if the engine fails or is closed during the generation."""
        sequence = self._sequence(prompt_ids, sampling=sampling, policy=policy, stream=stream)
        if sampling.grammar is not None:
            await self._guide(sequence, sampling.grammar)
        client = _Client(loop=asyncio.get_running_loop())
        self._inbox.put(lambda: self._enter(sequence, client))
        try:
            while True:
                delta = await client.next()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            sequence.cancelled = True  # without effect if it has ended
            self._inbox.put(_nothing)  # the thread may sleep while paused

    async def load(self, weights: Weights) -> None:
        check_policy(weights.policy, served=self.policy)
        await self._ask(lambda: self._load(weights))

    async def pause(self, *, timeout_s: float = 60.0) -> None:
        """See `Engine.pause`. After a timeout the engine stays paused until `resume`."""
        drained: Future[None] = Future()
        self._inbox.put(lambda: self._pause(drained))
        try:
            async with asyncio.timeout(timeout_s):  # `wait_for` may lose a cancellation (Python 3.11)
                await asyncio.wrap_future(drained)
        except TimeoutError as error:
            raise still_running(timeout_s) from error

    async def resume(self) -> None:
        await self._ask(self._resume)

    async def close(self) -> None:
        """End the thread. Running and waiting generations fail with an `EngineError`."""
        self._closing = True
        self._inbox.put(self._close)
        await asyncio.to_thread(self._thread.join)

    async def _ask(self, command: Callable[[], None]) -> None:
        """Run `command` on the thread, between two steps."""
        done: Future[None] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return  # the caller was cancelled
            try:
                command()
            except Exception as error:  # noqa: BLE001 - the thread must survive; the request gets the error
                done.set_exception(error)
            else:
                done.set_result(None)

        self._check_open()
        self._inbox.put(run)
        await asyncio.wrap_future(done)

    def _sequence(self, prompt_ids: Tokens[int], *, sampling: Sampling, policy: str, stream: bool) -> Sequence:
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        self._check_open()
        check_policy(policy, served=self.policy)
        check_prompt(len(prompt), max_length=self.max_length)
        if prompt.min() < 0 or prompt.max() >= self._model.vocab_size:
            raise Unanswerable(
                f"token ids must be in 0..{self._model.vocab_size - 1}", hint="is this the model's own tokenizer?"
            )
        if sampling.stop and self._stop is None:
            raise Unanswerable(
                "stop strings need a tokenizer", hint="make the engine with `decode`, or use `stop_token_ids`"
            )
        if (
            sampling.max_tokens < 1
            or sampling.temperature < 0
            or not 0 < sampling.top_p <= 1
            or sampling.top_k < 0
            or sampling.top_logprobs < 0
        ):
            raise Unanswerable(
                f"cannot sample with `{sampling}`",
                hint="max_tokens ≥ 1, temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0, top_logprobs ≥ 0",
            )
        return Sequence(
            prompt_ids=prompt,
            sampling=sampling,
            seed=(secrets.randbits(64) if sampling.seed is None else sampling.seed) % 2**64,
            stop_ids=self._model.eos_token_ids | frozenset(sampling.stop_token_ids),
            limit=min(sampling.max_tokens, self.max_length - len(prompt)),
            stream=stream,
            fresh=fresh.get(),
        )

    async def _guide(self, sequence: Sequence, grammar: str) -> None:
        """Constrain `sequence` to a grammar. Only the grammar's end may end it: other stop tokens are forbidden."""
        if self._grammars is None:
            raise Unanswerable(
                "grammars need a tokenizer and a token that ends a turn", hint="make the engine with `grammars`"
            )
        sequence.matcher = await asyncio.to_thread(self._grammars.matcher, grammar, never=sequence.stop_ids)
        sequence.stop_ids |= {self._grammars.end_id}
        self._check_open()  # the engine may have been closed meanwhile

    def _check_open(self) -> None:
        if self._closing:
            raise EngineError("the engine is closed")

    # The thread's side

    @torch.inference_mode()
    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        on_cpu = self._model.device.type == "cpu"  # a GPU that waits for this thread would stand still
        if on_cpu and sys.platform == "linux":  # elsewhere it would be the whole process's
            os.nice(NICENESS)
        while not self._closed:
            self._read_inbox()
            if self._runnable():
                started = time.perf_counter()
                try:
                    with undisturbed(self._model.device):  # a trainer may compute at the same time
                        self._step()
                except Exception as error:  # noqa: BLE001 - the thread must survive; the request gets the error
                    self._fail(error)
                self._busy_s += time.perf_counter() - started
            self._resolve_drained()
        while not self._inbox.empty():  # commands that came before `close`
            self._inbox.get()()
        self._abort("the engine was closed")
        self._resolve_drained()

    def _runnable(self) -> bool:
        return bool(self._scheduler.running) or (bool(self._scheduler.waiting) and not self._paused)

    def _read_inbox(self) -> None:
        """Run all commands; sleep until one comes if there is nothing to decode."""
        if not self._runnable() and not self._closed:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        self._drop_cancelled()

    def _step(self) -> None:
        scheduler = self._scheduler
        if not self._paused and scheduler.admit():
            self._settings = None
        running = scheduler.running
        batch = scheduler.batch()
        logits = self._runner.forward(batch)
        scheduler.computed(batch)
        if self._settings is None:
            self._settings = prepare([s.sampling for s in running], device=self._model.device)
        seeds = np.fromiter((s.seed for s in running), dtype=np.uint64, count=len(running))
        indices = np.fromiter((len(s.token_ids) for s in running), dtype=np.uint64, count=len(running))
        allowed = {
            row: matcher.allowed for row in self._settings.constrained if (matcher := running[row].matcher) is not None
        }
        self._append(sample(logits, self._settings, uniform(seeds, indices), allowed=allowed))
        self._steps += 1

    def _append(self, sampled: Sampled) -> None:
        """Append a token to each running sequence, notify the clients, and release sequences that have ended."""
        scheduler = self._scheduler
        running, cache = scheduler.running, scheduler.cache
        count = len(running)
        cache.tokens[np.arange(count), np.minimum(cache.known[:count], cache.tokens.shape[1] - 1)] = sampled.token_ids
        ended: list[Sequence] = []
        for row, top in sampled.top.items():
            running[row].top.append(top)
        for sequence, token, logprob in zip(running, sampled.token_ids, sampled.logprobs, strict=True):
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.finish_reason = self._finish_reason(sequence)
            if sequence.matcher is not None and sequence.finish_reason is None:
                sequence.matcher.advance(token)
                sequence.finish_reason = None if sequence.matcher.failure is None else "error"
            if sequence.finish_reason is not None:
                ended.append(sequence)
        self._sampled += count
        self._send([*ended, *(s for s in running if s.stream and s.finish_reason is None)])
        for sequence in reversed(ended):
            self._release(sequence)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Why the newest token ends the completion; None: it does not."""
        sampling = sequence.sampling
        if sequence.logprobs[-1] == -math.inf:
            return "error"  # the logits are NaN
        if sequence.token_ids[-1] in sequence.stop_ids:
            return "stop"
        if sampling.stop and self._stop is not None and self._stop.found(sequence.token_ids, sampling.stop):
            return "stop"
        return "length" if len(sequence.token_ids) >= sequence.limit else None

    def _release(self, sequence: Sequence) -> None:
        self._scheduler.release(sequence)
        self._clients.pop(sequence, None)
        self._settings = None

    def _send(self, sequences: list[Sequence]) -> None:
        """Send deltas to clients, with one wake-up per event loop and step."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[_Client, Delta]]] = {}
        for sequence in sequences:
            client = self._clients[sequence]
            if sequence.matcher is not None and sequence.matcher.failure is not None:
                _call(
                    client.loop,
                    _deliver_error,
                    client,
                    EngineError(f"the grammar cannot continue: {sequence.matcher.failure}"),
                )
                continue
            delta = Delta(
                token_ids=tuple(sequence.token_ids[sequence.sent :]),
                logprobs=tuple(sequence.logprobs[sequence.sent :]),
                policy_version=self.version,
                finish_reason=sequence.finish_reason,
                top=tuple(sequence.top[sequence.sent :]) if sequence.sampling.top_logprobs else None,
            )
            sequence.sent = len(sequence.token_ids)
            news.setdefault(client.loop, []).append((client, delta))
        for loop, batch in news.items():
            _call(loop, _deliver, batch)

    def _enter(self, sequence: Sequence, client: _Client) -> None:
        self._clients[sequence] = client
        self._scheduler.waiting.append(sequence)

    def _drop_cancelled(self) -> None:
        scheduler = self._scheduler
        for sequence in [s for s in reversed(scheduler.running) if s.cancelled]:
            self._release(sequence)
        if any(s.cancelled for s in scheduler.waiting):
            for sequence in [s for s in scheduler.waiting if s.cancelled]:
                scheduler.waiting.remove(sequence)
                self._clients.pop(sequence)

    def _load(self, weights: Weights) -> None:
        if self._scheduler.running or not self._paused:
            raise EngineError("weights cannot change while generations run", hint="`pause` the engine first")
        if not self._shared:
            self._model = self._runner.model = load_into(self._model, weights.uri)
        self._scheduler.cache.clear()
        self.version = weights.version

    def _pause(self, drained: Future[None]) -> None:
        self._paused = True
        self._drained.append(drained)

    def _resume(self) -> None:
        self._paused = False

    def _close(self) -> None:
        self._closing = self._closed = True

    def _resolve_drained(self) -> None:
        if not self._scheduler.running:
            for future in self._drained:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)
            self._drained.clear()

    def _fail(self, error: Exception) -> None:
        """A step has failed: all generations fail with an `EngineError`, and the cache is reset. If that fails too, the
        device is lost, and the engine closes.
        """
        self._abort(f"{type(error).__name__}: {error}", cause=error)
        try:
            self._scheduler.cache.reset()
        except RuntimeError:  # after some errors, CUDA computes nothing more in this process
            self._close()

    def _abort(self, reason: str, cause: Exception | None = None) -> None:
        scheduler = self._scheduler
        for client in self._clients.values():
            error = EngineError(f"generation aborted: {reason}")
            error.__cause__ = cause
            _call(client.loop, _deliver_error, client, error)
        self._clients.clear()
        scheduler.running.clear()
        scheduler.waiting.clear()
        self._settings = None


def embedded(setup: EngineSetup) -> EmbeddedEngine:
    """Make the engine of a server: over the parameters of `setup.model`, or over a model loaded from `setup.folder`."""
    model = setup.model
    if model is None:
        device = device_of(setup.device)
        set_up([device])
        model = load_model(str(setup.folder), dtype=cast(DTypeName, setup.dtype), device=device)
    end_id = setup.turn_end_id if setup.turn_end_id is not None else min(model.eos_token_ids, default=None)
    return EmbeddedEngine(
        model,
        policy=setup.policy,
        slots=setup.config.slots,
        max_length=setup.config.max_length,
        decode=setup.decode,
        grammars=None if end_id is None else Grammars(setup.folder, vocab_size=model.vocab_size, end_id=end_id),
        shared=setup.model is not None,
    )


def _nothing() -> None:
    """A command that only wakes the thread."""


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and its clients with it
        loop.call_soon_threadsafe(function, *arguments)


def _deliver(batch: list[tuple[_Client, Delta]]) -> None:
    for client, delta in batch:
        client.pending.append(delta)
        client.news.set()


def _deliver_error(client: _Client, error: EngineError) -> None:
    client.error = error
    client.news.set()
