-- What people and programs may read, and who may do what. The table in docs/protocol.md says the
-- same, and a test compares the two with the catalogue.
SET LOCAL ROLE rowlock_owner;
SET LOCAL search_path = rowlock, pg_temp;

CREATE VIEW rowlock.nodes AS
SELECT n.node_id, n.name, n.pool, n.status, n.draining, n.slots, n.load, n.beat, n.heartbeat_at,
       extract(epoch FROM rowlock.now() - n.heartbeat_at)::double precision AS heartbeat_age_seconds,
       n.started_at, n.jobs, n.only_execution, n.labels, n.orphans, n.version, n.removed_at, n.removed_reason,
       n.evidence, coalesce(c.claims, 0) AS claims
FROM rowlock.batch_nodes n
LEFT JOIN (
    SELECT p.assigned_node, count(*) AS claims FROM rowlock.batch_partitions p
    WHERE p.status = 'CLAIMED' GROUP BY p.assigned_node) c ON c.assigned_node = n.node_id;

-- Of a live execution, nothing here reads a row for each partition: what has ended is in the counters, and what is
-- claimed is in an index that holds nothing else.
CREATE VIEW rowlock.executions AS
SELECT e.execution_id, e.exec_no, e.job_name, e.instance_key, e.status, e.pool, e.priority, e.delivery,
       e.total, p.completed, p.failed, p.cancelled, e.step, e.master_node, e.master_epoch, m.name AS master_name,
       e.cancel_requested, e.failure_reason, e.failure_message, e.parameters, e.summary, e.policy,
       e.contract_hash, e.launch_key, e.requester, e.requested_at, e.adopt_after, e.started_at, e.ended_at, e.revision,
       rowlock.now() AS read_at,
       e.suspended, l.parallelism, e.deadline_at, e.restart_of, e.carried, e.deletion_policy,
       held.running, held.nodes, p.retried, p.skipped,
       CASE WHEN e.ended_at IS NOT NULL THEN 0
            ELSE greatest(e.total - p.completed - p.failed - p.cancelled - held.running, 0) END AS pending
FROM rowlock.batch_job_coordination e
LEFT JOIN rowlock.batch_nodes m ON m.node_id = e.master_node
LEFT JOIN rowlock.batch_limits l ON l.execution_id = e.execution_id
CROSS JOIN LATERAL (
    SELECT coalesce((e.counts ->> 'completed')::bigint, e.carried + coalesce(sum(c.completed), 0)::bigint) AS completed,
           coalesce((e.counts ->> 'failed')::bigint, sum(c.failed)::bigint, 0) AS failed,
           coalesce((e.counts ->> 'cancelled')::bigint, sum(c.cancelled)::bigint, 0) AS cancelled,
           coalesce(sum(c.retried)::bigint, 0) AS retried, coalesce(sum(c.skipped)::bigint, 0) AS skipped
    FROM rowlock.batch_counts c WHERE c.execution_id = e.execution_id) p
CROSS JOIN LATERAL (
    SELECT count(*) AS running, count(DISTINCT c.assigned_node) AS nodes
    FROM rowlock.batch_partitions c
    WHERE c.execution_id = e.execution_id AND c.status = 'CLAIMED' AND e.ended_at IS NULL) held;

CREATE VIEW rowlock.partitions AS
SELECT p.id, p.execution_id, p.step, p.partition_key, p.status, p.assigned_node, n.name AS node_name,
       p.claim_token, p.claims, p.failures, p.lost, p.alone, p.delivery, p.ready, p.available_at, p.weight,
       p.slice, p.checkpoint, p.result, p.last_error, p.claimed_at, p.started_at, p.ended_at, p.resolution,
       p.counters - 'told' AS counters
FROM rowlock.batch_partitions p
LEFT JOIN rowlock.batch_nodes n ON n.node_id = p.assigned_node;

CREATE VIEW rowlock.events AS
SELECT v.id, v.at, v.event, v.execution_id, v.partition_id, p.partition_key, v.node_id, n.name AS node_name,
       v.actor, v.detail
FROM rowlock.batch_events v
LEFT JOIN rowlock.batch_partitions p ON p.id = v.partition_id
LEFT JOIN rowlock.batch_nodes n ON n.node_id = v.node_id;

CREATE VIEW rowlock.jobs AS
SELECT c.job_name, c.contract_hash, c.delivery, c.policy, c.schemas, c.published_at,
       (SELECT count(*) FROM rowlock.batch_nodes n
        WHERE n.status = 'ACTIVE' AND n.jobs -> c.job_name ? c.contract_hash) AS nodes
FROM rowlock.batch_contracts c;

CREATE VIEW rowlock.starts AS
SELECT s.job_name, s.instance_key, s.step, s.partition_key, s.execution_id, s.node_id, s.started_at, s.evidence
FROM rowlock.batch_starts s;

CREATE VIEW rowlock.locks AS
SELECT l.name, l.acquired_at, p.execution_id, l.partition_id, p.partition_key, p.assigned_node, n.name AS node_name
FROM rowlock.batch_locks l
JOIN rowlock.batch_partitions p
    ON p.id = l.partition_id AND p.claim_token = l.claim_token AND p.status = 'CLAIMED'
LEFT JOIN rowlock.batch_nodes n ON n.node_id = p.assigned_node;

-- What waits and runs, by pool: asked every few seconds by who draws curves or scales pools. As in the view of
-- executions nothing reads a row for each partition. How long the oldest waits is asked of the first and of the
-- last in line: what was never claimed is at the end, what comes again at the front.
CREATE VIEW rowlock.pools AS
WITH waiting AS MATERIALIZED (
    SELECT e.pool, e.status, e.suspended, held.claimed, delayed.number AS delayed, line.since,
           held.claimed >= coalesce(l.parallelism, held.claimed + 1) AS limited,
           greatest(e.total - e.carried - c.ended - held.claimed - delayed.number, 0) AS ready,
           -- Only nodes with slots in its pool serve partitions that wait; any node that knows the job, the rest.
           NOT e.suspended
           AND (e.status <> 'RUNNING' OR line.since IS NOT NULL OR delayed.number > 0)
           AND NOT EXISTS (
               SELECT FROM rowlock.batch_nodes n
               WHERE n.status = 'ACTIVE' AND NOT n.draining
                 AND rowlock.now() - n.heartbeat_at < interval '30 s'
                 AND n.jobs -> e.job_name ? e.contract_hash
                 AND (n.only_execution IS NULL OR n.only_execution = e.execution_id)
                 AND (e.status <> 'RUNNING' OR n.pool = e.pool AND n.slots > 0)) AS unserved
    FROM rowlock.batch_job_coordination e
    LEFT JOIN rowlock.batch_limits l ON l.execution_id = e.execution_id
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(c.completed + c.failed + c.cancelled), 0)::bigint AS ended
        FROM rowlock.batch_counts c WHERE c.execution_id = e.execution_id) c
    CROSS JOIN LATERAL (
        SELECT count(*) AS claimed FROM rowlock.batch_partitions p
        WHERE p.execution_id = e.execution_id AND p.status = 'CLAIMED') held
    CROSS JOIN LATERAL (
        SELECT count(*) AS number FROM (  -- so many of one execution are many
            SELECT FROM rowlock.batch_partitions p
            WHERE p.execution_id = e.execution_id AND p.status = 'PENDING' AND NOT p.ready
            ORDER BY p.id LIMIT 10000) d) delayed
    CROSS JOIN LATERAL (SELECT least(
        (SELECT p.available_at FROM rowlock.batch_partitions p
         WHERE p.execution_id = e.execution_id AND p.status = 'PENDING' AND p.ready AND NOT p.alone
         ORDER BY -p.weight::bigint, p.id LIMIT 1),
        (SELECT p.available_at FROM rowlock.batch_partitions p
         WHERE p.execution_id = e.execution_id AND p.status = 'PENDING' AND p.ready AND NOT p.alone
         ORDER BY -p.weight::bigint DESC, p.id DESC LIMIT 1),
        (SELECT p.available_at FROM rowlock.batch_partitions p
         WHERE p.execution_id = e.execution_id AND p.status = 'PENDING' AND p.ready AND p.alone
         ORDER BY p.id LIMIT 1)) AS since) line
    WHERE e.status NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED')
), work AS (
    SELECT w.pool,
           count(*) FILTER (WHERE w.status = 'REQUESTED') AS requested,
           count(*) FILTER (WHERE w.status = 'PLANNING') AS planning,
           count(*) FILTER (WHERE w.status = 'RUNNING') AS running,
           count(*) FILTER (WHERE w.status = 'CLOSING') AS closing,
           count(*) FILTER (WHERE w.status = 'FINISHING') AS finishing,
           count(*) FILTER (WHERE w.unserved) AS unserved,
           bool_and(w.suspended) AS paused,
           sum(w.claimed) AS claimed,
           sum(w.delayed) FILTER (WHERE w.status = 'RUNNING') AS delayed,
           sum(w.ready) FILTER (WHERE w.status = 'RUNNING' AND w.suspended) AS suspended,
           sum(w.ready) FILTER (WHERE w.status = 'RUNNING' AND NOT w.suspended AND w.limited) AS limited,
           -- Counters lag behind the rows by what is being written: nothing waits where no row does.
           sum(greatest(w.ready, 1)) FILTER (
               WHERE w.status = 'RUNNING' AND NOT w.suspended AND NOT w.limited AND w.since IS NOT NULL) AS pending,
           extract(epoch FROM rowlock.now() - min(w.since) FILTER (
               WHERE w.status = 'RUNNING' AND NOT w.suspended AND NOT w.limited)) AS waited
    FROM waiting w GROUP BY w.pool
), crew AS (
    -- Nodes without slots drive executions and claim nothing; they may be lost like the others. A node that
    -- has been silent for so long was lost when nobody was left to mark it.
    SELECT n.pool,
           count(*) FILTER (WHERE n.slots > 0 AND NOT n.lost) AS active,
           count(*) FILTER (WHERE n.slots > 0 AND n.lost) AS unreachable,
           count(*) FILTER (WHERE n.draining AND n.slots > 0) AS draining,
           sum(n.slots) FILTER (WHERE NOT n.lost AND NOT n.draining) AS slots,
           max(n.silent) AS silent
    FROM (SELECT n.pool, n.slots, n.draining, s.silent, n.status = 'UNREACHABLE' OR s.silent > 30 AS lost
          FROM rowlock.batch_nodes n
          CROSS JOIN LATERAL (SELECT extract(epoch FROM rowlock.now() - n.heartbeat_at) AS silent) s
          WHERE n.status <> 'REMOVED') n
    GROUP BY n.pool
)
SELECT pool,
       coalesce(w.pending, 0)::bigint AS pending, coalesce(w.delayed, 0)::bigint AS delayed,
       coalesce(w.suspended, 0)::bigint AS suspended, coalesce(w.limited, 0)::bigint AS limited,
       coalesce(w.claimed, 0)::bigint AS claimed,
       greatest(w.waited, 0)::double precision AS oldest_pending_seconds,
       coalesce(w.paused, false) AS paused,
       coalesce(w.requested, 0) AS requested, coalesce(w.planning, 0) AS planning,
       coalesce(w.running, 0) AS running, coalesce(w.closing, 0) AS closing,
       coalesce(w.finishing, 0) AS finishing, coalesce(w.unserved, 0) AS unserved,
       coalesce(c.active, 0) AS nodes_active, coalesce(c.unreachable, 0) AS nodes_unreachable,
       coalesce(c.draining, 0) AS nodes_draining, coalesce(c.slots, 0) AS slots,
       greatest(c.silent, 0)::double precision AS silent_seconds
FROM work w FULL JOIN crew c USING (pool);

CREATE VIEW rowlock.endings AS
SELECT e.execution_id, e.pool, e.job_name, e.status, e.ended_at
FROM rowlock.batch_job_coordination e WHERE e.ended_at IS NOT NULL;

-- Views are readable by everybody who has a role here; now() stands in three of them.
GRANT SELECT ON rowlock.nodes, rowlock.executions, rowlock.partitions, rowlock.events, rowlock.jobs, rowlock.starts,
                rowlock.pools, rowlock.endings, rowlock.locks
    TO rowlock_node, rowlock_operator, rowlock_admin, rowlock_reader;
GRANT EXECUTE ON FUNCTION rowlock.now(), rowlock.server() TO rowlock_node, rowlock_operator, rowlock_admin, rowlock_reader;

-- A node changes rows only through the moves of the protocol.
GRANT EXECUTE ON FUNCTION
    rowlock.register(uuid, text, text, integer, jsonb, uuid, jsonb, text),
    rowlock.connected(uuid, text, integer, bigint),
    rowlock.publish_contract(text, text, jsonb, jsonb, text),
    rowlock.beat(uuid, integer, boolean, jsonb, uuid[], boolean),
    rowlock.notice_server(uuid),
    rowlock.mark_unreachable(uuid, uuid, bigint),
    rowlock.remove_node(uuid, uuid, bigint),
    rowlock.recover_by_evidence(uuid, uuid, bigint),
    rowlock.recover(uuid),
    rowlock.deregister(uuid, text),
    rowlock.promote(integer),
    rowlock.claim(uuid, integer, integer, boolean, bigint, jsonb),
    rowlock.passed(uuid, double precision),
    rowlock.complete(uuid, bigint[], uuid[], jsonb[]),
    rowlock.fail(uuid, bigint, uuid, jsonb, text, double precision),
    rowlock.release(uuid, bigint[], uuid[], boolean, boolean),
    rowlock.checkpoint(uuid, bigint, uuid, jsonb),
    rowlock.report(uuid, bigint[], uuid[], jsonb[]),
    rowlock.acquire_lock(uuid, bigint, uuid, text, bigint),
    rowlock.release_lock(uuid, text, bigint),
    rowlock.claims_of(uuid),
    rowlock.record_evidence(bigint, uuid, jsonb),
    rowlock.adopt(uuid, uuid),
    rowlock.resign(uuid, uuid, bigint),
    rowlock.masterships_of(uuid),
    rowlock.cluster(text),
    rowlock.stage(uuid, bigint, integer, text[], jsonb[], integer[]),
    rowlock.seal(uuid, bigint, text, bigint),
    rowlock.advance(uuid, uuid, bigint),
    rowlock.fail_plan(uuid, uuid, bigint, text, text),
    rowlock.finish(uuid, bigint, jsonb, text, text),
    rowlock.results(uuid, bigint, integer),
    rowlock.execution_of(uuid),
    rowlock.fence_open(bigint, uuid),
    rowlock.fence_open_finish(uuid, bigint),
    rowlock.fence_arm(bigint, text, jsonb),
    rowlock.stranded_sessions()
TO rowlock_node;

GRANT EXECUTE ON FUNCTION
    rowlock.request_execution(uuid, text, text, jsonb, text, text, text, jsonb, text, integer,
                              double precision, jsonb, jsonb),
    rowlock.restart(uuid, uuid, text, double precision, text, text, jsonb),
    rowlock.request_cancel(uuid, text, text),
    rowlock.cancel(uuid, text, text),
    rowlock.suspend(uuid, text, text),
    rowlock.resume(uuid, text, text),
    rowlock.set_limits(uuid, jsonb, text, text),
    rowlock.expire(text)
TO rowlock_node, rowlock_operator, rowlock_admin;

GRANT EXECUTE ON FUNCTION
    rowlock.retain(double precision, double precision, double precision, integer)
TO rowlock_node, rowlock_admin;

GRANT EXECUTE ON FUNCTION
    rowlock.abandon(uuid, text, text),
    rowlock.resolve(uuid, text, text, jsonb, boolean, text, text, text)
TO rowlock_admin;

-- A session keeps the plans that it has once made. One that was made while there were ten partitions reads the
-- table from its beginning to its end, and does so still when there are a million, until somebody analyzes the table
-- (tried: 300,000 rows planned for nodes that had run five: 44 ms a claim, 36 a completion, for a minute; 0.4 and 0.3
-- so). Every path of ours goes by an index, so none depends on when it was planned. JIT goes by the estimated cost,
-- which a forbidden scan makes enormous.
DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOR v_function IN
        SELECT p.oid FROM pg_proc p
        WHERE p.pronamespace = 'rowlock'::regnamespace AND p.prosecdef
          AND p.prosrc ~ 'batch_partitions|rowlock\.executions'  -- or the view that reads them
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET enable_seqscan = off SET jit = off', v_function);
    END LOOP;
END
$$;

RESET search_path;
RESET ROLE;
