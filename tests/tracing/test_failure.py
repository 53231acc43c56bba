"""When a result says that a tool has failed, and when it does not."""

import pytest

from lightningrl.tracing.failure import failure_of

TRACEBACK = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in f\nsqlite3.OperationalError: no such table: x\n'
)


@pytest.mark.parametrize(
    ("output", "exception"),
    [
        (TRACEBACK, "sqlite3.OperationalError"),
        ("ValueError: bad", "ValueError"),
        ("  KeyError('x')", "KeyError"),
        ("TimeoutError", "TimeoutError"),
        ("Error: ToolException('no')\n Please fix your mistakes.", "ToolException"),
        ('{"error": "ValueError: bad"}', "ValueError"),
        ('{"error": {"message": "no", "code": 3}}', None),
        ('{"isError": true, "content": []}', None),
        ("Error: weather is not a valid tool, try one of [time].", None),
        ("error", None),
        ("Error executing tool weather: no", None),
        ("An error occurred while running the tool. Please try again. Error: no", None),
    ],
)
def test_what_says_that_it_failed(output: str, exception: str | None) -> None:
    failure = failure_of(output)
    assert failure is not None and failure.exception == exception and failure.message


@pytest.mark.parametrize(
    "output",
    [
        "",
        "21 °C",
        "Errors were made in 1999.",
        "The Error: a film",
        "ErrorBars are drawn",
        '{"error": null, "rows": 3}',
        '{"error": ""}',
        '{"isError": false}',
        '{"rows": ["ValueError: bad"]}',
        '["error"]',
        "{not json",
        "errors: 0",
        "Exceptional work",
    ],
)
def test_what_merely_looks_poor_has_not_failed(output: str) -> None:
    assert failure_of(output) is None


def test_a_wire_that_says_so_needs_no_words() -> None:
    failure = failure_of("", declared=True)
    assert failure is not None and (failure.message, failure.exception) == ("error", None)
