"""What must be true of the tables whatever happened: watched by triggers, or counted at the end."""

from __future__ import annotations

from typing import Any, Final, LiteralString

from psycopg import sql

from tests.support.builders import Scene

TABLES: Final[dict[str, LiteralString]] = {
    "node": "batch_nodes",
    "partition": "batch_partitions",
    "execution": "batch_job_coordination",
}

_WATCH: Final[LiteralString] = """
CREATE UNLOGGED TABLE public.moves (kind text, was text, became text);
GRANT INSERT ON public.moves TO PUBLIC;

-- A row that has ended never changes again, in no column; of a removed node only the status is kept.
CREATE FUNCTION public.watch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO public.moves VALUES (TG_ARGV[0], NULL, NEW.status);
        RETURN NULL;
    END IF;
    IF TG_ARGV[0] <> 'node' THEN
        -- But for a person's word on it, which stands beside what happened.
        IF OLD.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED')
           AND to_jsonb(OLD) - 'resolution' <> to_jsonb(NEW) - 'resolution' THEN
            RAISE EXCEPTION 'a terminal % was changed: % to %', TG_ARGV[0], OLD, NEW;
        END IF;
    END IF;
    IF OLD.status IS DISTINCT FROM NEW.status THEN
        INSERT INTO public.moves VALUES (TG_ARGV[0], OLD.status, NEW.status);
    END IF;
    RETURN NULL;
END
$$;
"""


def watch(scene: Scene) -> None:
    """Record every move from now on, and refuse any change of a row that has ended."""
    scene.admin.execute(_WATCH)
    for kind, table in TABLES.items():
        scene.admin.execute(
            sql.SQL(
                "CREATE TRIGGER watch AFTER INSERT OR UPDATE ON rowlock.{}"
                " FOR EACH ROW EXECUTE FUNCTION public.watch({})"
            ).format(sql.Identifier(table), sql.Literal(kind))
        )


def moves(scene: Scene) -> set[tuple[str, str | None, str]]:
    """The moves seen since `watch`: what kind of row, from where, to where."""
    rows = scene.all("SELECT DISTINCT kind, was, became FROM public.moves")
    return {(row.kind, row.was, row.became) for row in rows}


ORPHANS: Final[LiteralString] = """
SELECT p.* FROM rowlock.batch_partitions p
LEFT JOIN rowlock.batch_nodes n ON n.node_id = p.assigned_node AND n.status <> 'REMOVED'
WHERE p.status = 'CLAIMED' AND n.node_id IS NULL
"""
"""Partitions CLAIMED by a node that is REMOVED or absent."""

MISCOUNTED: Final[LiteralString] = """
SELECT e.execution_id, e.status, e.counts, r.*, c.* FROM rowlock.batch_job_coordination e
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE status = 'COMPLETED') AS completed,
           count(*) FILTER (WHERE status = 'FAILED') AS failed,
           count(*) FILTER (WHERE status = 'CANCELLED') AS cancelled,
           e.carried + count(*) AS total
      FROM rowlock.batch_partitions p WHERE p.execution_id = e.execution_id) r
CROSS JOIN LATERAL (
    SELECT coalesce(sum(completed), 0) AS n_completed, coalesce(sum(failed), 0) AS n_failed,
           coalesce(sum(cancelled), 0) AS n_cancelled
      FROM rowlock.batch_counts c WHERE c.execution_id = e.execution_id) c
WHERE (completed, failed, cancelled) IS DISTINCT FROM (n_completed, n_failed, n_cancelled)
   OR (e.counts IS NOT NULL AND e.total IS NOT NULL
       AND e.counts IS DISTINCT FROM jsonb_build_object('total', r.total, 'completed', e.carried + completed,
                                                        'failed', failed, 'cancelled', cancelled))
   OR (e.total IS NOT NULL AND r.total <> e.total)
   OR (e.status = 'COMPLETED' AND e.carried + completed + failed <> e.total)
"""
"""Executions whose counters, or whose final counts, are not what a recount of their rows says. What
executions before have completed counts as completed."""

LIVE_AFTER_THE_END: Final[LiteralString] = """
SELECT p.execution_id, p.partition_key, p.status, e.status AS ended
  FROM rowlock.batch_partitions p JOIN rowlock.batch_job_coordination e USING (execution_id)
 WHERE p.status IN ('PENDING', 'CLAIMED') AND e.ended_at IS NOT NULL
"""
"""Partitions that wait or run in an execution that is over."""


def orphans(scene: Scene) -> list[Any]:  # Any: rows
    """Partitions CLAIMED by a node that is REMOVED or absent."""
    return scene.all(ORPHANS)


def miscounted(scene: Scene) -> list[Any]:  # Any: rows
    """Executions whose counters, or whose final counts, are not what a recount of their rows says."""
    return scene.all(MISCOUNTED)


def deadlocks(scene: Scene) -> int:
    """How many deadlocks the server has found in this database."""
    scene.admin.execute("SELECT pg_stat_force_next_flush()")
    found = scene.one(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = %s", scene.database.name
    )
    return int(found.deadlocks)
