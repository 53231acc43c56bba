"""Which results of a tool are failures?"""

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
def test_a_result_that_reports_a_failure(output: str, exception: str | None) -> None:
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
def test_a_poor_result_is_no_failure(output: str) -> None:
    assert failure_of(output) is None


def test_an_error_mark_of_the_wire_format_suffices() -> None:
    failure = failure_of("", declared=True)
    assert failure is not None and (failure.message, failure.exception) == ("error", None)
