"""Rows of a file that grows and is written anew; and the process of a run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightningrl.look.journal import START, MetricsFile
from lightningrl.look.process import FILE, QUIET_S, named, process_of


def test_rows_are_read_as_they_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert metrics.after().rows == () and metrics.after().cursor == START
    cursor, seen = START, []
    with path.open("a") as file:
        for number in range(5):
            text = json.dumps({"kind": "step", "step": number}) + "\n"
            file.write(text[:4])
            file.flush()
            assert metrics.after(cursor).rows == (), "half a line is no row"
            file.write(text[4:])
            file.flush()
            news = metrics.after(cursor)
            assert not news.reset
            cursor, seen = news.cursor, [*seen, *news.rows]
    assert (
        seen == metrics.rows() == MetricsFile(path).rows() == [{"kind": "step", "step": number} for number in range(5)]
    )
    assert MetricsFile(path).after(cursor).rows == (), "a cursor outlives the process that gave it"


def test_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"kind": "step", "step": number} for number in range(2)]
    path.write_bytes(
        json.dumps(rows[0]).encode() + b'\n\x00\xff{"kind"\n\n3\n{}\n' + json.dumps(rows[1]).encode() + b"\n"
    )
    metrics = MetricsFile(path)
    news = metrics.after()
    assert list(news.rows) == rows == metrics.rows()
    with path.open("a") as file:
        file.write("garbage\n" + json.dumps(rows[0]) + "\n")
    later = metrics.after(news.cursor)
    assert (list(later.rows), later.reset) == ([rows[0]], False)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_file_that_was_written_anew_is_noticed(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "step", "step": number, "at": number}) + "\n" for number in range(3)]
    path.write_text("".join(lines))
    metrics = MetricsFile(path)
    cursors = [START, *(news.cursor for news in [metrics.after()])]
    for repeated in (
        [],
        ['{"kind": "step", "step": 2, "at": 9}\n'],
        ['{"kind": "step", "step": 1, "at": 8}\n', '{"kind": "step", "step": 2, "at": 9}\n'] * 3,
    ):
        path.write_text("".join([*lines[:kept], *repeated]))
        rows = [json.loads(line) for line in (*lines[:kept], *repeated)]
        news = metrics.after(cursors[-1])
        assert metrics.rows() == rows
        assert list(news.rows) == (rows if news.reset else rows[3:])
        assert news.reset == (kept < 3)


def test_a_folder_names_the_process_of_its_run_while_it_runs(tmp_path: Path) -> None:
    assert process_of(tmp_path) is None
    with named(tmp_path):
        process = process_of(tmp_path)
        assert process is not None and process.pid == os.getpid()
        told = json.loads((tmp_path / FILE).read_text())
        (tmp_path / FILE).write_text(json.dumps(told | {"started": told["started"] - 1}))
        assert process_of(tmp_path) is None, "another process with the same number"
    assert not (tmp_path / FILE).exists()


def test_a_process_that_was_killed_does_not_run(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom lightningrl.look.process import named\n"
        "with named(Path(sys.argv[1])):\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    assert process_of(tmp_path) is not None
    child.kill()
    child.stdout.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_of(tmp_path) is None, "a zombie"
    child.wait()
    assert process_of(tmp_path) is None and (tmp_path / FILE).exists()


def test_a_process_of_another_machine_runs_as_long_as_the_run_writes(tmp_path: Path) -> None:
    with named(tmp_path):
        told = json.loads((tmp_path / FILE).read_text())
        (tmp_path / FILE).write_text(json.dumps(told | {"host": "elsewhere"}))
        assert process_of(tmp_path) is not None
        now = time.time()
        os.utime(tmp_path / FILE, (now, now - QUIET_S - 60))
        assert process_of(tmp_path) is None, "it has written nothing for long"
        (tmp_path / "store.sqlite-wal").touch()
        assert process_of(tmp_path) is None, "an empty log is of a reader"
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        assert process_of(tmp_path) is not None
        (tmp_path / "result.json").write_text("{}\n")
        assert process_of(tmp_path) is None, "it is complete"


@pytest.mark.parametrize("text", ["", "{", "3", "{}", '{"pid": 1}'])
def test_a_damaged_file_names_no_process(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert process_of(tmp_path) is None
