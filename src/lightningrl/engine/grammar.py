"""Which tokens may come next? A matcher walks along with one generation and rules out whatever would leave its
grammar's language.

grammar text → `Grammars` (compiled once per text) → `Matcher` (one per generation): `allowed` → sample → `advance` →
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
"""Compiled grammars that an engine keeps. A guess: agents have some tens of tool sets and schemas, and one compiles in
milliseconds.
"""


class Grammars:
    """Compiles grammars for the tokenizer of one model folder. Threads may share it."""

    def __init__(self, folder: Path, *, vocab_size: int, end_id: int) -> None:
        """`vocab_size` is the model's, `end_id` the token that a complete answer ends with."""
        self.vocab_size = vocab_size
        self.end_id = end_id
        self._file = folder / "tokenizer.json"
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        """An `LLTokenizer`: takes a second for a large vocabulary, so it is made when the first grammar comes."""
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, grammar: str, *, never: Iterable[int] = ()) -> "Matcher":
        """At the beginning of `grammar`; the tokens of `never` are ruled out throughout. `Unanswerable` if it cannot be
        compiled.
        """
        with self._lock:  # rollouts of one task arrive together: one compiles, the others find it done
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
                f"the grammar allows no answer: {matcher.failure}", hint="mend the JSON schema or the tools"
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
                f"cannot compile the grammar: {compiled.get_error().strip()}", hint="mend the JSON schema or the tools"
            )
        return compiled

    def _load(self, llguidance: Any) -> Any:
        if not self._file.is_file():
            raise Unanswerable(f"grammars need `{self._file}`", hint="save the model's tokenizer there")
        tokenizer = Tokenizer.from_file(str(self._file))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        size = max(
            self.vocab_size, tokenizer.get_vocab_size(with_added_tokens=True)
        )  # the longer of the two has tokens of no use
        return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=self.end_id)


class Matcher:
    """How far one generation has come in its grammar."""

    def __init__(self, matcher: Any, *, vocab_size: int, never: list[int]) -> None:
        self.failure: str | None = None
        """Why it cannot go on, e.g. because the grammar is too complex; None: it can."""
        self.allowed: Tensor
        """[V] bool: what the next token may be. Meaningless after a failure."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._never = never
        self._look()

    def advance(self, token: int) -> None:
        """`token` has been sampled."""
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
