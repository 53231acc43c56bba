"""The relay engine looks up token ids from texts, and refuses ambiguous ones."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from lightningrl.config import EngineConfig
from lightningrl.engine.base import EngineSetup, Unanswerable
from lightningrl.engine.conformance import CHECKS, Conformance, ask
from lightningrl.engine.relay import RelayEngine, Vocabulary
from lightningrl.errors import EngineError, UserError
from lightningrl.types import Sampling, Weights
from tests.engine.upstream import Upstream, running

WORDS = {i: f"word{i}" for i in range(60)}
ABOUT = Conformance(policy="policy", vocab_size=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Tokenizer(models.WordLevel({word: i for i, word in WORDS.items()}, unk_token="word0")).save(
        str(tmp_path / "tokenizer.json")
    )
    return tmp_path


@contextlib.asynccontextmanager
async def relaying(upstream: Upstream, folder: Path) -> AsyncIterator[RelayEngine]:
    async with running(upstream):
        config = EngineConfig(name="relay", urls=[f"{upstream.url}/v1"], max_length=64)
        engine = RelayEngine(
            EngineSetup(policy="policy", config=config, folder=folder, dtype="float32", decode=str, turn_end_id=2)
        )
        try:
            yield engine
        finally:
            await engine.close()


@pytest.mark.parametrize("pieces", [False, True], ids=["texts", "llama.cpp"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_relay_engine_conforms(check: Any, pieces: bool, folder: Path) -> None:
    async with relaying(Upstream(texts=WORDS, token_ids=False, pieces=pieces), folder) as engine:
        await check(engine, ABOUT)


async def test_ambiguous_texts_are_an_error(folder: Path) -> None:
    for texts, says in (
        ({i: f"other{i}" for i in WORDS}, "is no token of this vocabulary"),
        (dict.fromkeys(WORDS, ""), "could be several tokens"),
    ):
        async with relaying(Upstream(texts=texts, token_ids=False), folder) as engine:
            with pytest.raises(EngineError, match=says):
                await ask(engine, ABOUT.prompt(20), sampling=Sampling(max_tokens=4, seed=1), about=ABOUT)


async def test_unsupported_requests_are_refused(folder: Path) -> None:
    async with relaying(Upstream(texts=WORDS, token_ids=False), folder) as engine:
        with pytest.raises(Unanswerable, match="grammars"):
            await ask(engine, ABOUT.prompt(20), sampling=Sampling(grammar="start: /a/"), about=ABOUT)
        await engine.pause()
        with pytest.raises(EngineError, match="frozen"):
            await engine.load(Weights(policy="policy", version=1, uri=str(folder)))


def test_a_relay_needs_the_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no `tokenizer.json`"):
        Vocabulary(tmp_path)


def test_every_way_of_writing_a_token_leads_to_its_id_unless_it_leads_to_two(tmp_path: Path) -> None:
    pieces = ["<unk>", "▁the", "the", "▁cat", "<0xE2>", "é", "s"]
    sentencepiece = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    sentencepiece.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])  # pyright: ignore[reportAttributeAccessIssue]
    sentencepiece.add_special_tokens([AddedToken("<|end|>", special=True)])
    sentencepiece.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary(tmp_path)
    assert [vocabulary.id(text) for text in ("▁the", " the", "▁cat", " cat", "cat", "<0xE2>", "é", "s", "<|end|>")] == [
        1,
        1,
        3,
        3,
        3,
        4,
        5,
        6,
        7,
    ]
    for text in ("the", "\N{REPLACEMENT CHARACTER}", ""):  # `▁the` or `the`; any byte; any token
        with pytest.raises(EngineError, match="could be several tokens"):
            vocabulary.id(text)
    with pytest.raises(EngineError, match="is no token"):
        vocabulary.id("dog")


def test_the_tokens_of_a_byte_level_vocabulary_are_found(model_folder: Path) -> None:
    vocabulary = Vocabulary(model_folder)
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    found = 0
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        with contextlib.suppress(EngineError):
            assert vocabulary.id(text) == token_id
            found += 1
    assert 150 < found < tokenizer.get_vocab_size(), "all but the bytes that are no character"
