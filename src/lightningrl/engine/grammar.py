"""Constrained decoding: a matcher follows one generation and masks the tokens that its grammar forbids.

grammar text → `Grammars` (compiles each text once) → `Matcher` (one per generation): `allowed` → sample → `advance` →
`allowed` → …
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from lightningrl.engine.base import Unanswerable
from lightningrl.errors import UserError

KEPT = 256
"""Number of compiled grammars that are cached. Not tuned: agents use some tens of tool sets and schemas, and one
compiles in milliseconds.
"""


class Grammars:
    """Compiles grammars for the tokenizer of one model folder. Threads may share it."""

    def __init__(self, folder: Path, *, vocab_size: int, end_id: int) -> None:
        """`vocab_size`: of the model's logits. `end_id`: the token that ends a complete answer."""
        self.vocab_size = vocab_size
        self.end_id = end_id
        self._file = folder / "tokenizer.json"
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        """An `LLTokenizer`, made for the first grammar: a large vocabulary takes a second."""
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, grammar: str, *, never: Iterable[int] = ()) -> "Matcher":
        """A matcher at the start of `grammar` that also forbids the tokens of `never`. Raises `Unanswerable` if the
        grammar does not compile.
        """
        with self._lock:  # rollouts of one task arrive together: one compiles for all
            compiled = self._compiled.get(grammar)
            if compiled is None:
                compiled = self._compiled[grammar] = self._compile(grammar)
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(grammar)
            fresh = compiled.deep_copy()
        matcher = Matcher(
            fresh, vocab_size=self.vocab_size, never=[t for t in never if t < self.vocab_size and t != self.end_id]
        )
        if matcher.failure is not None:
            raise Unanswerable(
                f"the grammar allows no answer: {matcher.failure}", hint="fix the JSON schema or the tools"
            )
        return matcher

    def _compile(self, grammar: str) -> Any:
        llguidance = _llguidance()
        if self._tokenizer is None:
            self._tokenizer = self._load(llguidance)
        compiled = llguidance.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False)
        )
        if compiled.is_error():
            raise Unanswerable(
                f"cannot compile the grammar: {compiled.get_error().strip()}", hint="fix the JSON schema or the tools"
            )
        return compiled

    def _load(self, llguidance: Any) -> Any:
        if not self._file.is_file():
            raise Unanswerable(f"grammars need `{self._file}`", hint="save the model's tokenizer there")
        tokenizer = Tokenizer.from_file(str(self._file))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        size = max(self.vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))  # either may be padded
        return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=self.end_id)


class Matcher:
    """The state of one generation in its grammar."""

    def __init__(self, matcher: Any, *, vocab_size: int, never: list[int]) -> None:
        self.failure: str | None = None
        """Why the generation cannot continue, e.g. because the grammar is too complex; None: it can."""
        self.allowed: Tensor
        """[V] bool: the tokens that may come next. Meaningless after a failure."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._never = never
        self._look()

    def advance(self, token: int) -> None:
        """Move past `token`, which has been sampled."""
        self._matcher.consume_token(token)
        self._look()

    def _look(self) -> None:
        allowed = np.unpackbits(
            np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), count=self._vocab_size, bitorder="little"
        ).view(bool)
        allowed[self._never] = False
        self.allowed = torch.from_numpy(allowed)
        if self._matcher.is_error():
            self.failure = self._matcher.get_error().strip()
        elif not allowed.any():
            self.failure = "no token may follow"


def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise UserError(
            "constrained answers need `llguidance`, which is not installed", hint='pip install "lightningrl[train]"'
        ) from error
    return llguidance
