"""What counts as a program's answer."""

from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import AgentError
from lightningrl.runner.answer import answer_of
from lightningrl.runner.wire import MAX_OUTPUT


@pytest.mark.parametrize(
    ("printed", "answer"),
    [
        (b'{"sql": "SELECT 1"}\n', {"sql": "SELECT 1"}),
        (b'{\n  "sql": 1\n}\n', {"sql": 1}),
        (b"42\n", 42),
        (b"it is blue\n", "it is blue"),
        (b"loading\ncalling the model\n" + b'{"sql": "SELECT 1"}\n', {"sql": "SELECT 1"}),
        (b"loading\r\n[1, 2]\r\n\r\n", [1, 2]),
        (b"Dear reader,\nthe answer is\n42\n", "Dear reader,\nthe answer is\n42"),
        (b"a list:\n[ ] buy milk\n", "a list:\n[ ] buy milk"),
        (b"", ""),
    ],
)
def test_what_was_printed_is_the_answer_or_its_last_line_if_that_is_an_object(
    tmp_path: Path, printed: bytes, answer: Any
) -> None:
    assert answer_of(printed, tmp_path / "output") == answer


@pytest.mark.parametrize(
    ("written", "answer"), [('{"x": 1}', {"x": 1}), ("two\nlines\n", "two\nlines"), ("", "printed")]
)
def test_a_file_that_was_written_goes_before_what_was_printed(tmp_path: Path, written: str, answer: Any) -> None:
    (tmp_path / "output").write_text(written)
    assert answer_of(b"printed\n", tmp_path / "output") == answer


def test_a_file_that_is_too_long_is_the_agents_failure(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as file:
        file.truncate(MAX_OUTPUT + 1)
    with pytest.raises(AgentError, match="wrote more than `16777216` bytes"):
        answer_of(b"", tmp_path / "output")
