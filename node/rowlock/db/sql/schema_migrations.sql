-- Which migrations this database has had. Made by the runner after the first one, which makes the
-- roles; every role may read it, since every program checks the version when it starts.
CREATE TABLE IF NOT EXISTS rowlock.schema_migrations (
    version    integer PRIMARY KEY CHECK (version > 0),
    name       text NOT NULL,
    checksum   text NOT NULL CHECK (checksum ~ '^[0-9a-f]{64}$'),
    -- Code that knows at least this version may go on with the schema; the highest of all rows counts.
    works_with integer NOT NULL CONSTRAINT nothing_works_with_what_is_to_come
               CHECK (works_with BETWEEN 1 AND version),
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

GRANT SELECT ON rowlock.schema_migrations
    TO rowlock_node, rowlock_operator, rowlock_admin, rowlock_reader;
