"""CPU seconds are counted to the part that used them."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from lightningrl.cpu import PARTS, CpuSplit, Doing, count_as_engine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")

SPENT_S = 0.2
BURN = f"import time\nwhile time.process_time() < {SPENT_S}: pass\n"


def burn() -> None:
    began = time.thread_time()
    while time.thread_time() - began < SPENT_S:
        pass


def spent_by(work: Callable[[], object], *, doing: Doing = "gateway") -> dict[str, float]:
    cpu = CpuSplit()
    cpu.lap("rest")
    before = cpu.seconds
    work()
    cpu.lap(doing)
    return {part: seconds - before[part] for part, seconds in cpu.seconds.items()}


@pytest.mark.parametrize("doing", ["gateway", "training", "rest"])
def test_what_this_process_does_counts_as_what_it_is_doing(doing: Doing) -> None:
    spent = spent_by(burn, doing=doing)
    assert spent.pop(doing) >= SPENT_S
    assert sum(spent.values()) < SPENT_S / 4


def test_threads_of_engines_count_as_engine_and_other_threads_do_not() -> None:
    ended = threading.Event()

    def engine() -> None:
        burn()
        ended.wait(10)

    threads = [threading.Thread(target=engine, name=f"engine-{name}") for name in ("planner", "solver")]

    def work() -> None:
        for thread in threads:
            thread.start()
        other = threading.Thread(target=burn)
        other.start()
        other.join()
        time.sleep(3 * SPENT_S)

    try:
        spent = spent_by(work)
    finally:
        ended.set()
    assert 1.9 * SPENT_S < spent["engine"] < 3 * SPENT_S
    assert SPENT_S <= spent["gateway"] < 2 * SPENT_S


def test_an_engine_that_has_ended_takes_nothing_from_what_was_counted() -> None:
    ended = threading.Event()
    engine = threading.Thread(target=lambda: (burn(), ended.wait(10)), name="engine-policy")
    cpu = CpuSplit()
    engine.start()
    time.sleep(2 * SPENT_S)
    cpu.lap("gateway")
    before = cpu.seconds
    ended.set()
    engine.join()
    cpu.lap("rest")
    assert all(cpu.seconds[part] >= before[part] for part in PARTS)


def test_a_program_counts_with_what_it_has_started_alive_or_ended() -> None:
    """A worker that has waited for one program while another, e.g. an MCP server, still runs."""
    server = f"{BURN}print(flush=True)\ntime.sleep(60)"
    worker = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {BURN!r}], check=True)
with subprocess.Popen([sys.executable, "-c", {server!r}], stdout=subprocess.PIPE) as server:
    server.stdout.readline()
    {BURN.replace(chr(10), chr(10) + "    ")}
    print(flush=True)
    sys.stdin.read()
    server.kill()
"""
    with subprocess.Popen([sys.executable, "-c", worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        spent = spent_by(running.stdout.readline)
        ending = spent_by(lambda: running.communicate(timeout=60))
    assert 2.7 * SPENT_S < spent["agents"] < 6 * SPENT_S
    assert ending["agents"] < SPENT_S, "nothing is counted again once it has been waited for"


def test_a_server_of_the_run_counts_as_engine_alive_or_ended() -> None:
    """Behind a keeper, as vLLM is; the agent beside it counts as agent."""
    server = f"{BURN}print(flush=True)\ntime.sleep(60)"
    keeper = f"""
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", {server!r}], stdout=subprocess.PIPE) as server:
    print(server.stdout.readline(), flush=True)
    sys.stdin.read()
    server.kill()
"""
    with subprocess.Popen([sys.executable, "-c", keeper], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        count_as_engine(running.pid)
        spent = spent_by(running.stdout.readline)
        ending = spent_by(lambda: running.communicate(timeout=60))
        agent = spent_by(lambda: subprocess.run([sys.executable, "-c", BURN], check=True))
    assert 0.9 * SPENT_S < spent["engine"] < 3 * SPENT_S and spent["agents"] < SPENT_S / 2
    assert ending["engine"] < SPENT_S / 2 and ending["agents"] < SPENT_S / 2, "nothing is counted again"
    assert 0.9 * SPENT_S < agent["agents"] < 3 * SPENT_S and agent["engine"] < SPENT_S / 2
