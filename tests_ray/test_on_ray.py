"""Workers on a real Ray cluster of several nodes on this machine: `make test-ray`."""

import sqlite3
import time
from pathlib import Path

from tests_ray.conftest import ENDED_S, SETTINGS, Nodes, Run, on_ray, started, until

ELSEWHERE = (*SETTINGS, "agent.workers=0")
KILLS = 3


def rollouts(run: Run) -> set[tuple[str, int]]:
    """The status of each rollout, and the number of its attempts that count."""
    with sqlite3.connect(f"file:{run.folder / 'store.sqlite'}?mode=ro", uri=True) as store:
        succeeded = "SELECT count(*) FROM attempts a WHERE a.rollout = r.seq AND a.status = 'succeeded'"
        return set(store.execute(f"SELECT r.status, ({succeeded}) FROM rollouts r"))


def until_event(run: Run, number: int) -> None:
    until(lambda: run.events > number or not run.going, timeout_s=ENDED_S)


def test_nodes_die_and_come_and_the_run_ends_as_if_nothing_had_happened(nodes: Nodes, tmp_path: Path) -> None:
    """With `--shared`: nodes on one machine share Ray's folder, and a new node empties the copies of the others."""
    calm = tmp_path / "calm"
    calm.mkdir()
    with started(calm, *SETTINGS, "agent.workers=2") as undisturbed:
        assert undisturbed.process.wait(ENDED_S) == 0
    with started(tmp_path, *ELSEWHERE) as run, on_ray(run, nodes, "--count", "4", "--shared") as workers:
        for number in range(KILLS):
            until_event(run, number)
            assert run.going, "it ended before all nodes had died"
            nodes.kill()
            nodes.add()
        assert run.process.wait(ENDED_S) == 0, workers.said
        assert rollouts(run) == {("succeeded", 1)}
        assert run.weights == undisturbed.weights
        assert workers.ends() == 0, workers.said  # one that starts after the end of the run waits for the server
        assert len({node for event in workers.events for node in event.get("nodes", ())}) > 2


def test_a_signal_lets_the_attempts_end_and_other_workers_go_on(nodes: Nodes, tmp_path: Path) -> None:
    with started(tmp_path, *ELSEWHERE) as run:
        with on_ray(run, nodes, "--count", "3") as workers:
            until_event(run, 1)
            assert workers.ends() == 0, workers.said
            [ended] = [event for event in workers.events if event["event"] == "ended_workers"]
            assert ended["succeeded"] > 0 and ended["failed"] == 0, workers.said
        with on_ray(run, nodes, "--count", "2") as others:
            assert run.process.wait(ENDED_S) == 0, others.said
        assert rollouts(run) == {("succeeded", 1)}


def test_workers_without_a_node_wait_for_one(nodes: Nodes, tmp_path: Path) -> None:
    with started(tmp_path, *ELSEWHERE, "loop.steps=1000") as run:
        with on_ray(run, nodes, "--count", "5", "--shared") as workers:
            until(lambda: sorted(workers.places[0].values()) == [2, 2] and workers.places[1] == 1, timeout_s=60)
            nodes.add()
            until(lambda: len(workers.places[0]) == 3 and workers.places[1] == 0, timeout_s=60)
        with on_ray(run, nodes, "--count", "7", "--shared") as workers:
            until(lambda: sum(workers.places[0].values()) == 6, timeout_s=60)
            began = time.monotonic()
            assert workers.ends() == 0, workers.said
            assert time.monotonic() - began < 30


def test_what_hinders_every_worker_is_said_once(nodes: Nodes, tmp_path: Path) -> None:
    with started(tmp_path, *ELSEWHERE) as run, on_ray(run, nodes, "--count", "3", key="another") as workers:
        assert workers.process.wait(60) == 2, workers.said
        assert workers.said.count("error: ") == 1 and "key" in workers.said
