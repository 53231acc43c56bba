"""Does a call become the row that the module describes?"""

from dataclasses import replace

import numpy as np

from lightningrl.store import calls
from lightningrl.store.conformance import call, rollout
from lightningrl.store.delta import unpack
from lightningrl.store.sqlite import SQLiteStore

FIRST = {"role": "user", "content": "say a word"}
NEXT = [{"role": "assistant", "content": "blue"}, {"role": "user", "content": "another one"}]


async def test_the_example_of_the_module_is_real() -> None:
    store = await SQLiteStore.open(":memory:")
    await store.enqueue([rollout("r7")])
    [(_, attempt)] = await store.claim("w", limit=1, lease_s=60)
    root = replace(call(attempt, 0, [1, 2, 3], [7, 8, 9]), request={"model": "m", "messages": [FIRST]})
    turn = call(attempt, 1, [1, 2, 3, 7, 8, 9, 4, 5], [6, 9], parent=root.id, capture="bridged")
    await store.append(root, replace(turn, request={"model": "m", "messages": [FIRST, *NEXT]}))
    statement = "SELECT attempt, idx, kind, id, base, continues, shared, ids, head, tail, blocks FROM calls"
    rows = await store._writer.run(lambda connection: connection.execute(statement).fetchall())
    attempt_row, index, kind, name, base, continues, shared, ids, head, tail, blocks = rows[1]
    page = str(calls.__doc__)
    assert f"attempt {attempt_row}    idx {index} " in page and "id NULL" in page and name is None
    assert f"kind {kind} " in page and f"base {base} " in page and f"continues {continues} " in page
    assert f"shared {shared}     ids [{' '.join(map(str, unpack(ids)))}] " in page
    assert f"head {head} " in page and f"tail {tail} " in page and "blocks NULL" in page and blocks is None
    assert np.array_equal((await store.calls([attempt.id]))[1].prompt_ids, turn.prompt_ids)
    await store.close()
