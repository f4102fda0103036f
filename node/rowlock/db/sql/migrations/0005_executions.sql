-- Executions: request, mastership by compare-and-set with an epoch, plan and seal, the two-step end,
-- cancel. Every write of a master names its epoch, and only the current one matches.
SET LOCAL ROLE rowlock_owner;
SET LOCAL search_path = rowlock, pg_temp;

-- Ask for an execution of an instance. Answers with the execution that stands for this request and
-- an outcome: 'requested' (new), 'restarted' (the last one FAILED or was CANCELLED: what it left unfinished),
-- 'exists' (the same launch key again), or why it is refused: 'running', 'completed', 'abandoned' (the state
-- of the instance), 'parameters' (it stands for others).
-- p_options: {parallelism, deadline_seconds (from now), suspended, deletion_policy}.
CREATE FUNCTION rowlock.request_execution(
    p_execution uuid, p_job text, p_hash text, p_policy jsonb, p_delivery text, p_instance_key text,
    p_launch_key text, p_parameters jsonb, p_pool text, p_priority integer,
    p_adopt_after_seconds double precision, p_requester jsonb, p_options jsonb DEFAULT '{}'
) RETURNS TABLE (execution_id uuid, outcome text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := rowlock.now();
    v_digest bytea := sha256(convert_to(p_parameters::text, 'UTF8'));
    v_actor text := coalesce(p_requester ->> 'actor', session_user);
    v_instance batch_instances;
    v_new batch_job_coordination;
    v_parallelism integer;
BEGIN
    PERFORM rowlock._check_limits(
        p_options, ARRAY['parallelism', 'deadline_seconds', 'suspended', 'deletion_policy']);
    v_parallelism := (p_options ->> 'parallelism')::numeric;  -- 4.0 is whole as well
    v_new.execution_id := p_execution;
    v_new.job_name := p_job;
    v_new.contract_hash := p_hash;
    v_new.policy := p_policy;
    v_new.delivery := p_delivery;
    v_new.instance_key := p_instance_key;
    v_new.launch_key := p_launch_key;
    v_new.parameters := p_parameters;
    v_new.pool := p_pool;
    v_new.priority := p_priority;
    v_new.requester := p_requester;
    v_new.suspended := coalesce((p_options ->> 'suspended')::boolean, false);
    v_new.deletion_policy := coalesce(p_options ->> 'deletion_policy', 'CANCEL');
    v_new.deadline_at := v_now + make_interval(secs => (p_options ->> 'deadline_seconds')::double precision);
    v_new.requested_at := v_now;
    v_new.adopt_after := v_now + make_interval(secs => p_adopt_after_seconds);
    LOOP
        BEGIN
            INSERT INTO batch_instances (job_name, instance_key, state, execution_id, created_at, parameters_digest)
            VALUES (p_job, p_instance_key, 'RUNNING', p_execution, v_now, v_digest);  -- guard: one launcher wins
            PERFORM rowlock._begin(v_new, v_parallelism);
            PERFORM rowlock._event('execution_requested', p_execution, NULL, NULL, v_actor,
                                   jsonb_build_object('job', p_job, 'instance', p_instance_key));
            RETURN QUERY SELECT p_execution, 'requested';
            RETURN;
        EXCEPTION WHEN unique_violation THEN
            NULL;
        END;
        SELECT i.* INTO v_instance FROM batch_instances i
        WHERE i.job_name = p_job AND i.instance_key = p_instance_key
        FOR UPDATE;  -- guard: of launchers that restart an instance one wins
        SELECT e.execution_id INTO execution_id FROM batch_job_coordination e
        WHERE e.launch_key = p_launch_key OR e.execution_id = p_execution;
        IF FOUND THEN
            outcome := 'exists';
        ELSIF v_instance.job_name IS NULL THEN
            CONTINUE;  -- the launcher that was quicker has rolled back
        ELSIF p_launch_key = ANY (v_instance.launch_keys) THEN  -- guard: a launch key has one execution, also a purged one
            execution_id := v_instance.execution_id;
            outcome := 'exists';
        ELSIF v_instance.state NOT IN ('FAILED', 'CANCELLED') THEN  -- guard: only what failed or was cancelled is restarted
            execution_id := v_instance.execution_id;
            outcome := lower(v_instance.state);
        ELSIF v_instance.parameters_digest <> v_digest THEN  -- guard: an instance stands for its parameters
            execution_id := v_instance.execution_id;
            outcome := 'parameters';
        ELSE
            PERFORM rowlock._restart(v_new, v_instance.execution_id, v_parallelism, v_actor, NULL);
            execution_id := p_execution;
            -- Of a purged execution nothing is left that could be kept: the plan is made again.
            outcome := CASE WHEN EXISTS (SELECT FROM batch_job_coordination e
                                         WHERE e.execution_id = v_instance.execution_id)
                       THEN 'restarted' ELSE 'requested' END;
        END IF;
        RETURN NEXT;
        RETURN;
    END LOOP;
END
$$;

-- Become master of one execution: of p_execution, or else of the first that waits. No row: there
-- was nothing to take. A node that is already the master gets a new epoch (its last answer was lost).
CREATE FUNCTION rowlock.adopt(p_node uuid, p_execution uuid) RETURNS TABLE (
    execution_id uuid, epoch bigint, status text, job_name text, contract_hash text, policy jsonb,
    delivery text, instance_key text, parameters text, pool text, total bigint, masters_lost integer
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := rowlock.now();
    v_node batch_nodes;
    v_execution uuid;
    v_previous uuid;
    v_epoch bigint;
BEGIN
    SELECT n.* INTO v_node FROM batch_nodes n WHERE n.node_id = p_node;
    IF p_execution IS NULL THEN
        SELECT e.execution_id INTO v_execution FROM batch_job_coordination e
        WHERE e.execution_id IN (
            SELECT a FROM rowlock._adoptable(p_node, v_node.jobs, v_node.only_execution, v_now) AS a)
          -- Said again, of the row as it is when it has been locked:
          AND NOT (e.suspended AND e.status = 'REQUESTED' AND NOT e.stopping)  -- guard: suspended since the look
        ORDER BY e.priority DESC, e.exec_no LIMIT 1
        -- NO KEY: the claims of a busy execution, which hold it KEY SHARE, stand in nobody's way.
        FOR NO KEY UPDATE SKIP LOCKED;
    ELSE
        SELECT e.execution_id INTO v_execution FROM batch_job_coordination e
        WHERE e.execution_id = p_execution
          AND e.status NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED')
          AND rowlock._accepts(v_node.jobs, e.job_name, e.contract_hash)
        FOR NO KEY UPDATE;
    END IF;
    IF v_execution IS NULL THEN
        RETURN;
    END IF;
    PERFORM FROM batch_nodes n
    WHERE n.node_id = p_node AND n.status = 'ACTIVE'  -- guard: only an active node becomes master
      AND NOT n.draining
    FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT e.master_node INTO v_previous FROM batch_job_coordination e
    WHERE e.execution_id = v_execution;
    UPDATE batch_job_coordination e
    SET master_node = p_node, master_epoch = e.master_epoch + 1,
        -- The one before was in author code, and did not resign.
        masters_lost = e.masters_lost + (e.status IN ('PLANNING', 'FINISHING')
                                         AND e.master_node IS DISTINCT FROM p_node)::integer,
        status = CASE e.status WHEN 'REQUESTED' THEN 'PLANNING' ELSE e.status END
    WHERE e.execution_id = v_execution
      AND e.ended_at IS NULL  -- guard: it may have ended between the look and the lock
      -- guard: compare and set; a living master is never replaced
      AND (e.master_node IS NULL OR e.master_node = p_node
           OR NOT EXISTS (SELECT FROM batch_nodes m
                          WHERE m.node_id = e.master_node AND m.status <> 'REMOVED'))
    RETURNING e.master_epoch INTO v_epoch;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF v_epoch > 1 THEN  -- the one before was removed, or has lost or resigned the mastership before that
        PERFORM rowlock._event('master_took_over', v_execution, NULL, p_node, 'node ' || p_node,
                               jsonb_build_object('epoch', v_epoch, 'previous', v_previous));
    END IF;
    RETURN QUERY SELECT e.execution_id, e.master_epoch, e.status, e.job_name, e.contract_hash, e.policy,
        e.delivery, e.instance_key, e.parameters::text, e.pool, e.total, e.masters_lost
    FROM batch_job_coordination e WHERE e.execution_id = v_execution;
END
$$;

-- Give a mastership back, so that another node takes it at once.
CREATE FUNCTION rowlock.resign(p_node uuid, p_execution uuid, p_epoch bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
BEGIN
    UPDATE batch_job_coordination
    SET master_node = NULL, adopt_after = rowlock.now(),
        masters_lost = masters_lost - (status IN ('PLANNING', 'FINISHING'))::integer  -- its heir adds it again
    WHERE execution_id = p_execution AND master_node = p_node
      AND master_epoch = p_epoch  -- guard: only the current mastership is given back
      AND ended_at IS NULL;
    IF FOUND THEN
        PERFORM rowlock._event('master_resigned', p_execution, NULL, p_node, 'node ' || p_node, NULL);
        PERFORM pg_notify('rowlock', 'adopt');
        RETURN true;
    END IF;
    RETURN false;
END
$$;

-- Which executions this node is the master of, for comparing with what it believes.
CREATE FUNCTION rowlock.masterships_of(p_node uuid) RETURNS TABLE (execution_id uuid, epoch bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    SELECT e.execution_id, e.master_epoch FROM batch_job_coordination e
    WHERE e.status NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED') AND e.master_node = p_node;
$$;

-- What a planner may know about the cluster: living nodes of a pool that take new work.
CREATE FUNCTION rowlock.cluster(p_pool text) RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    SELECT coalesce(jsonb_agg(jsonb_build_object(
        'name', n.name, 'pool', n.pool, 'slots', n.slots, 'load', n.load) ORDER BY n.name, n.node_id), '[]')
    FROM batch_nodes n
    WHERE n.pool = p_pool AND n.status = 'ACTIVE' AND NOT n.draining AND n.slots > 0;
$$;

-- Keep one chunk of a plan. Nobody else sees it before the seal.
CREATE FUNCTION rowlock.stage(
    p_execution uuid, p_epoch bigint, p_chunk integer, p_keys text[], p_slices jsonb[], p_weights integer[]
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
BEGIN
    PERFORM FROM batch_job_coordination
    WHERE execution_id = p_execution
      AND status = 'PLANNING'  -- guard: nothing is added to a sealed plan
      AND master_epoch = p_epoch  -- guard: only the current master plans
    FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO batch_staging (execution_id, epoch, chunk, keys, slices, weights)
    VALUES (p_execution, p_epoch, p_chunk, p_keys, p_slices, p_weights)
    -- The same chunk again: its answer was lost, or partition() died and runs once more. Then the
    -- chunk of the new run counts: a plan mixed of two runs could leave slices out and still add up.
    ON CONFLICT (execution_id, epoch, chunk) DO UPDATE
    SET keys = excluded.keys, slices = excluded.slices, weights = excluded.weights;
    RETURN true;
END
$$;

-- Make the plan of this epoch visible, whole, in one transaction. Answers 'sealed', 'superseded',
-- 'duplicate' (detail: the keys), or 'incomplete' (detail: how many rows were staged).
CREATE FUNCTION rowlock.seal(p_execution uuid, p_epoch bigint, p_step text, p_total bigint)
RETURNS TABLE (outcome text, detail text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_now timestamptz := rowlock.now();
    v_execution batch_job_coordination;
    v_rows bigint;
    v_first bigint;
BEGIN
    SELECT e.* INTO v_execution FROM batch_job_coordination e
    WHERE e.execution_id = p_execution FOR UPDATE;
    IF v_execution.master_epoch = p_epoch AND v_execution.status IN ('RUNNING', 'FINISHING')
       AND v_execution.step = p_step AND v_execution.total = p_total THEN
        RETURN QUERY SELECT 'sealed', NULL;  -- again: the first answer was lost
        RETURN;
    END IF;
    IF v_execution.execution_id IS NULL OR v_execution.status <> 'PLANNING'
       OR v_execution.master_epoch <> p_epoch THEN  -- guard: a plan is sealed once, by the current master
        RETURN QUERY SELECT 'superseded', NULL;
        RETURN;
    END IF;
    v_first := nextval('rowlock.batch_partitions_id_seq');
    BEGIN
        INSERT INTO batch_partitions (execution_id, step, partition_key, delivery, weight, slice, available_at)
        SELECT p_execution, p_step, u.key, v_execution.delivery, u.weight, u.slice, v_now
        FROM batch_staging s
        CROSS JOIN LATERAL unnest(s.keys, s.slices, s.weights) WITH ORDINALITY AS u (key, slice, weight, o)
        WHERE s.execution_id = p_execution
          AND s.epoch = p_epoch  -- guard: nothing of an earlier master's plan
        ORDER BY s.chunk, u.o;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
        IF v_rows <> p_total THEN
            RAISE EXCEPTION 'incomplete' USING ERRCODE = 'RL003';
        END IF;
    EXCEPTION
        WHEN unique_violation THEN
            RETURN QUERY SELECT 'duplicate', string_agg(quote_literal(d.key), ', ') FROM (
                SELECT u.key FROM batch_staging s CROSS JOIN LATERAL unnest(s.keys) AS u (key)
                WHERE s.execution_id = p_execution AND s.epoch = p_epoch
                GROUP BY u.key HAVING count(*) > 1 ORDER BY u.key LIMIT 3) d;
            RETURN;
        WHEN SQLSTATE 'RL003' THEN
            RETURN QUERY SELECT 'incomplete', v_rows::text;
            RETURN;
    END;
    DELETE FROM batch_staging s WHERE s.execution_id = p_execution;
    UPDATE batch_job_coordination e
    SET status = 'RUNNING', step = p_step, total = p_total, started_at = v_now,
        masters_lost = 0,  -- partition() has ended; finish() counts anew
        first_id = v_first, last_id = nextval('rowlock.batch_partitions_id_seq')
    WHERE e.execution_id = p_execution;
    PERFORM pg_notify('rowlock', 'work');
    RETURN QUERY SELECT 'sealed', NULL;
END
$$;

-- How many failed partitions an execution tolerates: max_failed is NULL (none), a number or "5%".
CREATE FUNCTION rowlock._failed_allowed(p_policy jsonb, p_total bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE jsonb_typeof(p_policy -> 'max_failed')
        WHEN 'number' THEN (p_policy ->> 'max_failed')::bigint
        WHEN 'string' THEN floor(rtrim(p_policy ->> 'max_failed', '%')::numeric * p_total / 100)::bigint
        ELSE 0 END
$$;

CREATE FUNCTION rowlock._is_waiting(p_execution uuid) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    SELECT (SELECT p.id FROM batch_partitions p WHERE p.execution_id = p_execution
              AND p.status = 'PENDING' AND p.ready AND NOT p.alone
            ORDER BY -p.weight::bigint DESC, p.id DESC LIMIT 1) IS NOT NULL
        OR (SELECT p.id FROM batch_partitions p WHERE p.execution_id = p_execution
              AND p.status = 'PENDING' AND p.ready AND p.alone
            ORDER BY p.id LIMIT 1) IS NOT NULL
        OR (SELECT p.id FROM batch_partitions p WHERE p.execution_id = p_execution
              AND p.status = 'PENDING' AND NOT p.ready
            ORDER BY p.id LIMIT 1) IS NOT NULL;
$$;

CREATE FUNCTION rowlock._is_live(p_execution uuid) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    SELECT rowlock._is_waiting(p_execution)
        OR (SELECT p.assigned_node FROM batch_partitions p WHERE p.execution_id = p_execution
              AND p.status = 'CLAIMED'
            ORDER BY p.assigned_node LIMIT 1) IS NOT NULL;
$$;

-- Executions that only have to be ended, and have no living master to do it. A node that knows the job would adopt
-- one, but there may be none any more, and ending takes no author code.
CREATE FUNCTION rowlock._left_ending() RETURNS SETOF uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    SELECT e.execution_id FROM batch_job_coordination e
    WHERE e.status NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED') AND e.stopping
      AND NOT EXISTS (SELECT FROM batch_nodes m WHERE m.node_id = e.master_node AND m.status <> 'REMOVED')
      AND (e.status <> 'CLOSING' OR rowlock._is_waiting(e.execution_id) OR NOT rowlock._is_live(e.execution_id))
$$;

-- Write the end. The caller holds the instance row and the execution row.
CREATE FUNCTION rowlock._end(
    p_execution uuid, p_status text, p_counts jsonb, p_summary jsonb, p_reason text, p_message text, p_actor text
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
BEGIN
    UPDATE batch_job_coordination e
    SET status = p_status, ended_at = rowlock.now(), summary = p_summary,
        counts = coalesce(p_counts, e.counts),
        -- A cancel that was asked for may come too late: what COMPLETED has no reason to have failed.
        failure_reason = CASE WHEN p_status <> 'COMPLETED' THEN coalesce(p_reason, e.failure_reason) END,
        failure_message = CASE WHEN p_status <> 'COMPLETED' THEN coalesce(p_message, e.failure_message) END
    WHERE e.execution_id = p_execution;
    UPDATE batch_instances i SET state = p_status
    FROM batch_job_coordination e
    WHERE e.execution_id = p_execution AND i.job_name = e.job_name
      AND i.instance_key = e.instance_key AND i.execution_id = p_execution;
    DELETE FROM batch_staging s WHERE s.execution_id = p_execution;
    PERFORM rowlock._event('execution_ended', p_execution, NULL, NULL, p_actor,
                           jsonb_build_object('status', p_status, 'reason', p_reason));
    PERFORM pg_notify('rowlock', 'ended');
END
$$;

-- First the instance row, then the execution row: the lock order of everything that may end one.
CREATE FUNCTION rowlock._lock_execution(p_execution uuid) RETURNS batch_job_coordination
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_execution batch_job_coordination;
BEGIN
    PERFORM FROM batch_instances i
    WHERE (i.job_name, i.instance_key) = (
        SELECT e.job_name, e.instance_key FROM batch_job_coordination e
        WHERE e.execution_id = p_execution)
    FOR UPDATE;
    SELECT e.* INTO v_execution FROM batch_job_coordination e
    WHERE e.execution_id = p_execution FOR UPDATE;
    RETURN v_execution;
END
$$;

-- Step one of an early end: no new claims, what is PENDING becomes CANCELLED, at most p_limit rows (NULL: all) in
-- one call: nodes break a statement off that takes too long, and would never be done with a large plan. Again
-- for the rest; answers how many. The caller holds the row.
CREATE FUNCTION rowlock._close(
    p_execution uuid, p_reason text, p_message text, p_limit bigint DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_now timestamptz := rowlock.now();  -- once, not for each row
    v_last bigint := 9223372036854775807;
    v_cancelled bigint := 0;
    r record;
BEGIN
    UPDATE batch_job_coordination e
    SET status = 'CLOSING', stopping = true, failure_reason = p_reason, failure_message = p_message
    WHERE e.execution_id = p_execution AND e.status <> 'CLOSING';
    IF p_limit IS NOT NULL THEN
        SELECT max(w.id) INTO v_last FROM (
            SELECT p.id FROM batch_partitions p
            WHERE p.execution_id = p_execution AND p.status = 'PENDING'
            ORDER BY p.id LIMIT p_limit) w;
    END IF;
    FOR r IN
        WITH cancelled AS (
            UPDATE batch_partitions p SET status = 'CANCELLED', ended_at = v_now
            WHERE p.execution_id = p_execution AND p.status = 'PENDING' AND p.id <= v_last
            RETURNING p.step)
        SELECT c.step, count(*) AS n FROM cancelled c GROUP BY c.step
    LOOP
        -- The nil uuid: cancelled by nobody's node.
        PERFORM rowlock._count(p_execution, r.step, '00000000-0000-0000-0000-000000000000', 0, 0, r.n);
        v_cancelled := v_cancelled + r.n;
    END LOOP;
    PERFORM pg_notify('rowlock', 'control');
    RETURN v_cancelled;
END
$$;

-- What has become of the partitions of a plan, those that executions before have COMPLETED included.
CREATE FUNCTION rowlock._recount(p_execution uuid) RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    SELECT jsonb_build_object('total', coalesce(e.total, 0), 'completed', e.carried + p.completed,
                              'failed', p.failed, 'cancelled', p.cancelled)
    FROM batch_job_coordination e
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE p.status = 'COMPLETED') AS completed,
               count(*) FILTER (WHERE p.status = 'FAILED') AS failed,
               count(*) FILTER (WHERE p.status = 'CANCELLED') AS cancelled
        FROM batch_partitions p WHERE p.execution_id = e.execution_id) p
    WHERE e.execution_id = p_execution
$$;

-- Step two: the end, once a recount under the row lock finds nothing PENDING or CLAIMED. The caller
-- holds the instance row and the execution row. Does nothing while something is still live.
CREATE FUNCTION rowlock._settle(p_execution uuid, p_actor text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_execution batch_job_coordination;
    v_counts jsonb;
    v_failed bigint;
    v_allowed bigint;
BEGIN
    SELECT e.* INTO v_execution FROM batch_job_coordination e WHERE e.execution_id = p_execution;
    IF v_execution.status NOT IN ('RUNNING', 'CLOSING')
       OR rowlock._is_live(p_execution) THEN  -- guard: an execution ends when nothing of it can still change
        RETURN;
    END IF;
    v_counts := rowlock._recount(p_execution);
    v_failed := (v_counts ->> 'failed')::bigint;
    v_allowed := rowlock._failed_allowed(v_execution.policy, v_execution.total);
    IF v_execution.status = 'CLOSING' THEN
        PERFORM rowlock._end(p_execution,
            CASE WHEN v_execution.cancel_requested THEN 'CANCELLED' ELSE 'FAILED' END,
            v_counts, NULL, NULL, NULL, p_actor);
    ELSIF v_failed > v_allowed THEN  -- guard: never COMPLETED over partitions that failed
        PERFORM rowlock._end(p_execution, 'FAILED', v_counts, NULL, 'PartitionsFailed', format(
            '%s of %s partitions failed, %s allowed', v_failed, v_execution.total, v_allowed), p_actor);
    ELSIF (v_execution.policy ->> 'has_finish')::boolean THEN
        UPDATE batch_job_coordination e SET status = 'FINISHING', counts = v_counts
        WHERE e.execution_id = p_execution;
    ELSE
        PERFORM rowlock._end(p_execution, 'COMPLETED', v_counts, NULL, NULL, NULL, p_actor);
    END IF;
END
$$;

-- The master's look at its execution; it also does what is due: stops the claims when too much
-- failed, closes what was stopped, ends the step when nothing is live. status 'SUPERSEDED': another
-- master has a later epoch.
CREATE FUNCTION rowlock.advance(p_node uuid, p_execution uuid, p_epoch bigint) RETURNS TABLE (
    status text, total bigint, completed bigint, failed bigint, cancelled bigint, failure_message text
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_execution batch_job_coordination;
    v_failed bigint;
BEGIN
    SELECT e.* INTO v_execution FROM batch_job_coordination e WHERE e.execution_id = p_execution;
    IF v_execution.master_epoch = p_epoch AND v_execution.ended_at IS NULL THEN
        IF v_execution.stopping
           -- guard: what still waits, or waits again, in an execution that closes is cancelled
           AND (v_execution.status <> 'CLOSING' OR rowlock._is_waiting(p_execution)) THEN
            SELECT l.* INTO v_execution FROM rowlock._lock_execution(p_execution) l;
            IF v_execution.master_epoch = p_epoch  -- guard: only the current master closes
               AND v_execution.ended_at IS NULL THEN
                PERFORM rowlock._close(
                    p_execution, v_execution.failure_reason, v_execution.failure_message, 50000);
                PERFORM rowlock._settle(p_execution, 'node ' || p_node);
            END IF;
        ELSIF v_execution.status IN ('RUNNING', 'CLOSING') AND NOT rowlock._is_live(p_execution) THEN
            SELECT l.* INTO v_execution FROM rowlock._lock_execution(p_execution) l;
            IF v_execution.master_epoch = p_epoch THEN  -- guard: only the current master ends a step
                PERFORM rowlock._settle(p_execution, 'node ' || p_node);
            END IF;
        ELSIF v_execution.status = 'RUNNING' AND jsonb_typeof(v_execution.policy -> 'max_failed') <> 'null' THEN
            SELECT coalesce(sum(c.failed), 0) INTO v_failed FROM batch_counts c
            WHERE c.execution_id = p_execution;
            IF v_failed > rowlock._failed_allowed(v_execution.policy, v_execution.total) THEN
                -- No lock that claims could hold off for ever; the next look closes.
                UPDATE batch_job_coordination e
                SET stopping = true, failure_reason = 'MaxFailedExceeded', failure_message = format(
                    '%s partitions failed, max_failed is %s', v_failed, e.policy ->> 'max_failed')
                WHERE e.execution_id = p_execution
                  AND e.master_epoch = p_epoch  -- guard: only the current master stops the claims
                  AND e.status = 'RUNNING' AND NOT e.stopping;
            END IF;
        END IF;
    END IF;
    RETURN QUERY
        -- Also of an execution that has ended meanwhile: who asks is to know that it was not by him.
        SELECT CASE WHEN e.master_epoch = p_epoch THEN e.status ELSE 'SUPERSEDED' END,
            e.total, e.completed, e.failed, e.cancelled, e.failure_message
        FROM rowlock.executions e WHERE e.execution_id = p_execution;
    IF NOT FOUND THEN  -- it has ended, and was purged
        RETURN QUERY SELECT 'SUPERSEDED', NULL::bigint, 0::bigint, 0::bigint, 0::bigint, NULL;
    END IF;
END
$$;

-- The master could not make a plan (a duplicate key, a slice that breaks its contract, partition()
-- raised): nothing was visible, and the execution is FAILED with the reason.
CREATE FUNCTION rowlock.fail_plan(
    p_node uuid, p_execution uuid, p_epoch bigint, p_reason text, p_message text
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_execution batch_job_coordination;
BEGIN
    SELECT l.* INTO v_execution FROM rowlock._lock_execution(p_execution) l;
    IF v_execution.master_epoch = p_epoch  -- guard: only the current master gives a plan up
       AND v_execution.status = 'PLANNING' THEN
        PERFORM rowlock._end(p_execution, 'FAILED', NULL, NULL, p_reason, p_message, 'node ' || p_node);
        RETURN true;
    END IF;
    RETURN false;
END
$$;

-- The end of a FINISHING execution: COMPLETED with the summary, or FAILED with the error of finish().
-- Answers with the status that stands afterwards, or 'SUPERSEDED'.
CREATE FUNCTION rowlock.finish(
    p_execution uuid, p_epoch bigint, p_summary jsonb, p_reason text, p_message text
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_execution batch_job_coordination;
BEGIN
    SELECT l.* INTO v_execution FROM rowlock._lock_execution(p_execution) l;
    IF v_execution.master_epoch <> p_epoch THEN  -- guard: finish() takes effect once, by the current master
        RETURN 'SUPERSEDED';
    ELSIF v_execution.status = 'FINISHING' THEN
        PERFORM rowlock._end(p_execution, CASE WHEN p_reason IS NULL THEN 'COMPLETED' ELSE 'FAILED' END,
                             NULL, p_summary, p_reason, p_message,
                             -- evidence may have freed the mastership, and nobody has taken it yet
                             coalesce('node ' || v_execution.master_node, 'the master of epoch ' || p_epoch));
        RETURN CASE WHEN p_reason IS NULL THEN 'COMPLETED' ELSE 'FAILED' END;
    END IF;
    RETURN coalesce(v_execution.status, 'SUPERSEDED');
END
$$;

-- One page of results, in the order of the partitions, for finish(): of the whole plan, that is also of the
-- executions that this one restarts.
CREATE FUNCTION rowlock.results(p_execution uuid, p_after bigint, p_limit integer)
RETURNS TABLE (id bigint, partition_key text, result text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    WITH RECURSIVE chain AS (
        SELECT e.execution_id, e.restart_of, e.first_id, e.last_id FROM batch_job_coordination e
        WHERE e.execution_id = p_execution
        UNION ALL
        SELECT e.execution_id, e.restart_of, e.first_id, e.last_id
        FROM chain c JOIN batch_job_coordination e ON e.execution_id = c.restart_of
    )
    SELECT p.id, p.partition_key, p.result FROM chain c
    CROSS JOIN LATERAL (
        SELECT p.id, p.partition_key, p.result::text AS result FROM batch_partitions p
        WHERE p.id > greatest(p_after, c.first_id) AND p.id < c.last_id
          AND p.execution_id = c.execution_id AND p.status = 'COMPLETED'
        ORDER BY p.id LIMIT p_limit) p
    ORDER BY p.id LIMIT p_limit;
$$;

-- The first half of a cancel, in a transaction of its own: from its commit on nothing more is claimed.
-- It waits for no claim. False: there is nothing to cancel, or somebody did so before.
CREATE FUNCTION rowlock.request_cancel(p_execution uuid, p_actor text, p_reason text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
BEGIN
    UPDATE batch_job_coordination e
    SET cancel_requested = true, stopping = true, failure_reason = 'Cancelled',
        failure_message = coalesce(p_reason, 'cancelled by ' || p_actor)
    WHERE e.execution_id = p_execution AND NOT e.cancel_requested
      AND e.ended_at IS NULL;  -- guard: terminal states never change
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM rowlock._event('cancel_requested', p_execution, NULL, NULL, p_actor,
                           jsonb_build_object('reason', p_reason));
    PERFORM pg_notify('rowlock', 'control');
    RETURN true;
END
$$;

-- Cancel, for everybody who may: idempotent. Answers 'closing' (attempts still run), 'cancelled',
-- 'unknown', or the terminal status that the execution already had, in lower case. It is right alone;
-- under load it is quick only after request_cancel. Who dies between the two: the master closes.
CREATE FUNCTION rowlock.cancel(p_execution uuid, p_actor text, p_reason text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_execution batch_job_coordination;
BEGIN
    SELECT l.* INTO v_execution FROM rowlock._lock_execution(p_execution) l;
    IF v_execution.execution_id IS NULL THEN
        RETURN 'unknown';
    ELSIF v_execution.ended_at IS NOT NULL THEN
        RETURN lower(v_execution.status);
    END IF;
    PERFORM rowlock.request_cancel(p_execution, p_actor, p_reason);
    SELECT e.* INTO v_execution FROM batch_job_coordination e WHERE e.execution_id = p_execution;
    PERFORM rowlock._close(p_execution, v_execution.failure_reason, v_execution.failure_message);
    PERFORM rowlock._settle(p_execution, p_actor);
    SELECT e.* INTO v_execution FROM batch_job_coordination e WHERE e.execution_id = p_execution;
    RETURN lower(v_execution.status);
END
$$;

-- What an attempt needs to know of its execution; a node asks once and remembers.
CREATE FUNCTION rowlock.execution_of(p_execution uuid) RETURNS TABLE (
    job_name text, instance_key text, parameters text, policy jsonb
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    SELECT e.job_name, e.instance_key, e.parameters::text, e.policy
    FROM batch_job_coordination e WHERE e.execution_id = p_execution;
$$;

RESET search_path;
RESET ROLE;
