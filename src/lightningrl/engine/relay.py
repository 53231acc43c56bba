"""An engine over any OpenAI-compatible server that takes token ids as a prompt: llama.cpp, SGLang, TGI and others. Its
weights are frozen.

Such servers report each sampled token as text, which becomes an id only if it belongs to a single token. An ambiguous
text (a part of a multi-byte character, tokens that look alike) is an error: a guess would be recorded as fact.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from lightningrl.engine.base import Delta, EngineSetup, Unanswerable
from lightningrl.engine.http import Pool, Server
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
from lightningrl.errors import EngineError, UserError
from lightningrl.types import Sampling, Weights

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Decoded text has it in place of bytes that are no character on their own."""


class _Body(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A completion request with the fields that all such servers know. Unset ones are left to the server's defaults."""

    model: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    logprobs: int
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = False


class _Piece(msgspec.Struct):
    """One token, as llama.cpp reports it."""

    logprob: float
    token: str = ""
    id: int | None = None
    top_logprobs: "tuple[_Piece, ...]" = ()


class _Logprobs(msgspec.Struct):
    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[dict[str, float], ...] | None = None
    content: tuple[_Piece, ...] | None = None
    """llama.cpp sends this instead of the other three."""


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(list[Completion[_Logprobs]])


class Vocabulary:
    """Text → token id, for texts that belong to a single token, in each way that servers write them."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "tokenizer.json").is_file():
            raise UserError(
                f"no `tokenizer.json` in `{folder}`",
                hint="`relay` needs the tokenizer of the model that the server serves",
            )
        self._file = folder / "tokenizer.json"

    def id(self, text: str) -> int:
        """Raises `EngineError` if no token, or more than one, has this text."""
        token_id = self._ids.get(text)
        if token_id is None:
            ambiguous = text in self._ids or not text or UNKNOWN in text
            what = "could be several tokens" if ambiguous else "is no token of this vocabulary"
            message = f"the server reports tokens as text, and `{text}` {what}"
            hint = "serve the model with vLLM (`engine.name=vllm`), or relay whole requests with `[upstreams]`"
            raise EngineError(message, hint=hint)
        return token_id

    @cached_property
    def _ids(self) -> Mapping[str, int | None]:
        """Text → id; None if several tokens have this text."""
        tokenizer = Tokenizer.from_file(str(self._file))
        ids: dict[str, int | None] = {}
        for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
            piece = tokenizer.id_to_token(token_id)
            if piece is None:
                continue
            decoded = tokenizer.decode([token_id], skip_special_tokens=False)
            as_sentencepiece = piece.replace("▁", " ")
            for text in {piece, as_sentencepiece, decoded}:
                if text and UNKNOWN not in text:
                    ids[text] = token_id if ids.get(text, token_id) == token_id else None
        return ids

    async def read(self) -> None:
        """Read the tokenizer's file in a thread: it takes about a second for 150,000 tokens."""
        await asyncio.to_thread(lambda: self._ids)


class RelayEngine:
    """An `Engine` over the servers at `engine.urls`."""

    def __init__(self, setup: EngineSetup) -> None:
        self._vocabulary = Vocabulary(setup.folder)
        self._policy = setup.policy
        kind = Kind(
            name="relay",
            encode=lambda request: _encode(_body(request)),
            decoder=lambda sampling: _decoder,
            tokens=self._tokens,
            check=self._check,
            refused=lambda sampling: "does this server take token ids as prompt of `/v1/completions`?",
        )
        self._completions = Completions(setup, kind=kind)

    @property
    def version(self) -> int:
        return self._completions.version

    def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        return self._completions.generate(prompt_ids, sampling=sampling, policy=policy, stream=stream)

    async def load(self, weights: Weights) -> None:
        hint = "to train, use `engine.name=vllm` or `embedded`"
        raise EngineError("the server behind `relay` is frozen: it cannot load other weights", hint=hint)

    async def pause(self, *, timeout_s: float = 60.0) -> None:
        await self._completions.gate.pause(timeout_s=timeout_s)

    async def resume(self) -> None:
        self._completions.gate.resume()

    async def close(self) -> None:
        await self._completions.close()

    async def _check(self, pool: Pool, server: Server) -> str:
        """The name of the server's model. A server with a single model that it does not list accepts any name."""
        await self._vocabulary.read()
        models = models_in(server, await pool.get(server, "/v1/models", absent=b"{}"))
        return models[0].id if models else self._policy

    def _tokens(self, choices: list[Choice[Any]], request: Request) -> Tokens:
        parts = [self._part(choice.logprobs, request.sampling.top_logprobs) for choice in choices]
        return Tokens(
            token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
            logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
            top=tuple(place for part in parts for place in part.top or ()) if request.sampling.top_logprobs else None,
        )

    def _part(self, logprobs: _Logprobs | None, count: int) -> Tokens:
        """The tokens of one choice, in either of the two formats."""
        if logprobs is None:
            raise EngineError(
                "the server reports no logprobs", hint="use a server that answers `logprobs` on `/v1/completions`"
            )
        if logprobs.content is not None:
            pieces = logprobs.content
            top = tuple(tuple((self._id_of(p), p.logprob) for p in piece.top_logprobs[:count]) for piece in pieces)
            return Tokens(
                token_ids=tuple(map(self._id_of, pieces)), logprobs=tuple(piece.logprob for piece in pieces), top=top
            )
        look_up = self._vocabulary.id
        places = logprobs.top_logprobs or () if count else ()
        top = tuple(likeliest(place, count=count, id_of=look_up) for place in places)
        return Tokens(token_ids=tuple(map(look_up, logprobs.tokens)), logprobs=logprobs.token_logprobs, top=top)

    def _id_of(self, piece: _Piece) -> int:
        return self._vocabulary.id(piece.token) if piece.id is None else piece.id


def _body(request: Request) -> _Body:
    sampling = request.sampling
    if sampling.grammar is not None:
        raise Unanswerable(
            "`relay` serves no grammars: its servers have no grammar language in common",
            hint="serve the model with vLLM (`engine.name=vllm`)",
        )
    return _Body(
        model=request.model,
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        logprobs=max(sampling.top_logprobs, 1),  # llama.cpp reports none for 0
        top_k=sampling.top_k,
        seed=None if sampling.seed is None else sampling.seed % 2**31,  # llama.cpp's seeds have 32 bits
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        stream=request.stream,
    )
