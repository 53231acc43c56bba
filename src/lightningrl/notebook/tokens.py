"""The sampled tokens of a call: ids, texts, logprobs, and what training did with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from lightningrl.look.call import CallView
from lightningrl.look.teaching import Teaching
from lightningrl.notebook.colours import Colour, coloured, legend
from lightningrl.notebook.html import Html, frame
from lightningrl.notebook.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One sampled token."""

    id: int
    text: str | None
    """None without a tokenizer."""
    logprob: float
    """In nats, under the weights that sampled it."""
    advantage: float | None
    """Positive: training makes it more likely. None: not known, or not trained."""
    entropy: float | None
    """In nats, of the weights that sampled it; None: not measured."""
    ratio: float | None
    """Its probability after the step, as a multiple of that before; None: not measured."""

    def plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class Tokens(Rows[Token]):
    """The sampled tokens of a call, in order. A notebook shows them coloured."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        shown = ("text", "id", "logprob", "advantage", "entropy", "ratio")
        super().__init__(tokens, plain=Token.plain, shown=shown, empty="the call has no sampled tokens")

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self]

    @property
    def texts(self) -> list[str | None]:
        return [token.text for token in self]

    @property
    def logprobs(self) -> list[float]:
        return [token.logprob for token in self]

    @property
    def advantages(self) -> list[float | None]:
        return [token.advantage for token in self]

    @property
    def entropies(self) -> list[float | None]:
        return [token.entropy for token in self]

    @property
    def ratios(self) -> list[float | None]:
        return [token.ratio for token in self]

    def coloured(self, by: Colour = "advantage") -> Html:
        """The tokens, each with a background for its value. If a value is missing, the logprobs are taken instead."""
        by = self.known(by)
        return Html(frame(self.markup(by), legend(by)))

    def known(self, by: Colour) -> Colour:
        """`by`, or the logprob if a token has no such value."""
        return "logprob" if any(getattr(token, by) is None for token in self) else by

    def markup(self, by: Colour) -> Markup:
        """The tokens alone, coloured by a value that all of them have."""
        texts = [f"[{token.id}]" if token.text is None else token.text for token in self]
        return coloured(texts, [getattr(token, by) for token in self], colour=by)

    def _repr_html_(self) -> str:
        return self.coloured()._repr_html_()


def tokens_of(view: CallView, teaching: Teaching) -> Tokens:
    """The tokens of a call. `teaching`: of its rollout. Those of a call that is not trained have no advantage."""
    call = view.call
    lesson = None if view.left_out is not None else view.lesson
    after = teaching.logprobs_after.get(call.id)
    columns = (
        call.completion_ids,
        view.pieces,
        call.logprobs,
        None if lesson is None else lesson.advantages,
        teaching.entropies.get(call.id),
        None if after is None else np.exp(after.astype(np.float64) - call.logprobs),
    )
    count = len(call.completion_ids)
    lists = [[None] * count if column is None else np.asarray(column).tolist() for column in columns]
    names = ("id", "text", "logprob", "advantage", "entropy", "ratio")
    return Tokens([Token(**dict(zip(names, values, strict=True))) for values in zip(*lists, strict=True)])
