-- What people and programs may read, and who may do what. The table in docs/protocol.md says the
-- same, and a test compares the two with the catalogue.
SET LOCAL ROLE rowlock_owner;
SET LOCAL search_path = rowlock, pg_temp;

CREATE VIEW rowlock.nodes AS
SELECT n.node_id, n.name, n.pool, n.status, n.draining, n.slots, n.load, n.beat, n.heartbeat_at,
       extract(epoch FROM rowlock.now() - n.heartbeat_at)::double precision AS heartbeat_age_seconds,
       n.started_at, n.jobs, n.only_execution, n.labels, n.orphans, n.version, n.removed_at, n.removed_reason,
       coalesce(c.claims, 0) AS claims
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
       held.running, held.nodes, p.retried,
       CASE WHEN e.ended_at IS NOT NULL THEN 0
            ELSE greatest(e.total - p.completed - p.failed - p.cancelled - held.running, 0) END AS pending
FROM rowlock.batch_job_coordination e
LEFT JOIN rowlock.batch_nodes m ON m.node_id = e.master_node
LEFT JOIN rowlock.batch_limits l ON l.execution_id = e.execution_id
CROSS JOIN LATERAL (
    SELECT coalesce((e.counts ->> 'completed')::bigint, e.carried + coalesce(sum(c.completed), 0)::bigint) AS completed,
           coalesce((e.counts ->> 'failed')::bigint, sum(c.failed)::bigint, 0) AS failed,
           coalesce((e.counts ->> 'cancelled')::bigint, sum(c.cancelled)::bigint, 0) AS cancelled,
           coalesce(sum(c.retried)::bigint, 0) AS retried
    FROM rowlock.batch_counts c WHERE c.execution_id = e.execution_id) p
CROSS JOIN LATERAL (
    SELECT count(*) AS running, count(DISTINCT c.assigned_node) AS nodes
    FROM rowlock.batch_partitions c
    WHERE c.execution_id = e.execution_id AND c.status = 'CLAIMED' AND e.ended_at IS NULL) held;

CREATE VIEW rowlock.partitions AS
SELECT p.id, p.execution_id, p.step, p.partition_key, p.status, p.assigned_node, n.name AS node_name,
       p.claim_token, p.claims, p.failures, p.lost, p.alone, p.delivery, p.ready, p.available_at, p.weight,
       p.slice, p.checkpoint, p.result, p.last_error, p.claimed_at, p.started_at, p.ended_at, p.resolution
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

-- Views are readable by everybody who has a role here; now() stands in two of them.
GRANT SELECT ON rowlock.nodes, rowlock.executions, rowlock.partitions, rowlock.events, rowlock.jobs, rowlock.starts
    TO rowlock_node, rowlock_operator, rowlock_admin, rowlock_reader;
GRANT EXECUTE ON FUNCTION rowlock.now() TO rowlock_node, rowlock_operator, rowlock_admin, rowlock_reader;

-- A node changes rows only through the moves of the protocol.
GRANT EXECUTE ON FUNCTION
    rowlock.register(uuid, text, text, integer, jsonb, uuid, jsonb, text),
    rowlock.publish_contract(text, text, jsonb, jsonb, text),
    rowlock.beat(uuid, integer, boolean, jsonb, uuid[]),
    rowlock.mark_unreachable(uuid, uuid, bigint),
    rowlock.remove_node(uuid, uuid, bigint),
    rowlock.recover(uuid),
    rowlock.deregister(uuid, text),
    rowlock.promote(integer),
    rowlock.claim(uuid, integer, integer, boolean, bigint),
    rowlock.complete(uuid, bigint[], uuid[], jsonb[]),
    rowlock.fail(uuid, bigint, uuid, jsonb, text, double precision),
    rowlock.release(uuid, bigint[], uuid[], boolean),
    rowlock.checkpoint(uuid, bigint, uuid, jsonb),
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

RESET search_path;
RESET ROLE;
