"""Save the lessons of a failed update in one file that numpy can read: `np.load(path)`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightningrl.data.forest import Lesson


def dump_lessons(path: Path, lessons: Sequence[Lesson]) -> None:
    """Arrays of L lessons: `call_ids`, `rollout_ids`, `group_ids` and `returns` [L] (NaN without a critic). Tokens are
    concatenated: those of lesson i are `prompt_ids[prompt_starts[i]:prompt_starts[i + 1]]`, and likewise `starts` for
    `completion_ids`, `logprobs`, `advantages` and `weights`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    calls = [lesson.transition for lesson in lessons]
    np.savez_compressed(
        path,
        call_ids=np.array([call.call_id for call in calls], np.str_),
        rollout_ids=np.array([lesson.rollout_id for lesson in lessons], np.str_),
        returns=np.array([np.nan if lesson.returns is None else lesson.returns for lesson in lessons]),
        group_ids=np.array([lesson.group_id for lesson in lessons], np.str_),
        prompt_starts=_starts([len(call.prompt_ids) for call in calls]),
        prompt_ids=np.concatenate([call.prompt_ids for call in calls]),
        starts=_starts([len(call.completion_ids) for call in calls]),
        completion_ids=np.concatenate([call.completion_ids for call in calls]),
        logprobs=np.concatenate([call.logprobs for call in calls]),
        advantages=np.concatenate([lesson.advantages for lesson in lessons]),
        weights=np.concatenate([lesson.weights for lesson in lessons]),
    )


def _starts(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
