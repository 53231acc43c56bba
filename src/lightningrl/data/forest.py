"""Forest: a batch packed so that each unique prefix is computed once.

Legend: N unique tokens · S segments · M sampled tokens (each one a term of the loss, never merged).
"""

from dataclasses import dataclass

from lightningrl.types import Doubles, Floats, Ints, Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One call together with what it is to teach."""

    transition: Transition
    advantages: Floats
    """[C] one per sampled token."""
    weights: Doubles
    """[C] share of each sampled token in the loss of the whole batch; 0 leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Token trees, flattened. Segment `s` holds the tokens `starts[s]:starts[s + 1]`; parents come before children.

    Two calls of one attempt, and a sibling that drew another answer to the same prompt `[1 2 3]`:

        c1  [1 2 3] → [7 9]          token_ids  1 2 3 | 7 9 4 | 6 9 | 8 9
        c2  [1 2 3 7 9 4] → [6 9]    segment    0       1       2     3
        c3  [1 2 3] → [8 9]          parents   -1       0       1     0

    A loss term reads the hidden state at `sources[m]` and asks for the token `targets[m]`: for c1 they are (2 → 7), (3 → 9).
    """

    token_ids: Ints
    """[N]"""
    positions: Ints
    """[N] distance from the root."""
    starts: Ints
    """[S + 1]"""
    parents: Ints
    """[S] -1 for a root."""
    sources: Ints
    """[M] index into `token_ids`."""
    targets: Ints
    """[M] token ids."""
    logprobs: Doubles
    """[M] under the policy that sampled them."""
    advantages: Doubles
    """[M]"""
    weights: Doubles
    """[M] computed once, up front, over the whole batch: packing cannot change the loss."""
    temperatures: Doubles
    """[M] the softmax temperature `logprobs` refer to."""
    calls: Ints
    """[M] index into `call_ids`."""
    call_ids: tuple[str, ...]
