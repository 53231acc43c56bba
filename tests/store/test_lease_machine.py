"""Does every rollout end exactly once, whatever workers, clocks and crashes do? Stores compared with a dictionary.

Each step of the machine is one verb, two verbs at once, or the death of a process that has the store open. After each
step, the store must hold what `ledger.Ledger` holds. `make leases` runs 10,000 steps on each store; the tests run
fewer.
"""

import copy
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.postgres import Postgres
from tests.store.hosts import Host
from tests.store.ledger import LONG_S, REFUSED, Ledger, Op

log = logging.getLogger(__name__)

STEPS = int(os.environ.get("LIGHTNINGRL_LEASES", "150"))
STEPS_PER_LIFE = 50
"""Steps from an empty store on."""
WORKERS = ("local", "ada", "bob")
GATEWAYS = ("", "g1")
LABELS = ((), ("gpu",), ("browser", "gpu"))
DELAYS_S = (0.0, 0.0003, 0.001, 0.002, 0.004, 0.02)
"""How long after a verb was sent its process is killed: before, in and after the commit."""

# What an argument means depends on what the store holds. So rules draw plain numbers, and `_pick` reads them: a step
# that crashes at another moment does not change what later steps draw.
PICK = st.integers(0, 999)
PICKS = st.lists(PICK, max_size=3)
LEASES_S = st.sampled_from((LONG_S, LONG_S, 0.0))
VALUES = st.sampled_from((0.0, 0.5, 1.0, float("nan")))
ENQUEUE = st.tuples(
    st.just("enqueue"), st.lists(PICK, min_size=1, max_size=3), st.integers(1, 3), st.sampled_from(LABELS)
)
CLAIM = st.tuples(
    st.just("claim"),
    st.sampled_from(WORKERS),
    st.sampled_from((2, 0, 1, 4)),
    LEASES_S,
    st.sampled_from((("browser", "gpu"), ("browser", "gpu"), ("gpu",), ())),
    st.none() | PICKS,
    st.sampled_from(GATEWAYS),
)
HEARTBEAT = st.tuples(st.just("heartbeat"), PICKS, LEASES_S, st.none() | PICK)
FINISH = st.tuples(
    st.just("finish"),
    PICK,
    st.sampled_from(("succeeded", "succeeded", "failed", "timeout", "lost")),
    st.none() | PICK,
    st.lists(VALUES, max_size=2),
)
CALL = st.tuples(st.just("call"), PICK, st.booleans())
REWARD = st.tuples(st.just("reward"), PICK, VALUES)
HOW = st.sampled_from(("one",) * 6 + ("two at once",) * 3 + ("killed",) * 2 + ("reopened",))
OPS = st.one_of(CLAIM, CLAIM, ENQUEUE, HEARTBEAT, FINISH, CALL, REWARD)


def _pick(ledger: Ledger, number: int) -> str:
    """The id of an attempt: mostly of one that runs, otherwise of any, sometimes of none."""
    running = [attempt.id for attempt in ledger.attempts() if attempt.status == "running"]
    known = [attempt.id for attempt in ledger.attempts()]
    among = known if number % 4 == 0 else running
    return among[number // 4 % len(among)] if among else "nobody.1"


def _worker(ledger: Ledger, attempt_id: str, number: int | None) -> str | None:
    """Mostly the attempt's own worker."""
    if number is None:
        return None
    attempt = ledger.find(attempt_id)
    return attempt.worker if attempt is not None and number % 4 else WORKERS[number % len(WORKERS)]


def concrete(drawn: tuple[Any, ...], ledger: Ledger) -> Op:
    """The verb that the drawn numbers mean now."""
    match drawn:
        case ("enqueue", ids, most, labels):
            names = list(dict.fromkeys(f"r{number % 16}" for number in ids))
            return Op(verb="enqueue", arguments={"ids": names, "max_attempts": most, "labels": labels})
        case ("claim", worker, limit, lease_s, labels, holding, gateway):
            held = None if holding is None else frozenset(_pick(ledger, number) for number in holding)
            given = {"worker": worker, "limit": limit, "lease_s": lease_s, "labels": labels}
            return Op(verb="claim", arguments={**given, "holding": held, "gateway": gateway})
        case ("heartbeat", picks, lease_s, who):
            ids = [_pick(ledger, number) for number in picks]
            worker = _worker(ledger, ids[0] if ids else "", who)
            return Op(verb="heartbeat", arguments={"ids": ids, "lease_s": lease_s, "worker": worker})
        case ("finish", number, how, who, rewards):
            attempt_id = _pick(ledger, number)
            given = {"attempt_id": attempt_id, "status": how, "worker": _worker(ledger, attempt_id, who)}
            return Op(verb="finish", arguments={**given, "rewards": rewards})
        case ("call", number, again):
            attempt_id = _pick(ledger, number)
            attempt = ledger.find(attempt_id)
            made = [] if attempt is None else attempt.calls
            index = len(made) - 1 if again and made else len(made)
            parent = made[-1] if made and not again else None
            return Op(verb="call", arguments={"attempt_id": attempt_id, "index": index, "parent": parent})
        case (_, number, value):
            return Op(verb="reward", arguments={"attempt_id": _pick(ledger, number), "value": value})
    raise AssertionError(drawn)


class LeaseMachine(RuleBasedStateMachine):
    """One or two processes on one store."""

    urls: ClassVar[Iterator[str]]
    """A new store for each life."""
    seen: ClassVar[Counter[str]]
    """What has happened: all steps, and kinds of steps and results."""

    def __init__(self) -> None:
        super().__init__()
        self.url = next(self.urls)
        self.ledger = Ledger()
        self.tokens: dict[str, str] = {}
        self.hosts: list[Host] = []
        self.cursor = 0
        self.statuses: dict[str, str] = {}

    @initialize(alone=st.booleans())
    def start(self, alone: bool) -> None:
        """`alone`: one process that has locked the store, as a server does; otherwise two that share it."""
        self.alone = alone
        self.hosts = [Host(self.url, exclusive=alone) for _ in range(1 if alone else 2)]
        self.cursor, _ = self.hosts[0].ask("changed", None)
        self.plain(Op(verb="enqueue", arguments={"ids": ["r0", "r1", "r2", "r3"], "max_attempts": 2, "labels": ()}))

    @rule(how=HOW, first=OPS, second=OPS, host=PICK, delay_s=st.sampled_from(DELAYS_S), reader=PICK)
    def step(
        self, how: str, first: tuple[Any, ...], second: tuple[Any, ...], host: int, delay_s: float, reader: int
    ) -> None:
        """One rule with weights of its own: hypothesis would leave out rules in whole lives."""
        op = concrete(first, self.ledger)
        match how:
            case "two at once":
                self.two_verbs_at_once([op, concrete(second, self.ledger)], reader)
            case "killed":
                self.verb_and_kill(op, host, delay_s, reader)
            case _:
                self.one_verb(op, host, reader)
        if how == "reopened":
            self.replace(host, killed_after_s=None)
        self.check(reader)
        self.seen["steps"] += 1
        self.seen[how] += 1

    def one_verb(self, op: Op, host: int, reader: int) -> None:
        """The result is the ledger's. The process that ended an attempt refuses its token at once."""
        before = {attempt.id for attempt in self.ledger.attempts() if attempt.status == "running"}
        expected = self.ledger.apply(op)
        result = self.result_of(op, self.host(host).ask("do", op))
        assert result == expected, op
        self.seen[op.verb + (", refused" if result == REFUSED else "")] += 1
        for attempt in self.ledger.attempts():
            if attempt.id in before & self.tokens.keys() and attempt.status != "running":
                assert self.host(host).ask("status", self.tokens[attempt.id]) == attempt.status, attempt.id

    def two_verbs_at_once(self, ops: list[Op], reader: int) -> None:
        """Both results, and the records, are those of one of the two orders."""
        hosts = [self.host(0), self.host(1)]
        sent = [host.send("do", op) for host, op in zip(hosts, ops, strict=True)]
        results = [self.result_of(op, host.answer(number)) for host, op, number in zip(hosts, ops, sent, strict=True)]
        held = self.host(reader).ask("contents")
        for order in ((0, 1), (1, 0)):
            after = copy.deepcopy(self.ledger)
            expected = {place: after.apply(ops[place]) for place in order}
            if [expected[0], expected[1]] == results and after.contents() == held:
                break
        else:
            raise AssertionError(f"no order of {ops} explains {results} and {held}, after {self.ledger.contents()}")
        self.ledger = after
        self.settle(*ops)

    def verb_and_kill(self, op: Op, host: int, delay_s: float, reader: int) -> None:
        """The process dies before it can answer: all of the verb has happened, or nothing of it."""
        before, after = self.ledger.contents(), copy.deepcopy(self.ledger)
        after.apply(op)
        self.host(host).send("do", op)
        self.replace(host, killed_after_s=delay_s)
        held = self.host(reader).ask("contents")
        if held == after.contents() != before:
            self.ledger = after
            self.seen["killed after the commit"] += 1
        elif before != after.contents():
            self.seen["killed before the commit"] += 1
        self.settle(op)

    def teardown(self) -> None:
        """Every rollout can be run to its end, and no ended rollout is begun again."""
        try:
            if not self.hosts:
                return
            labels = LABELS[-1]
            given = {"limit": 100, "lease_s": LONG_S, "labels": labels, "holding": None, "gateway": ""}
            while any(rollout.status not in ("succeeded", "failed") for rollout in self.ledger.rollouts.values()):
                self.plain(Op(verb="claim", arguments={"worker": "ada", **given}))
                for attempt in self.ledger.attempts():
                    if attempt.status == "running":
                        done = {"attempt_id": attempt.id, "status": "succeeded", "worker": None, "rewards": [1.0]}
                        self.plain(Op(verb="finish", arguments=done))
            self.check(0)
        finally:
            for host in self.hosts:
                host.kill()

    def host(self, number: int) -> Host:
        return self.hosts[number % len(self.hosts)]

    def plain(self, op: Op) -> None:
        expected = self.ledger.apply(op)
        assert self.result_of(op, self.host(0).ask("do", op)) == expected, op

    def result_of(self, op: Op, result: Any) -> Any:
        """The store's result as the ledger has it. Keeps the tokens of claimed attempts."""
        if op.verb != "claim" or not isinstance(result, list):
            return result
        self.seen["attempts"] += len(result)
        given = op.arguments
        for rollout, attempt in result:
            assert (rollout.status, attempt.status, attempt.rollout_id) == ("running", "running", rollout.id)
            assert (attempt.worker, attempt.gateway) == (given["worker"], given["gateway"])
            assert set(rollout.labels) <= set(given["labels"])
            self.tokens[attempt.id] = attempt.token
        return [attempt.id for _, attempt in result]

    def replace(self, number: int, *, killed_after_s: float | None) -> None:
        """End a process, and start another in its place. None: it closes its store first."""
        place = number % len(self.hosts)
        if killed_after_s is None:
            self.hosts[place].close()
        else:
            self.hosts[place].kill(after_s=killed_after_s)
        self.hosts[place] = Host(self.url, exclusive=self.alone)

    def settle(self, *ops: Op) -> None:
        """Repeat heartbeats: records do not show whether they have happened, nor which of two was the last."""
        for op in ops:
            if op.verb == "heartbeat":
                self.plain(op)

    def check(self, reader: int) -> None:
        """The store holds what the ledger holds, and `changes` has told of each rollout that is different now."""
        host = self.host(reader)
        assert host.ask("contents") == self.ledger.contents()
        self.cursor, told = host.ask("changed", self.cursor)
        now = {rollout_id: rollout.status for rollout_id, rollout in self.ledger.rollouts.items()}
        different = {name: status for name, status in now.items() if self.statuses.get(name) != status}
        assert different.items() <= told.items()
        assert told.items() <= now.items()
        self.statuses = now
        for rollout in self.ledger.rollouts.values():
            ended = [attempt.status for attempt in rollout.tries]
            assert ended.count("succeeded") == (rollout.status == "succeeded")
            assert ended.count("running") == (rollout.status == "running")


def play(urls: Iterator[str], *, steps: int) -> Counter[str]:
    """Run the machine for this many steps, each life on the next URL. Returns what has happened."""
    LeaseMachine.urls, LeaseMachine.seen = urls, Counter()
    while (left := steps - LeaseMachine.seen["steps"]) > 0:
        lives = settings(
            max_examples=-(-left // STEPS_PER_LIFE),
            stateful_step_count=STEPS_PER_LIFE,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # a shorter example would take many minutes to find
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        run_state_machine_as_test(LeaseMachine, settings=lives)
    log.info("%s", dict(sorted(LeaseMachine.seen.items())))
    return LeaseMachine.seen


def sqlite_files(folder: Path) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"sqlite://{folder}/{number}.db"


@pytest.mark.timeout(3600)
def test_a_sqlite_store_is_as_exact_as_a_dictionary(tmp_path: Path) -> None:
    seen = play(sqlite_files(tmp_path), steps=STEPS)
    assert seen["steps"] >= STEPS and seen["attempts"] and seen["killed after the commit"]


@pytest.mark.timeout(3600)
def test_a_postgresql_store_is_as_exact_as_a_dictionary(postgres: Postgres) -> None:
    seen = play(iter(postgres.url, None), steps=STEPS)
    assert seen["steps"] >= STEPS and seen["attempts"] and seen["killed after the commit"]
