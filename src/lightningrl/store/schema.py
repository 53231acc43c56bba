"""What the tables look like, and how an older file becomes a newer one: migrations in order, counted by `user_version`.

A call's prompt is kept as (base call, shared length, delta): `shared` leading ids are those of the base call's prompt and completion,
the rest is in `prompt_delta`. The base is the parent where there is one, else the attempt's latest call. A task's input is kept once,
however many rollouts it has.
"""

import sqlite3
from typing import LiteralString

from lightningrl.errors import UserError

MIGRATIONS: tuple[LiteralString, ...] = (
    """
    CREATE TABLE inputs (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, input TEXT NOT NULL);
    CREATE TABLE rollouts (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, group_id TEXT NOT NULL,
        task_id TEXT NOT NULL, input_id INTEGER NOT NULL REFERENCES inputs (id), split TEXT NOT NULL,
        status TEXT NOT NULL, max_attempts INTEGER NOT NULL, timeout_s REAL NOT NULL,
        sampling TEXT NOT NULL, accepted_attempt_id TEXT
    );
    CREATE VIEW whole_rollouts AS SELECT rollouts.*, inputs.input AS task_input FROM rollouts JOIN inputs ON inputs.id = rollouts.input_id;
    CREATE INDEX rollouts_by_group ON rollouts (group_id);
    CREATE INDEX rollouts_queued ON rollouts (seq) WHERE status = 'queued';
    CREATE TABLE attempts (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, rollout_id TEXT NOT NULL REFERENCES rollouts (id),
        number INTEGER NOT NULL, token TEXT NOT NULL UNIQUE, status TEXT NOT NULL, worker TEXT NOT NULL,
        lease_until REAL NOT NULL, error TEXT, output TEXT, started_at REAL NOT NULL, ended_at REAL,
        UNIQUE (rollout_id, number)
    );
    CREATE INDEX attempts_running ON attempts (lease_until) WHERE status = 'running';
    CREATE TABLE calls (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, attempt_id TEXT NOT NULL REFERENCES attempts (id),
        idx INTEGER NOT NULL, parent_call_id TEXT, agent TEXT NOT NULL, policy TEXT NOT NULL, policy_version INTEGER NOT NULL,
        dialect TEXT NOT NULL, request TEXT NOT NULL, response TEXT NOT NULL,
        base_call_id TEXT, shared INTEGER NOT NULL, prompt_delta BLOB NOT NULL, completion_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
        sampling TEXT NOT NULL, finish_reason TEXT NOT NULL, capture TEXT NOT NULL, capture_reason TEXT,
        started_at REAL NOT NULL, ended_at REAL NOT NULL, UNIQUE (attempt_id, idx)
    );
    CREATE TABLE rewards (
        seq INTEGER PRIMARY KEY, attempt_id TEXT NOT NULL REFERENCES attempts (id), call_id TEXT REFERENCES calls (id),
        name TEXT NOT NULL, value REAL NOT NULL, source TEXT NOT NULL
    );
    CREATE INDEX rewards_by_attempt ON rewards (attempt_id);
    CREATE TABLE weights (
        policy TEXT NOT NULL, version INTEGER NOT NULL, uri TEXT NOT NULL, kind TEXT NOT NULL,
        PRIMARY KEY (policy, version)
    ) WITHOUT ROWID;
    """,
)


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the database up to the newest schema, one transaction for each step."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise UserError(f"the store has schema `{version}`, this program knows `{len(MIGRATIONS)}`", hint="use the LightningRL that wrote it")
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")
