"""The agent's search: the passages that match a query best, by BM25 or by a model's vectors.

A task names its passages: `world` is the name of a world, `paragraphs` the path of a MuSiQue file. Each process indexes
them once.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import bm25s
import numpy as np
from musique import paragraphs
from world import CACHED, build_world

TOP = 3
"""Passages that a search returns."""
NOTHING = "nothing found"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
"""The tool's parameters. Set explicitly, as the SDK and MCP would each describe them differently to the model."""
Scorer: TypeAlias = Callable[[str], np.ndarray]
"""Query → score of each passage; 0 or less means no match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    passages: tuple[str, ...]
    scorer: Scorer

    def search(self, query: str) -> str:
        """The best passages, a line each: `- the boss of mira voss is seth hale`. Ties go to the earlier passage."""
        scores = self.scorer(query)
        best = np.argsort(-scores, kind="stable")[:TOP]
        return "\n".join(f"- {self.passages[index]}" for index in best if scores[index] > 0) or NOTHING


def library_of(task: Mapping[str, Any]) -> Library:
    """The library of a task: BM25, or the sentence-transformers model in the folder that RAG_DENSE_MODEL names."""
    return _library(task.get("world", ""), task.get("paragraphs", ""), os.environ.get("RAG_DENSE_MODEL", ""))


@lru_cache(maxsize=CACHED)
def _library(world: str, file: str, dense_model: str) -> Library:
    passages = tuple(passage.text for passage in build_world(world).passages) if world else paragraphs(file)
    return Library(passages=passages, scorer=dense(passages, folder=dense_model) if dense_model else bm25(passages))


def bm25(passages: Sequence[str]) -> Scorer:
    index = bm25s.BM25()
    index.index([_words(passage) for passage in passages], show_progress=False)

    def scorer(query: str) -> np.ndarray:
        known = index.get_tokens_ids(_words(query))
        return index.get_scores_from_ids(known) if known else np.zeros(len(passages))

    return scorer


def dense(passages: Sequence[str], *, folder: str) -> Scorer:
    try:
        from sentence_transformers import SentenceTransformer  # optional, and slow to import
    except ImportError as error:
        raise ImportError(
            "RAG_DENSE_MODEL needs the package `sentence-transformers`\nhint: pip install sentence-transformers"
        ) from error
    if not os.path.isdir(folder):
        hint = "set it to the folder of a sentence-transformers model"
        raise ValueError(f"RAG_DENSE_MODEL is `{folder}`, which is no folder\nhint: {hint}")
    model = SentenceTransformer(folder, local_files_only=True)
    vectors = model.encode(list(passages), normalize_embeddings=True, show_progress_bar=False)

    def scorer(query: str) -> np.ndarray:
        return vectors @ model.encode(query, normalize_embeddings=True, show_progress_bar=False)

    return scorer


def _words(text: str) -> list[str]:
    tokenized: Any = bm25s.tokenize([text], return_ids=False, show_progress=False)
    return list(tokenized[0])
