"""Do agents go the same way again on recorded answers? `benchmarks/replayable.py` asks all agents of the matrix."""

import re
from pathlib import Path

import pytest

from lightningrl.types import Branch

from .conftest import Program
from .replaying import difference, staged
from .test_matrix import CASES, Case, case
from .test_node import SDK
from .test_node import pytestmark as without_node

PYTHON = [found for found in CASES if str(found) == "openai_chat"]
NODE = [pytest.param(found, marks=without_node) for found in SDK if str(found) == "ai-7-responses-stream"]
CLOCK = case("clock", script="team")


def ready(program: Program) -> Program:
    if not program.needs.exists():
        pytest.fail(f"`{program.needs}` is missing\nhint: {program.hint}", pytrace=False)
    return program


@pytest.mark.parametrize("case", [*PYTHON, *NODE], ids=str)
async def test_an_agent_goes_the_same_way_on_recorded_answers(case: Case, tmp_path: Path) -> None:
    async with staged(ready(case.program), tmp_path) as stage:
        trunk = await stage.run()
        assert len(trunk.calls) == len(case.calls), trunk.log
        for call_id in (None, *(call.id for call in trunk.calls)):
            again = await stage.run(Branch(attempt_id=trunk.attempt_id, call_id=call_id))
            assert not again.error, again.error
            assert difference(trunk, again) == ""
            replayed = [call.replays is not None for call in again.calls]
            place = len(trunk.calls) if call_id is None else [call.id for call in trunk.calls].index(call_id)
            assert replayed == [True] * place + [False] * (len(trunk.calls) - place)


async def test_an_agent_with_the_time_in_its_prompt_is_void_and_the_time_is_the_example(tmp_path: Path) -> None:
    async with staged(ready(CLOCK.program), tmp_path) as stage:
        trunk = await stage.run()
        assert len(trunk.calls) == 2, trunk.log
        again = await stage.run(Branch(attempt_id=trunk.attempt_id, call_id=None))
    assert again.void
    assert [call.capture for call in again.calls] == ["rendered", "incomplete"]
    said = trunk.calls[1].request["messages"][-1]["content"]
    [when] = re.findall(r"\d{19}", said)
    assert when[-9:] in again.error, again.error
