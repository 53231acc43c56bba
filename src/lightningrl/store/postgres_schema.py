"""The tables of a store in PostgreSQL: those of `schema`, in the types of PostgreSQL, and how older ones become newer.

Each run has a schema of its own. Text has the collation "C", so it is compared byte by byte, as in SQLite.
"""

from typing import LiteralString

from lightningrl.errors import UserError
from lightningrl.store.connection import Connection

MIGRATIONS: tuple[LiteralString, ...] = (
    """
    CREATE TABLE inputs (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, digest bytea NOT NULL UNIQUE,
        input text COLLATE "C" NOT NULL
    );
    CREATE TABLE rollouts (
        seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text COLLATE "C" NOT NULL UNIQUE,
        group_id text COLLATE "C" NOT NULL, task_id text COLLATE "C" NOT NULL,
        input_id bigint NOT NULL REFERENCES inputs (id), split text COLLATE "C" NOT NULL, status text NOT NULL,
        max_attempts bigint NOT NULL, timeout_s double precision NOT NULL, sampling text NOT NULL,
        accepted bigint, labels text COLLATE "C" NOT NULL, changed bigint NOT NULL
    );
    CREATE TABLE attempts (
        seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, rollout bigint NOT NULL REFERENCES rollouts (seq),
        number bigint NOT NULL, token bytea NOT NULL UNIQUE, status text NOT NULL, worker text NOT NULL,
        gateway text NOT NULL, lease_until double precision NOT NULL, boot bytea, lease_ticks double precision,
        error text, output text, started_at double precision NOT NULL, ended_at double precision,
        UNIQUE (rollout, number)
    );
    CREATE TABLE kinds (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL, agent text NOT NULL,
        policy text NOT NULL, dialect text NOT NULL, finish_reason text NOT NULL, capture text NOT NULL,
        sampling text NOT NULL
    );
    CREATE UNIQUE INDEX kinds_by_value
        ON kinds (md5(name), md5(agent), md5(policy), dialect, finish_reason, capture, md5(sampling));
    CREATE TABLE calls (
        seq bigint PRIMARY KEY, attempt bigint NOT NULL REFERENCES attempts (seq),
        idx bigint NOT NULL, kind bigint NOT NULL, base bigint, shared bigint NOT NULL, head bigint NOT NULL,
        tail bigint NOT NULL, policy_version bigint NOT NULL, max_tokens bigint, started_at double precision NOT NULL,
        ended_at double precision NOT NULL, continues boolean NOT NULL, id text, ids bytea NOT NULL,
        logprobs bytea NOT NULL, blocks text, body bytea NOT NULL, seed numeric, capture_reason text, request_id text,
        UNIQUE (attempt, idx)
    );
    ALTER TABLE calls ALTER ids SET STORAGE EXTERNAL, ALTER logprobs SET STORAGE EXTERNAL,
        ALTER body SET STORAGE EXTERNAL;
    CREATE TABLE rewards (
        seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, attempt bigint NOT NULL REFERENCES attempts (seq),
        call bigint REFERENCES calls (seq), name text NOT NULL, value double precision NOT NULL, source text NOT NULL
    );
    CREATE TABLE spans (
        seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, attempt bigint NOT NULL REFERENCES attempts (seq),
        id text NOT NULL, call bigint REFERENCES calls (seq), kind text NOT NULL, name text NOT NULL,
        status text NOT NULL, error text, input text, output text, started_at double precision NOT NULL,
        ended_at double precision NOT NULL, trace text NOT NULL, parent text, attributes text NOT NULL,
        UNIQUE (attempt, trace, id)
    );
    CREATE TABLE weights (
        policy text NOT NULL, version bigint NOT NULL, uri text NOT NULL, kind text NOT NULL,
        PRIMARY KEY (policy, version)
    );
    CREATE INDEX rollouts_by_group ON rollouts (group_id);
    CREATE INDEX rollouts_queued ON rollouts (labels, seq) WHERE status = 'queued';
    CREATE INDEX rollouts_by_change ON rollouts (changed);
    CREATE INDEX attempts_running ON attempts (lease_until) WHERE status = 'running';
    CREATE INDEX attempts_by_worker ON attempts (worker, gateway) WHERE status = 'running';
    CREATE INDEX rewards_by_attempt ON rewards (attempt);
    CREATE VIEW whole_rollouts AS
        SELECT rollouts.*, inputs.input AS task_input, rollouts.id || '.' || accepted AS accepted_attempt_id
        FROM rollouts JOIN inputs ON inputs.id = rollouts.input_id;
    CREATE VIEW whole_attempts AS
        SELECT attempts.*, rollouts.id || '.' || number AS id, rollouts.id AS rollout_id
        FROM attempts JOIN rollouts ON rollouts.seq = attempts.rollout;
    """,
    """
    ALTER TABLE rollouts ADD COLUMN branch text COLLATE "C";
    ALTER TABLE calls ADD COLUMN replays text COLLATE "C";
    DROP VIEW whole_rollouts;
    CREATE VIEW whole_rollouts AS
        SELECT rollouts.*, inputs.input AS task_input, rollouts.id || '.' || accepted AS accepted_attempt_id
        FROM rollouts JOIN inputs ON inputs.id = rollouts.input_id;
    """,
)
"""A migration may not be changed once it was released. `version` has one row."""


def version_of(connection: Connection, schema: str) -> int:
    """The version of a schema; 0: it has no store. Raises `UserError` if it is newer than this program."""
    named = "SELECT count(*) FROM information_schema.tables WHERE table_schema = ? AND table_name = 'version'"
    if not connection.execute(named, (schema,)).fetchone()[0]:
        return 0
    (version,) = connection.execute("SELECT number FROM version").fetchone()
    if version > len(MIGRATIONS):
        raise UserError(
            f"the store has schema `{version}`, this program knows `{len(MIGRATIONS)}`",
            hint="use the LightningRL that wrote it",
        )
    return version


def migrate(connection: Connection, schema: str) -> None:
    """Create the schema, or migrate it to the newest version. Runs in the transaction that the caller has begun."""
    connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
    version = version_of(connection, schema)
    if not version:
        connection.execute("CREATE TABLE version (number bigint NOT NULL)")
        connection.execute("INSERT INTO version VALUES (0)")
    for script in MIGRATIONS[version:]:
        connection.execute(script)
    connection.execute("UPDATE version SET number = ?", (len(MIGRATIONS),))
