"""`Where` → SQL: conditions on the view `whole_rollouts`, and the values that they bind."""

import msgspec

from lightningrl.store.base import Where
from lightningrl.types import FINAL

_REWARD = """
    EXISTS (
        SELECT 1 FROM rewards JOIN attempts ON attempts.seq = rewards.attempt
        WHERE attempts.rollout = whole_rollouts.seq AND attempts.number = accepted
            AND call IS NULL AND name = ? AND value BETWEEN ? AND ?
    )
"""


def conditions(where: Where, *, before: str | None = None) -> tuple[str, list[object]]:
    """(condition, its values). `before`: only rollouts that were enqueued before that one."""
    found: list[tuple[str, list[object]]] = [("true", [])]
    if where.prefix:
        begins = "id >= ? AND substr(id, 1, CAST(? AS INTEGER)) = ?"
        found.append((begins, [where.prefix, len(where.prefix), where.prefix]))
    if where.split is not None:
        found.append(("split = ?", [where.split]))
    if where.status is not None:
        found.append(("status = ?", [where.status]))
    if where.text:
        text, in_json = _pattern(where.text), _pattern(msgspec.json.encode(where.text).decode()[1:-1])
        inputs = r"SELECT id FROM inputs WHERE input LIKE ? ESCAPE '\'"
        found.append((rf"(task_id LIKE ? ESCAPE '\' OR input_id IN ({inputs}))", [text, in_json]))
    if where.reward is not None:
        found.append((_REWARD, [FINAL, *where.reward]))
    if before is not None:
        found.append(("seq < (SELECT seq FROM rollouts WHERE id = ?)", [before]))
    return " AND ".join(condition for condition, _ in found), [value for _, values in found for value in values]


def _pattern(text: str) -> str:
    for sign in "\\%_":
        text = text.replace(sign, "\\" + sign)
    return f"%{text}%"
