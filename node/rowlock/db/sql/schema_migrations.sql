-- Which migrations this database has had. Made by the runner after the first one, which makes the
-- roles; every role may read it, since every program checks the version when it starts.
CREATE TABLE IF NOT EXISTS rowlock.schema_migrations (
    version    integer PRIMARY KEY CHECK (version > 0),
    name       text NOT NULL,
    checksum   text NOT NULL CHECK (checksum ~ '^[0-9a-f]{64}$'),
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

GRANT SELECT ON rowlock.schema_migrations
    TO rowlock_node, rowlock_operator, rowlock_admin, rowlock_reader;
