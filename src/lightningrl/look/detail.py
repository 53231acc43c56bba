"""Everything about one call: what was sent and answered, and each token that the engine read and sampled.

records → `look_at_call` → `CallDetail` → page, Python, or `as_json` (docs/look.md)
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lightningrl.errors import Missing
from lightningrl.look.call import CallView
from lightningrl.look.copies import Copies, copies_of
from lightningrl.look.opened import Opened
from lightningrl.look.rollout import look_at
from lightningrl.look.teaching import Teaching
from lightningrl.look.tokens import Alternatives, Run, alternatives, origins
from lightningrl.types import Call, Doubles, Floats, Sampling

NO_TOKENIZER = "the run's folder has no tokenizer of this policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDetail:
    """One call with its tokens. P prompt tokens, C sampled tokens."""

    view: CallView
    prompt_texts: tuple[str, ...] | None
    """[P] text of each token; None without a tokenizer. Those of the sampled tokens are `view.pieces`."""
    runs: tuple[Run, ...]
    """Who brought the prompt tokens in; the runs cover the prompt, in order."""
    advantages: Floats | None
    """[C] as training used them; None: `why_not` says why."""
    weights: Doubles | None
    """[C] of each token in the loss of the whole batch."""
    entropies: Floats | None
    """[C] nats, of the weights that sampled the tokens; None: not recorded."""
    ratios: Doubles | None
    """[C] probability after the step / probability when sampled; None: not recorded."""
    alternatives: tuple[Alternatives, ...] | None
    """[C] the likeliest tokens at each position; None: the agent did not ask for them."""
    copies: Copies | None
    """The call as text to copy; None for an API format of a plugin."""
    why_not: Mapping[str, str]
    """`advantages`, `entropies`, `ratios`, `alternatives` or `texts`: why it is None."""

    def as_json(self) -> dict[str, Any]:
        call = self.view.call
        prompt = {
            "ids": call.prompt_ids.tolist(),
            "texts": self.prompt_texts,
            "runs": [run.as_json() for run in self.runs],
        }
        sampled = {
            "ids": call.completion_ids.tolist(),
            "texts": self.view.pieces,
            "logprobs": _rounded(call.logprobs),
            "advantages": _rounded(self.advantages),
            "weights": None if self.weights is None else self.weights.tolist(),
            "entropies": _rounded(self.entropies),
            "ratios": _rounded(self.ratios),
            "alternatives": _alternatives_json(self.alternatives),
            "grammar": call.sampling.grammar is not None,
        }
        return {
            **self.view.as_json(tokens=False),
            "request": call.request,
            "response": call.response,
            "sampling": _sampling_json(call.sampling),
            "copies": None if self.copies is None else self.copies.as_json(),
            "tokens": {"prompt": prompt, "sampled": sampled, "why_not": dict(self.why_not)},
        }


async def look_at_call(run: Opened, rollout_id: str, number: int, *, attempt: int | None = None) -> CallDetail:
    """Call `number` of a rollout, from 1. `attempt`: as in `look_at`. Raises `Missing` if there is no such call."""
    rollout = await look_at(run, rollout_id, attempt=attempt, texts=False, logs=False)
    view = next((call for call in rollout.calls if call.number == number), None)
    if view is None:
        raise Missing(
            f"rollout `{rollout.rollout.id}` has no call `{number}`", hint=f"it made {len(rollout.calls)} calls"
        )
    calls = [one.call for one in rollout.calls]
    texts = run.texts(view.call.policy)
    found = alternatives(calls, view.call)
    why_not = _why_not(view, rollout.teaching, texts=texts is not None, alternatives=found is not None)
    lesson = None if view.left_out is not None else view.lesson
    return CallDetail(
        view=view if texts is None else view.with_pieces(texts),
        prompt_texts=None if texts is None else texts.of(view.call.prompt_ids),
        runs=origins(calls, texts={view.call.policy: texts})[view.call.id],
        advantages=None if lesson is None else lesson.advantages,
        weights=None if view.lesson is None else view.lesson.weights,
        entropies=rollout.teaching.entropies.get(view.call.id),
        ratios=_ratios(view.call, rollout.teaching.logprobs_after.get(view.call.id)),
        alternatives=found,
        copies=copies_of(view.call, view.said.answer),
        why_not=why_not,
    )


def _why_not(view: CallView, teaching: Teaching, *, texts: bool, alternatives: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    if not texts:
        found["texts"] = NO_TOKENIZER
    if not alternatives:
        asked = view.call.sampling.top_logprobs
        found["alternatives"] = "the response does not show all tokens" if asked else "the agent did not ask for them"
    if view.left_out is not None:
        found["advantages"] = f"the call is not trained: {view.left_out}"
    elif view.lesson is None:
        found["advantages"] = teaching.why_not or f"the policy `{view.call.policy}` does not learn from this call"
    measured = {"entropies": teaching.entropies, "ratios": teaching.logprobs_after}
    for name, by_call in measured.items():
        if view.call.id not in by_call:
            found[name] = found.get("advantages") or _not_measured(teaching, view.call.policy)
    return found


def _not_measured(teaching: Teaching, policy: str) -> str:
    if policy in teaching.unreadable:
        return teaching.unreadable[policy]
    if not teaching.learnt:
        return "they are measured when the step is complete"
    return "only the groups of a share of each step are measured (`trainer.measured`)"


def _ratios(call: Call, after: Floats | None) -> Doubles | None:
    return None if after is None else np.exp(after.astype(np.float64) - call.logprobs)


def _sampling_json(sampling: Sampling) -> dict[str, Any]:
    """The seed as text: JavaScript's numbers have 53 bits."""
    return asdict(sampling) | {"seed": None if sampling.seed is None else str(sampling.seed)}


def _rounded(numbers: Floats | Doubles | None) -> list[float] | None:
    return None if numbers is None else np.round(numbers.astype(np.float64), 6).tolist()


def _alternatives_json(found: tuple[Alternatives, ...] | None) -> list[list[dict[str, Any]]] | None:
    if found is None:
        return None
    return [[{"text": text, "logprob": round(logprob, 6)} for text, logprob in top] for top in found]
