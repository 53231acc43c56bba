"""The lines of one attempt in a log that many share."""

import time
from pathlib import Path

from lightningrl.look.logs import CHUNK, KEPT, Logs, logs_of
from lightningrl.runner.logfile import begin_anew


def test_an_attempt_that_printed_nothing_has_no_logs(tmp_path: Path) -> None:
    assert logs_of(tmp_path, "r.1") is None, "there is no log"
    (tmp_path / "agents.log").write_text("[r.2] hello\nr.1 is a name\nsaid [r.1] this\n[r.11] a\n[r.1]?\n[r.1]\n")
    assert logs_of(tmp_path, "r.1") is None


def test_lines_and_parts_of_lines_are_joined_and_the_rest_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "agents.log").write_bytes(
        b"[r.1] one\nnobody's\n[r.1]+10 %\r\n[r.2] other\n[r.1]+20 %\n[r.1] \n[r.1] <b>\xff[r.2]"
    )
    assert logs_of(tmp_path, "r.1") == Logs(
        text="one\n10 %\r20 %\n<b>\N{REPLACEMENT CHARACTER}[r.2]\n", truncated=False
    )


def test_of_a_long_log_the_end_is_kept_from_the_beginning_of_a_line(tmp_path: Path) -> None:
    lines = [f"line {number}\n" for number in range(20_000)]
    (tmp_path / "agents.log").write_text("".join(f"[r.1] {line}" for line in lines))
    logs = logs_of(tmp_path, "r.1")
    assert logs and logs.truncated and KEPT - 20 < len(logs.text) <= KEPT
    assert "".join(lines).endswith("\n" + logs.text)


def test_a_log_that_began_anew_is_read_with_its_predecessor(tmp_path: Path) -> None:
    log = tmp_path / "agents.log"
    log.write_text("[r.1] cut off\n[r.1] before\n")
    begin_anew(log, keep=20)
    log.write_text("[r.1] after\n")
    assert logs_of(tmp_path, "r.1") == Logs(text="before\nafter\n", truncated=False)


def test_a_large_log_is_searched_fast_and_whole(tmp_path: Path) -> None:
    noise = b"".join(b"[train-00007-003-%02d.1] some words that an agent says\n" % (n % 100) for n in range(1000))
    line = b"[r.1] here\n"
    with (tmp_path / "agents.log").open("wb") as log:
        while log.tell() < 5 * CHUNK:
            log.write(noise + line)
        lines = log.tell() // len(noise + line)
    began = time.perf_counter()
    logs = logs_of(tmp_path, "r.1")
    assert logs == Logs(text="here\n" * lines, truncated=False), "also the lines at the edges of a chunk"
    assert time.perf_counter() - began < 2, "20 MB take 20 ms on an idle machine"
