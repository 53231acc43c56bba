"""Search works by words or by vectors; errors name what is missing."""

import sys
from pathlib import Path
from typing import Any

import pytest

WORLD = {"world": "heldout-2"}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A sentence-transformers model with a vector for each word."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["?", "boss", "home", "ada", "ben", "hale", "moss"]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=64)], device="cpu").save(
        str(tmp_path / "model")
    )
    return tmp_path / "model"


def test_passages_with_the_words_of_a_query_come_first(rag: Any) -> None:
    scorer = rag.search.bm25(
        ("the boss of ada hale is ben moss", "the home of ada hale is oak ford", "ben moss met ida reed")
    )
    library = rag.search.Library(passages=("boss", "home", "met"), scorer=scorer)
    assert library.search("home of ada hale") == "- home\n- boss"
    assert library.search("Ben Moss, ida?") == "- met\n- boss"


@pytest.mark.parametrize("query", ["", "   ", "of the", "nobody knows this", "\x00", '"; drop'])
def test_a_query_without_a_known_word_finds_nothing(rag: Any, query: str) -> None:
    assert rag.search.library_of(WORLD).search(query) == rag.search.NOTHING


def test_passages_with_equal_scores_keep_their_order(rag: Any) -> None:
    passages = tuple(f"the boss of ada hale was {name}" for name in ("ben", "dan", "eva", "leo"))
    library = rag.search.Library(passages=passages, scorer=rag.search.bm25(passages))
    assert library.search("boss of ada hale") == "\n".join(f"- {passage}" for passage in passages[:3])


def test_a_library_is_indexed_once(rag: Any) -> None:
    assert rag.search.library_of(WORLD) is rag.search.library_of({**WORLD, "question": "another"})


def test_a_folder_of_sentence_transformers_may_find_instead(
    rag: Any, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passages = ("ben moss", "ada hale", "ada moss")
    library = rag.search.Library(passages=passages, scorer=rag.search.dense(passages, folder=str(model_folder)))
    assert library.search("ada hale").startswith("- ada hale")
    monkeypatch.setenv("RAG_DENSE_MODEL", str(model_folder))
    assert rag.search.library_of(WORLD).search("boss of ada hale").count("\n") <= 2


def test_a_missing_package_is_named_when_vectors_are_asked_for(rag: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAG_DENSE_MODEL", "somewhere")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match="pip install sentence-transformers"):
        rag.search.library_of(WORLD)


def test_a_missing_folder_is_named_when_vectors_are_asked_for(rag: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone"):
        rag.search.dense(("ada",), folder=str(tmp_path / "gone"))
