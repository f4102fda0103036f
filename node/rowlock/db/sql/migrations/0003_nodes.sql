-- Nodes: register, beat, and the two phases of failure detection with the recovery of claims.
--
-- Lock order everywhere: instance row, execution rows, own node row, limit rows by execution, partition
-- rows by id, batch_starts by key, counter rows by key. Who needs an earlier lock late takes it SKIP LOCKED.
-- A line with "guard:" names a condition that a guarantee rests on; tests weaken each one.
SET LOCAL ROLE rowlock_owner;
SET LOCAL search_path = rowlock, pg_temp;

CREATE FUNCTION rowlock.register(
    p_node uuid, p_name text, p_pool text, p_slots integer, p_jobs jsonb,
    p_only_execution uuid, p_labels jsonb, p_version text
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    INSERT INTO batch_nodes AS n
        (node_id, name, pool, slots, jobs, only_execution, labels, version, heartbeat_at, started_at)
    VALUES (p_node, p_name, p_pool, p_slots, p_jobs, p_only_execution, p_labels, p_version,
            rowlock.now(), rowlock.now())
    -- Again: the first answer was lost. It counts as a beat, because the node counts its lease from it;
    -- and one that was removed meanwhile stays so, which its first beat tells it.
    ON CONFLICT (node_id) DO UPDATE
    SET beat = n.beat + 1, heartbeat_at = excluded.heartbeat_at, status = 'ACTIVE'
    WHERE n.status <> 'REMOVED';
$$;

-- Since when this server has run without a restart or a crash: that is how long its checkpointer lives, while
-- the postmaster outlives a crash of its backends. NULL: we may not read it.
CREATE FUNCTION rowlock._server_runs_since() RETURNS timestamptz
LANGUAGE sql STABLE
AS $$ SELECT a.backend_start FROM pg_catalog.pg_stat_activity a WHERE a.backend_type = 'checkpointer' $$;

-- A node has opened this connection, "beat" or "work". Answers what becomes of its evidence.
-- The announcements of a node are numbered: one that was lost with its connection may arrive after the next.
CREATE FUNCTION rowlock.connected(
    p_node uuid, p_purpose text,
    p_client_pid integer,  -- the backend's pid as the client was told it; NULL: no evidence is wanted
    p_number bigint
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_backend backend;
    v_evidence text;
BEGIN
    SELECT a.pid, a.backend_start, rowlock._server_runs_since() INTO v_backend
    FROM pg_stat_activity a WHERE a.pid = pg_backend_pid();
    v_evidence := CASE
        WHEN p_client_pid IS NULL THEN 'off'
        WHEN p_client_pid <> pg_backend_pid() THEN 'pooler'  -- guard: what a pooler lends and takes proves nothing
        WHEN NOT pg_has_role('pg_read_all_stats', 'USAGE') THEN 'unreadable'
        WHEN v_backend.started_at IS NULL OR v_backend.server_runs_since IS NULL THEN 'hidden'
        ELSE 'on' END;
    IF v_evidence <> 'on' THEN
        v_backend := NULL;
    END IF;
    UPDATE batch_nodes
    SET evidence = v_evidence,
        beat_backend = CASE p_purpose WHEN 'beat' THEN v_backend ELSE beat_backend END,
        work_backend = CASE p_purpose WHEN 'work' THEN v_backend ELSE work_backend END,
        beat_opened = CASE p_purpose WHEN 'beat' THEN p_number ELSE beat_opened END,
        work_opened = CASE p_purpose WHEN 'work' THEN p_number ELSE work_opened END
    WHERE node_id = p_node AND status <> 'REMOVED'
      -- guard: none takes the place of a later one
      AND p_number > CASE p_purpose WHEN 'beat' THEN beat_opened ELSE work_opened END;
    RETURN v_evidence;
END
$$;

CREATE FUNCTION rowlock.publish_contract(
    p_job text, p_hash text, p_schemas jsonb, p_policy jsonb, p_delivery text
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    INSERT INTO batch_contracts AS c (job_name, contract_hash, schemas, policy, delivery, published_at)
    VALUES (p_job, p_hash, p_schemas, p_policy, p_delivery, rowlock.now())
    ON CONFLICT (job_name, contract_hash) DO UPDATE
    SET schemas = excluded.schemas, policy = excluded.policy, delivery = excluded.delivery,
        published_at = excluded.published_at
    WHERE (c.schemas, c.policy, c.delivery)
        IS DISTINCT FROM (excluded.schemas, excluded.policy, excluded.delivery);
$$;

-- Does this node accept the job in this form?
CREATE FUNCTION rowlock._accepts(p_jobs jsonb, p_job text, p_hash text) RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$ SELECT coalesce(p_jobs -> p_job ? p_hash, false) $$;

-- How many more claims the limit of an execution allows; NULL: it has none. A limit that is not settled yet
-- (see set_limits) allows none.
CREATE FUNCTION rowlock._room(p_execution uuid) RETURNS integer
LANGUAGE sql STABLE
AS $$
    SELECT CASE WHEN NOT l.settled THEN 0 ELSE l.parallelism - (
        SELECT count(*) FROM (
            SELECT FROM rowlock.batch_partitions p
            WHERE p.execution_id = l.execution_id AND p.status = 'CLAIMED'
            LIMIT l.parallelism) c)::integer END
    FROM rowlock.batch_limits l WHERE l.execution_id = p_execution
$$;

-- One beat: counts up, speaks for the whole node, waits for no lock but its own row's, and answers
-- with levels, so that a lost answer costs one beat and an idle node asks nothing else.
CREATE FUNCTION rowlock.beat(
    p_node uuid, p_load integer, p_draining boolean, p_orphans jsonb, p_executions uuid[],
    p_look boolean DEFAULT true  -- false: do not look for work that waits; that was slow a moment ago
) RETURNS TABLE (
    alive boolean,        -- false: this incarnation was removed
    claimable boolean,    -- work waits that this node may claim
    adoptable boolean,    -- an execution waits for a master, and this node knows the job
    due boolean,          -- a delayed partition is due (promote), or something that expire does
    unrecovered boolean,  -- a removed node's claims are not all recovered yet
    ended uuid[],         -- of p_executions: those that no longer run (closing or over)
    peers jsonb,          -- [[node_id, beat, status], ...] of all other nodes not removed
    at timestamptz,       -- the database's clock, for people who wonder about a node's
    schema_version integer,     -- so that a node learns within a beat that the schema
    schema_works_with integer   -- has gone on without it
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := rowlock.now();
    v_was text;
    v_pool text;
    v_jobs jsonb;
    v_only uuid;
    v_draining boolean;
BEGIN
    SELECT n.status INTO v_was FROM batch_nodes n
    WHERE n.node_id = p_node AND n.status <> 'REMOVED'  -- guard: a removed incarnation never beats again
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN QUERY SELECT false, false, false, false, false, '{}'::uuid[], '[]'::jsonb, v_now, 0, 0;
        RETURN;
    END IF;
    UPDATE batch_nodes n
    SET beat = n.beat + 1, heartbeat_at = v_now, status = 'ACTIVE', load = p_load,
        draining = p_draining, orphans = p_orphans
    WHERE n.node_id = p_node
    RETURNING n.pool, n.jobs, n.only_execution, n.draining INTO v_pool, v_jobs, v_only, v_draining;
    IF v_was = 'UNREACHABLE' THEN
        PERFORM rowlock._event('node_returned', NULL, NULL, p_node, 'node ' || p_node, NULL);
    END IF;
    RETURN QUERY SELECT
        true,
        p_look AND NOT v_draining AND EXISTS (
            SELECT FROM batch_job_coordination e
            WHERE e.pool = v_pool AND e.status = 'RUNNING' AND NOT e.stopping AND NOT e.suspended
              AND (v_only IS NULL OR e.execution_id = v_only)
              AND rowlock._accepts(v_jobs, e.job_name, e.contract_hash)
              AND (NOT e.limited OR coalesce(rowlock._room(e.execution_id), 1) > 0)
              AND ((SELECT p.id FROM batch_partitions p
                    WHERE p.execution_id = e.execution_id
                      AND p.status = 'PENDING' AND p.ready AND NOT p.alone
                    -- From the end of the line. While somebody's old snapshot keeps them, what was claimed
                    -- stays in the index, and lies before its beginning (tried: 20,000 rows, 7 ms).
                    ORDER BY -p.weight::bigint DESC, p.id DESC LIMIT 1) IS NOT NULL
                   OR (SELECT p.id FROM batch_partitions p
                       WHERE p.execution_id = e.execution_id
                         AND p.status = 'PENDING' AND p.ready AND p.alone
                       ORDER BY p.id LIMIT 1) IS NOT NULL)),
        NOT v_draining AND EXISTS (SELECT FROM rowlock._adoptable(p_node, v_jobs, v_only, v_now)),
        (SELECT p.id FROM batch_partitions p
         WHERE p.status = 'PENDING' AND NOT p.ready AND p.available_at <= v_now
         ORDER BY p.available_at LIMIT 1) IS NOT NULL
        OR EXISTS (SELECT FROM batch_job_coordination e
                   WHERE e.deadline_at <= v_now AND e.ended_at IS NULL AND e.status <> 'CLOSING')
        OR EXISTS (SELECT FROM batch_limits l WHERE NOT l.settled)
        OR EXISTS (SELECT FROM rowlock._left_ending()),
        EXISTS (SELECT FROM batch_nodes n WHERE n.status = 'REMOVED' AND n.recovered_at IS NULL),
        ARRAY(SELECT x.id FROM unnest(p_executions) AS x (id)
              LEFT JOIN batch_job_coordination e ON e.execution_id = x.id
              WHERE e.status IS NULL
                 OR e.status IN ('CLOSING', 'COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED')),
        coalesce((SELECT jsonb_agg(jsonb_build_array(n.node_id, n.beat, n.status))
                  FROM batch_nodes n WHERE n.status <> 'REMOVED' AND n.node_id <> p_node), '[]'),
        v_now,
        m.version, m.works_with
    FROM (SELECT max(version) AS version, max(works_with) AS works_with FROM schema_migrations) m;
END
$$;

-- Executions without a master that this node may drive.
CREATE FUNCTION rowlock._adoptable(p_node uuid, p_jobs jsonb, p_only uuid, p_now timestamptz)
RETURNS SETOF uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    SELECT e.execution_id FROM batch_job_coordination e
    WHERE e.status NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED')
      AND (p_only IS NULL OR e.execution_id = p_only)
      AND rowlock._accepts(p_jobs, e.job_name, e.contract_hash)
      -- guard: what waits suspended is not begun, only ended
      AND NOT (e.suspended AND e.status = 'REQUESTED' AND NOT e.stopping)
      AND CASE
          WHEN e.master_node IS NULL THEN e.adopt_after <= p_now
          -- guard: a living master is never replaced
          ELSE NOT EXISTS (SELECT FROM batch_nodes m
                           WHERE m.node_id = e.master_node AND m.status <> 'REMOVED')
          END
    ORDER BY e.priority DESC, e.exec_no;
$$;

-- Phase one. The observed beat is part of the condition: a beat in between, or another observer,
-- makes this change nothing.
CREATE FUNCTION rowlock.mark_unreachable(p_observer uuid, p_node uuid, p_beat bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_found boolean;
BEGIN
    -- SKIP LOCKED, so that an observer never waits for the node it judges.
    PERFORM FROM batch_nodes
    WHERE node_id = p_node AND status = 'ACTIVE'
      AND beat = p_beat  -- guard: only the beat that was watched
    FOR NO KEY UPDATE SKIP LOCKED;
    v_found := FOUND;
    IF v_found THEN
        UPDATE batch_nodes SET status = 'UNREACHABLE' WHERE node_id = p_node;
        PERFORM rowlock._event('node_unreachable', NULL, NULL, p_node, 'node ' || p_observer,
                               jsonb_build_object('beat', p_beat));
    END IF;
    RETURN v_found;
END
$$;

-- Phase two: REMOVED, together with the recovery of every claim whose execution row is free. Answers how
-- many of its claims wait again, how many ended FAILED, and of these the AT_MOST_ONCE ones.
CREATE FUNCTION rowlock.remove_node(p_observer uuid, p_node uuid, p_beat bigint)
RETURNS TABLE (removed boolean, moved bigint, failed bigint, unknown bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    removed := false; moved := 0; failed := 0; unknown := 0;
    PERFORM FROM batch_nodes n
    WHERE n.node_id = p_node
      AND n.status = 'UNREACHABLE'  -- guard: two phases
      AND n.beat = p_beat  -- guard: only the beat that was watched
    -- FOR UPDATE conflicts with the KEY SHARE of the node's own claims and completions: none of
    -- them can commit after the removal.
    FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        removed := true;
        UPDATE batch_nodes n
        SET status = 'REMOVED', removed_at = rowlock.now(), removed_reason = 'silence'
        WHERE n.node_id = p_node;
        PERFORM rowlock._event('node_removed', NULL, NULL, p_node, 'node ' || p_observer,
                               jsonb_build_object('reason', 'silence', 'beat', p_beat));
        SELECT r.moved, r.failed, r.unknown INTO moved, failed, unknown
        FROM rowlock._recover_claims(p_node, 'node ' || p_observer) r;
    END IF;
    RETURN NEXT;
END
$$;

-- Has this server ended the backend? Not true where anything is unknown: a backend that was not announced,
-- columns that we may not read, a server that was restarted or promoted since and never knew it.
CREATE FUNCTION rowlock._is_gone(p_backend rowlock.backend) RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT (p_backend).pid IS NOT NULL
       AND (p_backend).server_runs_since = rowlock._server_runs_since()  -- guard: only the server that knew it can miss it
       AND NOT EXISTS (
           SELECT FROM pg_catalog.pg_stat_activity a
           WHERE a.pid = (p_backend).pid AND coalesce(a.backend_start = (p_backend).started_at, true))
$$;

-- Quicker than the two phases, by evidence: the observer has missed two beats of a node, and the server has ended both
-- of its connections. The node becomes UNREACHABLE, no more, because it may be alive and only cut off; what
-- others may do meanwhile, they may do now: its AT_LEAST_ONCE claims and its masterships. AT_MOST_ONCE claims
-- wait for the removal, which finds nothing left of the rest. All of it is asked anew here: of what the observer
-- believes only the beat counts. `acted`: this call has changed something.
CREATE FUNCTION rowlock.recover_by_evidence(p_observer uuid, p_node uuid, p_beat bigint)
RETURNS TABLE (acted boolean, moved bigint, failed bigint, freed bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_was text;
BEGIN
    acted := false; moved := 0; failed := 0; freed := 0;
    -- All who watch it ask, at each of their beats until it is removed, and all but one of them for nothing:
    -- that must not cost a look at all sessions.
    IF NOT EXISTS (
        SELECT FROM batch_nodes n WHERE n.node_id = p_node AND (
            n.status = 'ACTIVE'
            OR EXISTS (SELECT FROM batch_partitions p
                       WHERE p.status = 'CLAIMED' AND p.assigned_node = p_node AND p.delivery = 'AT_LEAST_ONCE')
            OR EXISTS (SELECT FROM batch_job_coordination e
                       WHERE e.master_node = p_node
                         AND e.status NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED'))))
    THEN
        RETURN NEXT;
        RETURN;
    END IF;
    SELECT n.status INTO v_was FROM batch_nodes n
    WHERE n.node_id = p_node
      AND n.status <> 'REMOVED'
      AND n.beat = p_beat  -- guard: only the beat that was watched
      AND rowlock._is_gone(n.beat_backend)  -- guard: a node that can beat lives
      AND rowlock._is_gone(n.work_backend)  -- guard: a node that can work lives
    -- As in remove_node; and from here to the next beat it is UNREACHABLE and claims nothing.
    FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        UPDATE batch_nodes n SET status = 'UNREACHABLE' WHERE n.node_id = p_node AND n.status = 'ACTIVE';
        SELECT r.moved, r.failed INTO moved, failed
        FROM rowlock._recover_claims(p_node, 'node ' || p_observer, false) r;
        UPDATE batch_job_coordination e SET master_node = NULL, adopt_after = least(e.adopt_after, rowlock.now())
        WHERE e.execution_id = ANY (ARRAY(
            SELECT x.execution_id FROM batch_job_coordination x
            WHERE x.master_node = p_node AND x.status NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED')
            ORDER BY x.execution_id
            FOR NO KEY UPDATE SKIP LOCKED));
        GET DIAGNOSTICS freed = ROW_COUNT;
        IF freed > 0 THEN
            PERFORM pg_notify('rowlock', 'adopt');
        END IF;
        acted := v_was = 'ACTIVE' OR moved + failed + freed > 0;
    END IF;
    IF acted THEN
        PERFORM rowlock._event('node_gone', NULL, NULL, p_node, 'node ' || p_observer, jsonb_build_object(
            'beat', p_beat, 'moved', moved, 'failed', failed, 'masterships', freed));
    END IF;
    RETURN NEXT;
END
$$;

-- Take the claims of a node that is gone away from it. Never waits: what is locked is left to the next
-- pass. The caller has made sure that the owner cannot claim now, and holds its node row if there is one.
CREATE FUNCTION rowlock._recover_claims(
    p_owner uuid, p_actor text,
    p_removed boolean DEFAULT true  -- false: it may come back, and keeps its AT_MOST_ONCE claims
)
RETURNS TABLE (moved bigint, failed bigint, unknown bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := rowlock.now();
    v_ids bigint[] := ARRAY[]::bigint[];
    r record;
BEGIN
    moved := 0; failed := 0; unknown := 0;
    FOR r IN
        WITH executions AS (
            SELECT e.execution_id, e.status, (e.policy ->> 'max_attempts')::integer AS max_attempts
            FROM batch_job_coordination e
            WHERE e.execution_id = ANY (ARRAY(
                SELECT DISTINCT p.execution_id FROM batch_partitions p
                WHERE p.status = 'CLAIMED' AND p.assigned_node = p_owner))
            ORDER BY e.execution_id
            FOR KEY SHARE SKIP LOCKED  -- guard: it cannot begin to end before its rows are PENDING
        ), verdicts AS (
            SELECT p.id, e.max_attempts, CASE
                WHEN p.delivery = 'AT_MOST_ONCE'
                    THEN 'FAILED'  -- guard: a lost AT_MOST_ONCE start is never repeated
                WHEN p.alone  -- guard: the last loss is never a neighbour's fault
                     AND p.started_at IS NOT NULL AND p.failures + 1 >= e.max_attempts
                    THEN 'FAILED'
                WHEN e.status <> 'RUNNING'
                    THEN 'CANCELLED'  -- guard: nothing becomes PENDING in an execution that ends
                ELSE 'PENDING' END AS verdict
            FROM batch_partitions p JOIN executions e USING (execution_id)
            WHERE p.status = 'CLAIMED' AND p.assigned_node = p_owner
              AND (p_removed OR p.delivery = 'AT_LEAST_ONCE')  -- guard: AT_MOST_ONCE waits for the removal
            ORDER BY p.id
            LIMIT 1000
            FOR UPDATE OF p SKIP LOCKED
        )
        UPDATE batch_partitions p
        SET status = v.verdict,
            assigned_node = CASE WHEN v.verdict = 'PENDING' THEN NULL ELSE p.assigned_node END,
            lost = p.lost + 1,
            failures = CASE
                WHEN p.delivery = 'AT_MOST_ONCE' OR p.started_at IS NULL THEN p.failures
                WHEN v.verdict = 'FAILED' THEN p.failures + 1
                ELSE least(p.failures + 1, greatest(v.max_attempts - 1, 0)) END,
            alone = v.verdict = 'PENDING' AND v.max_attempts - 1 <= CASE
                WHEN p.started_at IS NULL THEN p.failures ELSE p.failures + 1 END,
            ready = true, available_at = v_now,
            started_at = CASE WHEN v.verdict = 'PENDING' THEN NULL ELSE p.started_at END,
            ended_at = CASE WHEN v.verdict = 'PENDING' THEN NULL ELSE v_now END,
            last_error = CASE
                WHEN v.verdict <> 'FAILED' THEN p.last_error
                WHEN p.delivery = 'AT_MOST_ONCE' THEN jsonb_build_object(
                    'type', 'NodeLost', 'outcome', 'unknown', 'message',
                    'the node was lost after the start; whether the work was done is not known')
                ELSE jsonb_build_object(
                    'type', 'NodeLost', 'outcome', 'poison', 'message', format(
                    'its node was lost in %s attempts, the last time with nothing else running there',
                    p.lost + 1)) END
        FROM verdicts v WHERE p.id = v.id
        RETURNING p.id, p.execution_id, v.verdict, p.claims, p.failures, p.delivery
    LOOP
        moved := moved + (r.verdict = 'PENDING')::integer;
        failed := failed + (r.verdict = 'FAILED')::integer;
        unknown := unknown + (r.verdict = 'FAILED' AND r.delivery = 'AT_MOST_ONCE')::integer;
        v_ids := v_ids || r.id;
        PERFORM rowlock._event('partition_recovered', r.execution_id, r.id, p_owner, p_actor,
                               jsonb_build_object('now', r.verdict, 'claims', r.claims,
                                                  'failures', r.failures));
    END LOOP;
    PERFORM rowlock._count_ended(p_owner, v_ids, true);
    IF NOT EXISTS (SELECT FROM batch_partitions p
                   WHERE p.status = 'CLAIMED' AND p.assigned_node = p_owner) THEN
        UPDATE batch_nodes n SET recovered_at = v_now
        WHERE n.node_id = p_owner AND n.recovered_at IS NULL
          AND n.status = 'REMOVED';  -- guard: a node that may come back claims again
    END IF;
    IF moved > 0 THEN
        PERFORM pg_notify('rowlock', 'work');
    END IF;
    RETURN NEXT;
END
$$;

-- A pass over every claim whose owner is REMOVED or absent, whatever removed it.
CREATE FUNCTION rowlock.recover(p_actor uuid) RETURNS TABLE (moved bigint, failed bigint, unknown bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_owner uuid;
    r record;
BEGIN
    moved := 0; failed := 0; unknown := 0;
    FOR v_owner IN
        SELECT n.node_id FROM batch_nodes n WHERE n.status = 'REMOVED' AND n.recovered_at IS NULL
        UNION
        SELECT DISTINCT p.assigned_node FROM batch_partitions p
        WHERE p.status = 'CLAIMED'
          -- guard: only of owners that are gone
          AND NOT EXISTS (SELECT FROM batch_nodes n
                          WHERE n.node_id = p.assigned_node AND n.status <> 'REMOVED')
        ORDER BY 1  -- two passes that meet want the same counters: in the same order
    LOOP
        -- The node row comes before its partitions in the lock order. Whoever holds it recovers it.
        PERFORM FROM batch_nodes n WHERE n.node_id = v_owner FOR NO KEY UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND AND EXISTS (SELECT FROM batch_nodes n WHERE n.node_id = v_owner);
        SELECT * INTO r FROM rowlock._recover_claims(v_owner, 'node ' || p_actor);
        moved := moved + r.moved;
        failed := failed + r.failed;
        unknown := unknown + r.unknown;
    END LOOP;
    RETURN NEXT;
END
$$;

-- The node itself leaves: drained, or about to register anew. What it still holds is recovered.
CREATE FUNCTION rowlock.deregister(p_node uuid, p_reason text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
BEGIN
    -- FOR UPDATE waits for a claim of this node that is still on its way (its connection broke, the
    -- statement runs on). A plain UPDATE would not: that claim then committed after the recovery, and
    -- its rows stayed CLAIMED by a removed node.
    PERFORM FROM batch_nodes
    WHERE node_id = p_node AND status <> 'REMOVED'
    FOR UPDATE;  -- guard: no claim of this node commits after it left
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE batch_nodes
    SET status = 'REMOVED', removed_at = rowlock.now(), removed_reason = p_reason, draining = true
    WHERE node_id = p_node;
    PERFORM rowlock._event('node_left', NULL, NULL, p_node, 'node ' || p_node,
                           jsonb_build_object('reason', p_reason));
    PERFORM rowlock._recover_claims(p_node, 'node ' || p_node);
    PERFORM pg_notify('rowlock', 'work');
    RETURN true;
END
$$;

-- Delayed rows that are due enter the claim index, a bounded batch at a time.
CREATE FUNCTION rowlock.promote(p_limit integer) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_promoted bigint;
BEGIN
    UPDATE batch_partitions SET ready = true
    WHERE id = ANY (ARRAY(
        SELECT id FROM batch_partitions
        WHERE status = 'PENDING' AND NOT ready AND available_at <= rowlock.now()
        ORDER BY available_at
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_promoted = ROW_COUNT;
    IF v_promoted > 0 THEN
        PERFORM pg_notify('rowlock', 'work');
    END IF;
    RETURN v_promoted;
END
$$;

-- Which database this is: two with the same answer are one. Where a service keeps its server to itself, or
-- while it is a standby, a part is NULL.
CREATE FUNCTION rowlock.server() RETURNS TABLE (system_identifier text, database text, timeline integer)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_variable
BEGIN
    database := current_database();
    BEGIN
        system_identifier := (SELECT c.system_identifier::text FROM pg_control_system() c);
        timeline := ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer;
    EXCEPTION WHEN OTHERS THEN
        NULL;
    END;
    RETURN NEXT;
END
$$;

-- The same, said by a node that has connected: the first that finds itself on another server or timeline
-- than the nodes before it writes down that what was answered last there may be lost.
CREATE FUNCTION rowlock.notice_server(p_node uuid)
RETURNS TABLE (system_identifier text, database text, timeline integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_server record;
    v_before record;
BEGIN
    SELECT * INTO v_server FROM rowlock.server();
    IF v_server.system_identifier IS NOT NULL AND v_server.timeline IS NOT NULL THEN
        SELECT s.system_identifier, s.timeline INTO v_before FROM batch_servers s
        ORDER BY s.seen_at DESC, s.timeline DESC LIMIT 1;
        INSERT INTO batch_servers (system_identifier, timeline, seen_at)
        VALUES (v_server.system_identifier, v_server.timeline, rowlock.now())
        ON CONFLICT DO NOTHING;
        IF FOUND AND v_before.timeline IS NOT NULL THEN
            PERFORM rowlock._event('server_changed', NULL, NULL, p_node, 'node ' || p_node, jsonb_build_object(
                'system_identifier', v_server.system_identifier, 'timeline', v_server.timeline,
                'system_identifier_before', v_before.system_identifier, 'timeline_before', v_before.timeline));
        END IF;
    END IF;
    RETURN QUERY SELECT v_server.system_identifier, v_server.database, v_server.timeline;
END
$$;

RESET search_path;
RESET ROLE;
