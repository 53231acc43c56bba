"""The tables of a store, and how an older file becomes a newer one: migrations in order, counted by `user_version`.

Nothing that repeats is stored twice:

- A call is a difference to its base, an earlier call. `calls` has an example, `recent` chooses the base.
- One row of `kinds` holds the fields that many calls share: agent, policy, dialect, sampling and others.
- One row of `inputs` holds the input of a task, for all its rollouts.
- Rows refer to each other by number. The views put the id of an attempt together: its rollout's id and its number.

Columns that need a word:

    calls.ended_at                   an integer n: the n-th float64 after `started_at`. Exact, and half as long
    attempts.token                   SHA-256 of the token
    attempts.boot, lease_ticks       when the lease passes, see `lease`
    rollouts.labels                  JSON; "" without labels
    rollouts.branch                  JSON: [attempt id, call id]; NULL without a branch
    calls.replays                    the id of a call of another attempt, which may be in another store
    rollouts.changed                 numbers the changes of status in the order of their commits; the latest is greatest
"""

import base64
import sqlite3
from typing import LiteralString

from lightningrl.errors import UserError
from lightningrl.types import hash_token

MIGRATIONS: tuple[LiteralString, ...] = (
    """
    CREATE TABLE inputs (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, input TEXT NOT NULL);
    CREATE TABLE rollouts (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, group_id TEXT NOT NULL,
        task_id TEXT NOT NULL, input_id INTEGER NOT NULL REFERENCES inputs (id), split TEXT NOT NULL,
        status TEXT NOT NULL, max_attempts INTEGER NOT NULL, timeout_s REAL NOT NULL,
        sampling TEXT NOT NULL, accepted_attempt_id TEXT
    );
    CREATE VIEW whole_rollouts AS SELECT rollouts.*, inputs.input AS task_input
        FROM rollouts JOIN inputs ON inputs.id = rollouts.input_id;
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
        idx INTEGER NOT NULL, parent_call_id TEXT, agent TEXT NOT NULL,
        policy TEXT NOT NULL, policy_version INTEGER NOT NULL,
        dialect TEXT NOT NULL, request TEXT NOT NULL, response TEXT NOT NULL,
        base_call_id TEXT, shared INTEGER NOT NULL,
        prompt_delta BLOB NOT NULL, completion_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
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
    """
    DROP VIEW whole_rollouts;
    ALTER TABLE rewards RENAME TO old_rewards;
    ALTER TABLE calls RENAME TO old_calls;
    ALTER TABLE attempts RENAME TO old_attempts;
    ALTER TABLE rollouts RENAME TO old_rollouts;
    CREATE TABLE rollouts (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, group_id TEXT NOT NULL,
        task_id TEXT NOT NULL, input_id INTEGER NOT NULL REFERENCES inputs (id), split TEXT NOT NULL,
        status TEXT NOT NULL, max_attempts INTEGER NOT NULL, timeout_s REAL NOT NULL,
        sampling TEXT NOT NULL, accepted INTEGER
    );
    CREATE TABLE attempts (
        seq INTEGER PRIMARY KEY, rollout INTEGER NOT NULL REFERENCES rollouts (seq), number INTEGER NOT NULL,
        token NOT NULL UNIQUE, status TEXT NOT NULL, worker TEXT NOT NULL, lease_until REAL NOT NULL,
        error TEXT, output TEXT, started_at REAL NOT NULL, ended_at REAL, UNIQUE (rollout, number)
    );
    CREATE TABLE kinds (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL, agent TEXT NOT NULL, policy TEXT NOT NULL, dialect TEXT NOT NULL,
        finish_reason TEXT NOT NULL, capture TEXT NOT NULL, sampling TEXT NOT NULL,
        UNIQUE (name, agent, policy, dialect, finish_reason, capture, sampling)
    );
    CREATE TABLE calls (
        seq INTEGER PRIMARY KEY, attempt INTEGER NOT NULL REFERENCES attempts (seq),
        idx INTEGER NOT NULL, kind INTEGER NOT NULL, id TEXT,
        base INTEGER, continues INTEGER NOT NULL, shared INTEGER NOT NULL, ids BLOB NOT NULL, logprobs BLOB NOT NULL,
        head INTEGER NOT NULL, tail INTEGER NOT NULL, blocks TEXT, body BLOB NOT NULL,
        policy_version INTEGER NOT NULL, max_tokens INTEGER, seed, capture_reason TEXT,
        started_at REAL NOT NULL, ended_at NOT NULL,
        UNIQUE (attempt, idx)
    );
    CREATE TABLE rewards (
        seq INTEGER PRIMARY KEY, attempt INTEGER NOT NULL REFERENCES attempts (seq),
        call INTEGER REFERENCES calls (seq),
        name TEXT NOT NULL, value REAL NOT NULL, source TEXT NOT NULL
    );
    INSERT INTO rollouts
        SELECT seq, id, group_id, task_id, input_id, split, status, max_attempts, timeout_s, sampling,
            (SELECT number FROM old_attempts WHERE old_attempts.id = accepted_attempt_id)
        FROM old_rollouts;
    INSERT INTO attempts
        SELECT seq, (SELECT seq FROM old_rollouts WHERE old_rollouts.id = rollout_id), number, token, status, worker,
            lease_until, error, output, started_at, ended_at
        FROM old_attempts;
    INSERT INTO kinds (name, agent, policy, dialect, finish_reason, capture, sampling)
        SELECT DISTINCT '', agent, policy, dialect, finish_reason, capture, sampling FROM old_calls;
    INSERT INTO calls
        SELECT seq, (SELECT seq FROM old_attempts WHERE old_attempts.id = attempt_id), idx,
            (SELECT kinds.id FROM kinds WHERE name = '' AND kinds.agent = old.agent AND kinds.policy = old.policy
                AND kinds.dialect = old.dialect AND kinds.finish_reason = old.finish_reason
                AND kinds.capture = old.capture AND kinds.sampling = old.sampling),
            id, (SELECT seq FROM old_calls WHERE old_calls.id = old.base_call_id), parent_call_id IS NOT NULL, shared,
            CAST(x'00' || prompt_delta || completion_ids AS BLOB), logprobs,
            0, 0, NULL, request || char(10) || response, policy_version, NULL, NULL, capture_reason,
            started_at, ended_at
        FROM old_calls AS old;
    INSERT INTO rewards
        SELECT seq, (SELECT seq FROM old_attempts WHERE old_attempts.id = attempt_id),
            (SELECT seq FROM old_calls WHERE old_calls.id = call_id),
            name, value, source
        FROM old_rewards;
    DROP TABLE old_rewards;
    DROP TABLE old_calls;
    DROP TABLE old_attempts;
    DROP TABLE old_rollouts;
    CREATE INDEX rollouts_by_group ON rollouts (group_id);
    CREATE INDEX rollouts_queued ON rollouts (seq) WHERE status = 'queued';
    CREATE INDEX attempts_running ON attempts (lease_until) WHERE status = 'running';
    CREATE INDEX rewards_by_attempt ON rewards (attempt);
    CREATE VIEW whole_rollouts AS
        SELECT rollouts.*, inputs.input AS task_input, rollouts.id || '.' || accepted AS accepted_attempt_id
        FROM rollouts JOIN inputs ON inputs.id = rollouts.input_id;
    CREATE VIEW whole_attempts AS
        SELECT attempts.*, rollouts.id || '.' || number AS id, rollouts.id AS rollout_id
        FROM attempts JOIN rollouts ON rollouts.seq = attempts.rollout;
    """,
    """
    CREATE TABLE spans (
        seq INTEGER PRIMARY KEY, attempt INTEGER NOT NULL REFERENCES attempts (seq), id TEXT NOT NULL,
        call INTEGER REFERENCES calls (seq),
        kind TEXT NOT NULL, name TEXT NOT NULL, status TEXT NOT NULL, error TEXT, input TEXT, output TEXT,
        started_at REAL NOT NULL, ended_at REAL NOT NULL, trace TEXT NOT NULL, parent TEXT, attributes TEXT NOT NULL,
        UNIQUE (attempt, trace, id)
    );
    """,
    """
    ALTER TABLE rollouts ADD COLUMN changed INTEGER NOT NULL DEFAULT 0;
    UPDATE rollouts SET changed = seq;
    CREATE INDEX rollouts_by_change ON rollouts (changed);
    """,
    """
    ALTER TABLE attempts ADD COLUMN boot BLOB;
    ALTER TABLE attempts ADD COLUMN lease_ticks REAL;
    UPDATE attempts SET token = hashed(token);
    """,
    """
    ALTER TABLE rollouts ADD COLUMN labels TEXT NOT NULL DEFAULT '';
    ALTER TABLE attempts ADD COLUMN gateway TEXT NOT NULL DEFAULT '';
    ALTER TABLE calls ADD COLUMN request_id TEXT;
    DROP INDEX rollouts_queued;
    CREATE INDEX rollouts_queued ON rollouts (labels, seq) WHERE status = 'queued';
    DROP INDEX attempts_running;
    CREATE INDEX attempts_running ON attempts (boot, lease_ticks) WHERE status = 'running';
    CREATE INDEX attempts_by_worker ON attempts (worker, gateway) WHERE status = 'running';
    """,
    """
    ALTER TABLE rollouts ADD COLUMN branch TEXT;
    ALTER TABLE calls ADD COLUMN replays TEXT;
    """,
)


def check_version(connection: sqlite3.Connection) -> int:
    """The schema version of the database. Raises `UserError` if it is newer than this program."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise UserError(
            f"the store has schema `{version}`, this program knows `{len(MIGRATIONS)}`",
            hint="use the LightningRL that wrote it",
        )
    return version


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate the database to the newest schema, one transaction for each step."""
    version = check_version(connection)
    connection.create_function("hashed", 1, _hashed, deterministic=True)
    connection.execute("PRAGMA foreign_keys = 0")  # a migration may replace a table that others refer to
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")
    connection.execute("PRAGMA foreign_keys = 1")


def _hashed(token: bytes | str) -> bytes:
    """The hash of a token as older schemas stored it: the bytes of its secret, or its text."""
    text = token if isinstance(token, str) else "lrl-" + base64.urlsafe_b64encode(token).decode()
    return bytes.fromhex(hash_token(text))
