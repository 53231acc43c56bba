"""Does a call come back exactly, whatever its base is, and are repeats left out?"""

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightningrl.prefix import common_prefix
from lightningrl.store.delta import NOTHING, Content, Delta, pack, read, unpack, write
from lightningrl.types import Floats, Ints

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
IDS = st.sampled_from([2**8, 2**16, 2**18, 2**31]).flatmap(lambda end: st.lists(st.integers(0, end - 1), max_size=30))


def content(request: object, response: object, ids: list[int]) -> Content:
    return Content(
        ids=np.array(ids, np.int32), request=msgspec.json.encode(request), response=msgspec.json.encode(response)
    )


def logprobs(count: int) -> Floats:
    return -np.random.default_rng(count).exponential(size=count).astype(np.float32)


def size(delta: Delta) -> int:
    return len(delta.ids) + len(delta.logprobs) + len(delta.body)


@given(st.tuples(JSON, JSON, IDS), st.tuples(JSON, JSON, IDS), st.integers(0, 60))
def test_any_call_comes_back_from_its_difference_to_any_other(
    one: tuple[object, object, list[int]], other: tuple[object, object, list[int]], cut: int
) -> None:
    base, new = content(*one), content(*other)
    for earlier in (base, NOTHING, new):
        completion = min(cut, len(new.ids))
        drawn = logprobs(completion)
        again, kept = read(write(new, drawn, earlier, prompt_length=len(new.ids) - completion), earlier)
        assert (again.ids.tolist(), again.request, again.response) == (new.ids.tolist(), new.request, new.response)
        assert kept.tobytes() == drawn.tobytes()
        assert again.depth == earlier.depth + 1


@pytest.mark.parametrize("end", [1, 2**8, 2**16, 2**17, 2**18, 2**31 - 1])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 97])
def test_ids_are_packed_without_loss(end: int, count: int) -> None:
    ids: Ints = np.random.default_rng(count).integers(0, end, count, dtype=np.int32)
    for some in (ids, np.append(ids, np.int32(end - 1)), np.append(ids, np.int32(-1))):
        again = unpack(pack(some))
        assert again.tolist() == some.tolist()
        assert again.dtype == np.int32
    assert len(pack(ids)) <= 1 + math.ceil(count * (2 if end <= 2**16 else 2.25 if end <= 2**18 else 4))


def test_every_bit_of_a_logprob_is_kept() -> None:
    odd = np.array([0x7FC00001, 0xFF800000, 0x80000000, 1, 0x0A0A0A0A, 0xBF0A0A0A], np.uint32).view(
        np.float32
    )  # NaN, -inf, -0, tiny, newlines
    new = content({}, {}, [5] * 6)
    assert read(write(new, odd, NOTHING, prompt_length=0), NOTHING)[1].tobytes() == odd.tobytes()


def _turns() -> tuple[Content, Content, str]:
    """A call and the next one. Tools come after the messages, and the client puts its own keys around the answer."""
    text = random.Random(0)

    def words(count: int) -> str:
        return "".join(text.choices("abcdefghijklmnopqrstuvwxyz ", k=count))

    answer, tools = words(3000), [{"name": words(20), "description": words(60_000)}]
    messages = [{"role": "system", "content": words(9000)}, {"role": "user", "content": words(200)}]
    first = content(
        {"messages": messages, "tools": tools, "seed": 1},
        {"choices": [{"message": {"content": answer}}]},
        list(range(900)),
    )
    echo = [{"content": answer, "role": "assistant", "annotations": None}, {"role": "user", "content": "go on"}]
    second = content(
        {"messages": messages + echo, "tools": tools, "seed": 2},
        {"choices": [{"message": {"content": "so"}}]},
        list(range(930)),
    )
    return first, second, answer


def test_a_turn_costs_what_is_new_in_it() -> None:
    """It stores no history, no tools (longer than deflate's window), no echo of the answer (3,000 characters), and only
    ten ids of the prompt.
    """
    first, second, _ = _turns()
    turn = write(second, logprobs(20), first, prompt_length=910)
    assert turn.shared == 900
    assert size(turn) < 20 * 2.25 + 10 * 2.25 + 20 * 4 + 250
    assert size(write(second, logprobs(20), NOTHING, prompt_length=910)) > 40 * size(turn)


def test_what_follows_the_messages_is_not_even_looked_at() -> None:
    tools = [{"name": "run_sql", "description": "abc " * 500}]
    first = content({"messages": ["a"], "tools": tools}, {}, [])
    second = content({"messages": ["a", "b"], "tools": tools}, {}, [])
    turn = write(second, logprobs(0), first, prompt_length=0)
    assert (turn.head, turn.tail) == (len('{"messages":["a"'), len(msgspec.json.encode(tools)) + len('],"tools":}'))


def test_changes_far_apart_cost_little_more_than_one() -> None:
    """Too far apart for deflate: 60 kB, on both sides of the new messages."""
    first, second, _ = _turns()
    request = msgspec.json.decode(second.request)
    request["messages"][1]["content"] += " (cached)"
    thrice = content({"trace": 1, **request}, msgspec.json.decode(second.response), second.ids.tolist())
    turn = write(thrice, logprobs(20), first, prompt_length=910)
    assert size(turn) < size(write(second, logprobs(20), first, prompt_length=910)) + 100
    assert read(turn, first)[0].request == thrice.request
    long = content({"messages": [*request["messages"], *request["messages"]] * 9}, {}, [])
    for one, other in ((long, thrice), (thrice, long), (long, long)):
        assert read(write(one, logprobs(0), other, prompt_length=0), other)[0].request == one.request


@given(st.binary(max_size=60), st.data())
def test_any_blocks_come_back(alphabet: bytes, data: st.DataObject) -> None:
    """Requests of long pieces in random order: some shared, some twice, some cut."""
    pieces = [alphabet.hex() * 400 + "-" * 3000, "x" * 9000, "".join(map(str, range(4000))), "yz" * 5000, ""]

    def request() -> Content:
        some = data.draw(st.lists(st.sampled_from(pieces), max_size=6))
        return content([piece[data.draw(st.integers(0, 100)) :] for piece in some], {}, [])

    one, other = request(), request()
    assert read(write(one, logprobs(0), other, prompt_length=0), other)[0].request == one.request


def test_the_common_prefix_is_found() -> None:
    def length(one: list[int], other: list[int]) -> int:
        return common_prefix(np.array(one, np.int32), np.array(other, np.int32))

    assert [length([], [1]), length([1], [1]), length([1, 2], [1, 3]), length([2], [1]), length([1, 2, 3], [1, 2])] == [
        0,
        1,
        1,
        0,
        2,
    ]
