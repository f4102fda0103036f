-- The verbs of people and of the operator: restart, suspend, resume, limits, deadline, abandon, resolve; and the
-- purge of what is old. Each says who and why in one event, and writes none when it has changed nothing.
SET LOCAL ROLE rowlock_owner;
SET LOCAL search_path = rowlock, pg_temp;

-- Raises unless what may be asked of a limit is well formed: nothing here is guessed or ignored.
CREATE FUNCTION rowlock._check_limits(p_changes jsonb, p_known text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_key text;
    v_value jsonb;
    v_wanted text;
BEGIN
    IF jsonb_typeof(p_changes) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'limits are a JSON object, not %', coalesce(p_changes::text, 'NULL')
            USING ERRCODE = '22023';
    END IF;
    FOR v_key, v_value IN SELECT key, value FROM jsonb_each(p_changes) LOOP
        IF NOT v_key = ANY (p_known) THEN
            RAISE EXCEPTION 'unknown limit %: known are %', quote_literal(v_key), array_to_string(p_known, ', ')
                USING ERRCODE = '22023';
        END IF;
        v_wanted := CASE
            WHEN v_key IN ('parallelism', 'deadline_seconds') AND v_value = 'null' THEN NULL
            WHEN v_key = 'parallelism' AND NOT jsonb_path_exists(
                v_value, '$ ? (@.type() == "number" && @ >= 1 && @ <= 1000000 && @ == @.floor())')
                THEN 'a whole number from 1 to 1000000, or null for no limit'
            WHEN v_key = 'priority' AND NOT jsonb_path_exists(
                v_value, '$ ? (@.type() == "number" && @ >= -1000000 && @ <= 1000000 && @ == @.floor())')
                THEN 'a whole number from -1000000 to 1000000'
            WHEN v_key = 'deadline_seconds' AND NOT jsonb_path_exists(
                v_value, '$ ? (@.type() == "number" && @ > 0 && @ <= 3153600000)')
                THEN 'a number of seconds above 0, at most 100 years, or null for none'
            WHEN v_key = 'suspended' AND jsonb_typeof(v_value) <> 'boolean' THEN 'true or false'
            WHEN v_key = 'deletion_policy' AND v_value NOT IN ('"CANCEL"', '"ORPHAN"') THEN 'CANCEL or ORPHAN'
            END;
        IF v_wanted IS NOT NULL THEN
            RAISE EXCEPTION '% is %; it must be %', v_key, v_value, v_wanted USING ERRCODE = '22023';
        END IF;
    END LOOP;
END
$$;

-- Write the row of an execution that begins, with its limit. The caller holds the instance.
CREATE FUNCTION rowlock._begin(p_new batch_job_coordination, p_parallelism integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
BEGIN
    INSERT INTO batch_job_coordination
        (execution_id, job_name, contract_hash, policy, delivery, instance_key, launch_key, parameters, pool,
         priority, status, suspended, limited, step, total, first_id, last_id, restart_of, carried, requester,
         deletion_policy, deadline_at, adopt_after, requested_at, started_at)
    VALUES
        (p_new.execution_id, p_new.job_name, p_new.contract_hash, p_new.policy, p_new.delivery,
         p_new.instance_key, p_new.launch_key, p_new.parameters, p_new.pool, p_new.priority,
         coalesce(p_new.status, 'REQUESTED'), p_new.suspended, p_parallelism IS NOT NULL, p_new.step,
         p_new.total, p_new.first_id, p_new.last_id, p_new.restart_of, coalesce(p_new.carried, 0), p_new.requester,
         p_new.deletion_policy, p_new.deadline_at, p_new.adopt_after, p_new.requested_at, p_new.started_at);
    IF p_parallelism IS NOT NULL THEN
        INSERT INTO batch_limits (execution_id, parallelism) VALUES (p_new.execution_id, p_parallelism);
    END IF;
    PERFORM pg_notify('rowlock', 'adopt');
END
$$;

-- A new execution of an instance whose last one has ended: of a sealed plan it gets what is unfinished, a
-- plan that was never sealed is made again. p_new says what it is; the caller holds the instance row.
CREATE FUNCTION rowlock._restart(
    p_new batch_job_coordination, p_of uuid, p_parallelism integer, p_actor text, p_reason text
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_now timestamptz := rowlock.now();
    v_of batch_job_coordination;
    r record;
BEGIN
    -- Not there: it was purged. What the instance has started is still on record.
    SELECT e.* INTO v_of FROM batch_job_coordination e WHERE e.execution_id = p_of;
    p_new.restart_of := v_of.execution_id;
    IF v_of.total IS NOT NULL THEN
        p_new.status := 'RUNNING';
        p_new.step := v_of.step;
        p_new.total := v_of.total;
        p_new.started_at := v_now;
        p_new.carried := v_of.carried + (
            SELECT count(*) FROM batch_partitions p WHERE p.execution_id = p_of AND p.status = 'COMPLETED');
        p_new.first_id := nextval('rowlock.batch_partitions_id_seq');
        FOR r IN
            WITH made AS (
                INSERT INTO batch_partitions
                    (execution_id, step, partition_key, delivery, weight, slice, checkpoint, status, result,
                     last_error, resolution, available_at, ended_at)
                SELECT p_new.execution_id, p.step, p.partition_key,
                       CASE WHEN v.verdict = 'FAILED' THEN p.delivery ELSE p_new.delivery END,
                       p.weight, p.slice, p.checkpoint, v.verdict,
                       CASE WHEN v.verdict = 'COMPLETED' THEN p.resolution -> 'result' END,
                       CASE WHEN v.verdict = 'FAILED' THEN coalesce(p.last_error, jsonb_build_object(
                           'type', 'StartedBefore', 'outcome', 'unknown', 'message',
                           'it was started in the execution before; whether the work was done is not known'))
                           || '{"carried": true}' END,
                       CASE WHEN v.verdict = 'COMPLETED' THEN p.resolution END,
                       CASE WHEN v.verdict = 'PENDING' THEN v_now END,
                       CASE WHEN v.verdict <> 'PENDING' THEN v_now END
                FROM batch_partitions p
                LEFT JOIN batch_starts s
                    ON (s.job_name, s.instance_key) = (v_of.job_name, v_of.instance_key)
                    AND s.step = p.step AND s.partition_key = p.partition_key
                CROSS JOIN LATERAL (SELECT CASE
                    WHEN p.resolution ->> 'how' = 'completed' THEN 'COMPLETED'
                    WHEN p.delivery = 'AT_MOST_ONCE' AND s.job_name IS NOT NULL
                        THEN 'FAILED'  -- guard: what was started at most once is carried, not repeated
                    ELSE 'PENDING' END AS verdict) v
                WHERE p.execution_id = p_of
                  AND p.status <> 'COMPLETED'  -- guard: a restart does only what is unfinished
                ORDER BY p.id
                RETURNING batch_partitions.step, batch_partitions.status)
            SELECT m.step, count(*) FILTER (WHERE m.status = 'COMPLETED') AS completed,
                   count(*) FILTER (WHERE m.status = 'FAILED') AS failed
            FROM made m GROUP BY m.step ORDER BY m.step
        LOOP
            IF r.completed + r.failed > 0 THEN
                PERFORM rowlock._count(p_new.execution_id, r.step, '00000000-0000-0000-0000-000000000000',
                                       r.completed, r.failed, 0);
            END IF;
        END LOOP;
        p_new.last_id := nextval('rowlock.batch_partitions_id_seq');
    END IF;
    PERFORM rowlock._begin(p_new, p_parallelism);
    UPDATE batch_instances i SET state = 'RUNNING', execution_id = p_new.execution_id
    WHERE i.job_name = p_new.job_name AND i.instance_key = p_new.instance_key;
    PERFORM rowlock._event('execution_restarted', p_new.execution_id, NULL, NULL, p_actor, jsonb_build_object(
        'of', p_of, 'reason', p_reason, 'job', p_new.job_name, 'instance', p_new.instance_key));
    PERFORM pg_notify('rowlock', 'work');
END
$$;

-- A new execution of what p_of left unfinished, with the limits of that one. Answers with 'restarted',
-- 'exists' (the same launch key or id again), or the last execution of the instance and why not:
-- 'unknown', 'superseded' (p_of is not that last one), 'running', 'completed', 'abandoned'.
CREATE FUNCTION rowlock.restart(
    p_execution uuid, p_of uuid, p_launch_key text, p_adopt_after_seconds double precision,
    p_actor text, p_reason text, p_requester jsonb DEFAULT NULL
) RETURNS TABLE (execution_id uuid, outcome text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := rowlock.now();
    v_of batch_job_coordination;
    v_new batch_job_coordination;
    v_instance batch_instances;
BEGIN
    SELECT i.* INTO v_instance FROM batch_instances i
    WHERE (i.job_name, i.instance_key) = (
        SELECT e.job_name, e.instance_key FROM batch_job_coordination e WHERE e.execution_id = p_of)
    FOR UPDATE;  -- guard: of people who restart an execution one wins
    SELECT e.* INTO v_of FROM batch_job_coordination e WHERE e.execution_id = p_of;
    SELECT e.execution_id INTO execution_id FROM batch_job_coordination e
    WHERE e.launch_key = p_launch_key OR e.execution_id = p_execution;
    IF FOUND THEN
        outcome := 'exists';
    ELSIF v_of.execution_id IS NULL THEN
        execution_id := p_of;
        outcome := 'unknown';
    ELSIF v_instance.execution_id <> p_of THEN  -- guard: only the last execution of an instance is restarted
        execution_id := v_instance.execution_id;
        outcome := 'superseded';
    ELSIF v_instance.state NOT IN ('FAILED', 'CANCELLED') THEN  -- guard: only what failed or was cancelled is restarted
        execution_id := p_of;
        outcome := lower(v_instance.state);
    ELSE
        v_new.execution_id := p_execution;
        v_new.launch_key := p_launch_key;
        v_new.job_name := v_of.job_name;
        v_new.instance_key := v_of.instance_key;
        v_new.contract_hash := v_of.contract_hash;
        v_new.policy := v_of.policy;
        v_new.delivery := v_of.delivery;
        v_new.parameters := v_of.parameters;
        v_new.pool := v_of.pool;
        v_new.priority := v_of.priority;
        v_new.requester := coalesce(p_requester, v_of.requester);
        v_new.suspended := false;
        v_new.deletion_policy := v_of.deletion_policy;
        v_new.deadline_at := v_now + (v_of.deadline_at - v_of.requested_at);  -- the same length again
        v_new.requested_at := v_now;
        v_new.adopt_after := v_now + make_interval(secs => p_adopt_after_seconds);
        PERFORM rowlock._restart(
            v_new, p_of, (SELECT l.parallelism FROM batch_limits l WHERE l.execution_id = p_of), p_actor, p_reason);
        execution_id := p_execution;
        outcome := 'restarted';
    END IF;
    RETURN NEXT;
END
$$;

-- Suspend or resume. The row is locked as no claim locks it, so that it waits for none.
CREATE FUNCTION rowlock._set_suspended(p_execution uuid, p_suspended boolean, p_actor text, p_reason text)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_execution batch_job_coordination;
BEGIN
    SELECT e.* INTO v_execution FROM batch_job_coordination e
    WHERE e.execution_id = p_execution FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN 'unknown';
    ELSIF v_execution.ended_at IS NOT NULL THEN  -- guard: terminal states never change
        RETURN lower(v_execution.status);
    ELSIF v_execution.suspended = p_suspended THEN
        RETURN 'same';
    END IF;
    UPDATE batch_job_coordination e SET suspended = p_suspended WHERE e.execution_id = p_execution;
    PERFORM rowlock._event(CASE WHEN p_suspended THEN 'execution_suspended' ELSE 'execution_resumed' END,
                           p_execution, NULL, NULL, p_actor, jsonb_build_object('reason', p_reason));
    IF p_suspended THEN
        PERFORM pg_notify('rowlock', 'control');
        RETURN 'suspended';
    END IF;
    PERFORM pg_notify('rowlock', 'work');
    PERFORM pg_notify('rowlock', 'adopt');
    RETURN 'resumed';
END
$$;

-- Nothing more of the execution is claimed, and one that nobody has begun is not begun; what runs goes on.
-- Answers 'suspended', 'same', 'unknown', or the terminal status that it has, in lower case.
CREATE FUNCTION rowlock.suspend(p_execution uuid, p_actor text, p_reason text) RETURNS text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$ SELECT rowlock._set_suspended(p_execution, true, p_actor, p_reason) $$;

-- The end of a suspend. Answers 'resumed', 'same', 'unknown', or the terminal status in lower case.
CREATE FUNCTION rowlock.resume(p_execution uuid, p_actor text, p_reason text) RETURNS text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$ SELECT rowlock._set_suspended(p_execution, false, p_actor, p_reason) $$;

-- From now on the limit is counted. The caller holds the execution FOR UPDATE: nothing of it is being claimed, and
-- whoever claims afterwards sees the limit.
CREATE FUNCTION rowlock._settle_limit(p_execution uuid) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    UPDATE batch_limits l SET settled = true WHERE l.execution_id = p_execution;
    UPDATE batch_job_coordination e SET limited = true
    WHERE e.execution_id = p_execution AND e.ended_at IS NULL;
$$;

-- Change limits of an execution: priority, parallelism (null: none), deadline_seconds (from its request; null:
-- none), deletion_policy. Answers 'changed', 'same', 'unknown', or the terminal status in lower case.
--
-- The first parallelism of an execution that runs is written unsettled: claims that are under way know nothing of
-- it and could not be counted. Until they are over (the same call again, or the next pass of expire, looks) the
-- execution has no room; without that, the look would starve behind claims that overlap.
CREATE FUNCTION rowlock.set_limits(p_execution uuid, p_changes jsonb, p_actor text, p_reason text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_execution batch_job_coordination;
    v_limit batch_limits;
    v_parallelism integer;
    v_planned boolean;  -- nothing of it can be claimed yet
    v_new batch_job_coordination;
BEGIN
    PERFORM rowlock._check_limits(
        p_changes, ARRAY['priority', 'parallelism', 'deadline_seconds', 'deletion_policy']);
    IF EXISTS (SELECT FROM batch_limits l WHERE l.execution_id = p_execution AND NOT l.settled) THEN
        SELECT e.* INTO v_execution FROM batch_job_coordination e
        WHERE e.execution_id = p_execution FOR UPDATE;  -- guard: claims that know of no limit are over
        PERFORM rowlock._settle_limit(p_execution);
        PERFORM pg_notify('rowlock', 'work');
    ELSE
        SELECT e.* INTO v_execution FROM batch_job_coordination e
        WHERE e.execution_id = p_execution FOR NO KEY UPDATE;
    END IF;
    IF v_execution.execution_id IS NULL THEN
        RETURN 'unknown';
    ELSIF v_execution.ended_at IS NOT NULL THEN  -- guard: terminal states never change
        RETURN lower(v_execution.status);
    END IF;
    SELECT l.* INTO v_limit FROM batch_limits l WHERE l.execution_id = p_execution;
    v_parallelism := CASE WHEN p_changes ? 'parallelism' THEN (p_changes ->> 'parallelism')::numeric
                     ELSE v_limit.parallelism END;
    v_planned := v_execution.status IN ('REQUESTED', 'PLANNING');
    v_new := v_execution;
    v_new.priority := coalesce((p_changes ->> 'priority')::numeric, v_execution.priority);
    v_new.deletion_policy := coalesce(p_changes ->> 'deletion_policy', v_execution.deletion_policy);
    IF p_changes ? 'deadline_seconds' THEN
        v_new.deadline_at := v_execution.requested_at
            + make_interval(secs => (p_changes ->> 'deadline_seconds')::double precision);
    END IF;
    IF v_new IS NOT DISTINCT FROM v_execution AND v_parallelism IS NOT DISTINCT FROM v_limit.parallelism THEN
        RETURN 'same';
    END IF;
    IF v_parallelism IS DISTINCT FROM v_limit.parallelism THEN
        INSERT INTO batch_limits AS l (execution_id, parallelism, settled)
        VALUES (p_execution, v_parallelism, v_planned)
        ON CONFLICT (execution_id) DO UPDATE SET parallelism = excluded.parallelism;
        v_new.limited := v_execution.limited OR v_planned;
    END IF;
    -- Where the limit is not settled yet, that writes the row. Not here without need: a claim that locks the row
    -- (KEY SHARE) at the very moment in which an update moves it to another page is not waited for any more.
    IF v_new IS DISTINCT FROM v_execution OR v_limit.execution_id IS NOT NULL THEN
        UPDATE batch_job_coordination e
        SET priority = v_new.priority, limited = v_new.limited, deletion_policy = v_new.deletion_policy,
            deadline_at = v_new.deadline_at
        WHERE e.execution_id = p_execution;
    END IF;
    PERFORM rowlock._event('limits_changed', p_execution, NULL, NULL, p_actor,
                           jsonb_build_object('reason', p_reason, 'changes', p_changes));
    PERFORM pg_notify('rowlock', 'control');
    PERFORM pg_notify('rowlock', 'work');
    RETURN 'changed';
END
$$;

-- One pass over what has become due: executions past their deadline are stopped, then closed (FAILED, once
-- nothing of them runs), those that nobody is left to end are ended, and new limits are settled. What is locked is left to the next pass. Answers how many
-- deadlines it has found.
CREATE FUNCTION rowlock.expire(p_actor text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_now timestamptz := rowlock.now();
    v_found bigint := 0;
    v_left bigint := 50000;  -- partitions
    v_execution batch_job_coordination;
    r record;
BEGIN
    FOR r IN
        SELECT e.execution_id FROM batch_job_coordination e
        WHERE e.execution_id = ANY (ARRAY(SELECT l.execution_id FROM batch_limits l WHERE NOT l.settled))
        ORDER BY e.execution_id FOR UPDATE SKIP LOCKED  -- guard: claims that know of no limit are over
    LOOP
        PERFORM rowlock._settle_limit(r.execution_id);
        PERFORM pg_notify('rowlock', 'work');
    END LOOP;
    FOR r IN
        SELECT e.execution_id, e.job_name, e.instance_key, e.stopping FROM batch_job_coordination e
        WHERE e.execution_id = ANY (ARRAY(
            SELECT o.execution_id FROM batch_job_coordination o
            WHERE o.deadline_at <= v_now AND o.ended_at IS NULL AND o.status <> 'CLOSING'
            ORDER BY o.deadline_at LIMIT 100) || ARRAY(SELECT l FROM rowlock._left_ending() AS l LIMIT 100))
          AND e.ended_at IS NULL AND (e.stopping OR e.deadline_at <= v_now)
        ORDER BY e.execution_id FOR NO KEY UPDATE SKIP LOCKED
    LOOP
        IF NOT r.stopping THEN
            -- Committed before the row is wanted for itself alone, as with a cancel: no new claims.
            UPDATE batch_job_coordination e
            SET stopping = true, failure_reason = 'DeadlineExceeded',
                failure_message = format('it had until %s', e.deadline_at)
            WHERE e.execution_id = r.execution_id;
            PERFORM rowlock._event('deadline_exceeded', r.execution_id, NULL, NULL, p_actor, NULL);
            PERFORM pg_notify('rowlock', 'control');
            v_found := v_found + 1;
        END IF;
        PERFORM FROM batch_instances i
        WHERE i.job_name = r.job_name AND i.instance_key = r.instance_key FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        SELECT e.* INTO v_execution FROM batch_job_coordination e
        WHERE e.execution_id = r.execution_id FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        v_left := v_left - rowlock._close(
            r.execution_id, v_execution.failure_reason, v_execution.failure_message, v_left);
        PERFORM rowlock._settle(r.execution_id, p_actor);
        EXIT WHEN v_left = 0;  -- the rest of a large plan is its master's, or the next pass's
    END LOOP;
    RETURN v_found;
END
$$;

-- Give an instance up, or raise RL004 where somebody is about to end a claim. That must not be waited for: the
-- same transaction may claim afterwards, and although it skips locked executions, PostgreSQL lets it wait for
-- one that was also updated since it looked (tried: a deadlock in half a minute of the storm of tests).
CREATE FUNCTION rowlock._abandon(p_execution uuid, p_actor text, p_reason text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_now timestamptz := rowlock.now();
    v_execution batch_job_coordination;
    v_instance batch_instances;
    r record;
BEGIN
    SELECT l.* INTO v_execution FROM rowlock._lock_execution(p_execution) l;
    IF v_execution.execution_id IS NULL THEN
        RETURN 'unknown';
    ELSIF v_execution.status = 'COMPLETED' THEN  -- guard: what has COMPLETED is not given up
        RETURN 'completed';
    END IF;
    SELECT i.* INTO v_instance FROM batch_instances i
    WHERE i.job_name = v_execution.job_name AND i.instance_key = v_execution.instance_key;
    IF v_instance.state = 'ABANDONED' THEN
        RETURN 'abandoned';
    ELSIF v_instance.execution_id <> p_execution THEN  -- guard: a later execution stands for the instance
        RETURN 'superseded';
    END IF;
    IF v_execution.ended_at IS NULL THEN
        FOR r IN
            WITH live AS MATERIALIZED (
                SELECT p.id, p.status = 'CLAIMED' AND p.delivery = 'AT_MOST_ONCE' AS started
                FROM batch_partitions p
                WHERE p.execution_id = p_execution AND p.status IN ('PENDING', 'CLAIMED')
                ORDER BY p.id FOR UPDATE SKIP LOCKED
            ), ended AS (
                UPDATE batch_partitions p
                SET status = CASE WHEN l.started
                             THEN 'FAILED'  -- guard: a start is not forgotten
                             ELSE 'CANCELLED' END,
                    ended_at = v_now,
                    last_error = CASE WHEN l.started THEN jsonb_build_object(
                        'type', 'Abandoned', 'outcome', 'unknown', 'message',
                        'given up while it ran; whether the work was done is not known') ELSE p.last_error END
                FROM live l WHERE p.id = l.id
                RETURNING p.step, p.status)
            SELECT e.step, count(*) FILTER (WHERE e.status = 'FAILED') AS failed,
                   count(*) FILTER (WHERE e.status = 'CANCELLED') AS cancelled
            FROM ended e GROUP BY e.step ORDER BY e.step
        LOOP
            PERFORM rowlock._count(p_execution, r.step, '00000000-0000-0000-0000-000000000000',
                                   0, r.failed, r.cancelled);
        END LOOP;
        IF rowlock._is_live(p_execution) THEN  -- guard: nothing can still change in what has ended
            RAISE EXCEPTION 'claims of execution % are just ending', p_execution USING ERRCODE = 'RL004';
        END IF;
        PERFORM rowlock._end(p_execution, 'ABANDONED', rowlock._recount(p_execution), NULL, 'Abandoned',
                             coalesce(p_reason, 'abandoned by ' || p_actor), p_actor);
        PERFORM pg_notify('rowlock', 'control');
    ELSE
        UPDATE batch_instances i SET state = 'ABANDONED'
        WHERE i.job_name = v_execution.job_name AND i.instance_key = v_execution.instance_key;
    END IF;
    PERFORM rowlock._event('execution_abandoned', p_execution, NULL, NULL, p_actor,
                           jsonb_build_object('reason', p_reason));
    RETURN 'abandoned';
END
$$;

-- Give an instance up: what waits is CANCELLED, claims end in this transaction (their attempts may still
-- run, and will find their claims gone), and the instance refuses launches for ever. Of an execution that has
-- FAILED or was CANCELLED only the instance changes. Answers 'abandoned', 'completed', 'superseded' (it is not
-- the last of its instance) or 'unknown'. Under load it is quick only after request_cancel.
CREATE FUNCTION rowlock.abandon(p_execution uuid, p_actor text, p_reason text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
BEGIN
    FOR v_try IN 1..500 LOOP
        BEGIN
            RETURN rowlock._abandon(p_execution, p_actor, p_reason);
        EXCEPTION WHEN SQLSTATE 'RL004' THEN
            PERFORM pg_sleep(0.01);  -- every lock of this try is given back meanwhile
        END;
    END LOOP;
    RAISE EXCEPTION 'claims of execution % are held by transactions that do not end', p_execution
        USING ERRCODE = '55P03';
END
$$;

-- A person's word on a FAILED partition, for the next execution of the instance: 'completed' carries it with
-- p_result, 'retry' runs it again, also if it was started at most once (its start is deleted). Answers
-- 'resolved', 'same', 'unknown', 'not_failed', 'superseded' (not the last execution of its instance), 'completed' or
-- 'abandoned' (the instance, which has no next execution), or 'orphan': the attempt in doubt still runs on some
-- node, and p_force was not given.
CREATE FUNCTION rowlock.resolve(
    p_execution uuid, p_partition_key text, p_how text, p_result jsonb, p_force boolean, p_actor text,
    p_reason text, p_step text DEFAULT 'main'
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_instance batch_instances;
    v_row batch_partitions;
    v_resolution jsonb := jsonb_build_object('how', p_how)
        || CASE WHEN p_how = 'completed' AND p_result IS NOT NULL
           THEN jsonb_build_object('result', p_result) ELSE '{}' END;
BEGIN
    IF p_how IS NULL OR p_how NOT IN ('completed', 'retry') THEN
        RAISE EXCEPTION 'a partition is resolved as completed or retry, not %', coalesce(p_how, 'NULL')
            USING ERRCODE = '22023';
    END IF;
    SELECT i.* INTO v_instance FROM batch_instances i
    WHERE (i.job_name, i.instance_key) = (
        SELECT e.job_name, e.instance_key FROM batch_job_coordination e WHERE e.execution_id = p_execution)
    FOR UPDATE;  -- guard: a restart sees all of a resolution or nothing
    SELECT p.* INTO v_row FROM batch_partitions p
    WHERE p.execution_id = p_execution AND p.step = p_step AND p.partition_key = p_partition_key FOR UPDATE;
    IF v_instance.execution_id IS NULL OR v_row.id IS NULL THEN
        RETURN 'unknown';
    ELSIF v_instance.execution_id <> p_execution THEN  -- guard: what a restart has taken over is resolved there
        RETURN 'superseded';
    ELSIF v_instance.state IN ('COMPLETED', 'ABANDONED') THEN
        RETURN lower(v_instance.state);  -- no execution will follow that could go by it
    ELSIF v_row.status <> 'FAILED' THEN  -- guard: only a FAILED partition is in doubt
        RETURN 'not_failed';
    ELSIF v_row.resolution - '{by,why,at}'::text[] = v_resolution THEN
        RETURN 'same';
    ELSIF p_how = 'retry' AND NOT p_force AND EXISTS (  -- guard: a start that still runs is not repeated
        SELECT FROM batch_starts s JOIN batch_nodes n
            ON n.status <> 'REMOVED'
            AND n.orphans @> jsonb_build_array(jsonb_build_object('token', s.claim_token))
        WHERE (s.job_name, s.instance_key) = (v_instance.job_name, v_instance.instance_key)
          AND s.step = p_step AND s.partition_key = p_partition_key) THEN
        RETURN 'orphan';
    END IF;
    UPDATE batch_partitions p
    SET resolution = v_resolution
        || jsonb_build_object('by', p_actor, 'why', p_reason, 'at', rowlock.now())
    WHERE p.id = v_row.id;
    IF p_how = 'retry' THEN
        DELETE FROM batch_starts s
        WHERE (s.job_name, s.instance_key) = (v_instance.job_name, v_instance.instance_key)
          AND s.step = p_step AND s.partition_key = p_partition_key;
    END IF;
    PERFORM rowlock._event('partition_resolved', p_execution, v_row.id, NULL, p_actor,
                           jsonb_build_object('reason', p_reason, 'how', p_how, 'forced', p_force));
    RETURN 'resolved';
END
$$;

-- Delete what is old, at most p_limit rows of each kind in one call: the executions of instances whose last one
-- ended so long ago (all of them in one transaction, their partitions afterwards), events, and nodes that
-- were removed as long ago as events are kept. NULL keeps for ever. Instances and starts always stay.
-- One caller at a time; another one finds nothing to do. more: call again.
CREATE FUNCTION rowlock.retain(
    p_completed_seconds double precision, p_failed_seconds double precision,
    p_events_seconds double precision, p_limit integer
) RETURNS TABLE (executions bigint, partitions bigint, events bigint, nodes bigint, more boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := rowlock.now();
    v_completed timestamptz := v_now - make_interval(secs => p_completed_seconds);
    v_failed timestamptz := v_now - make_interval(secs => p_failed_seconds);
    v_events timestamptz := v_now - make_interval(secs => p_events_seconds);
    v_chain uuid[];
    r record;
BEGIN
    executions := 0; partitions := 0; events := 0; nodes := 0; more := false;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('rowlock.retain', 0)) THEN
        RETURN NEXT;
        RETURN;
    END IF;
    FOR r IN
        SELECT i.job_name, i.instance_key, i.execution_id
        FROM batch_job_coordination e
        JOIN batch_instances i
            ON i.job_name = e.job_name AND i.instance_key = e.instance_key
            AND i.execution_id = e.execution_id  -- guard: while its last execution is young, none of an instance goes
        WHERE e.ended_at < greatest(v_completed, v_failed)
          AND e.ended_at < CASE WHEN e.status = 'COMPLETED' THEN v_completed ELSE v_failed END
        ORDER BY e.ended_at LIMIT p_limit
        FOR UPDATE OF i SKIP LOCKED  -- guard: a restart that is under way keeps what it restarts
    LOOP
        EXIT WHEN executions >= p_limit;
        WITH RECURSIVE chain AS (
            SELECT e.execution_id, e.restart_of FROM batch_job_coordination e
            WHERE e.execution_id = r.execution_id
            UNION ALL
            SELECT e.execution_id, e.restart_of
            FROM chain c JOIN batch_job_coordination e ON e.execution_id = c.restart_of)
        SELECT array_agg(c.execution_id) INTO v_chain FROM chain c;
        UPDATE batch_instances i
        SET launch_keys = i.launch_keys || ARRAY(
            SELECT e.launch_key FROM batch_job_coordination e
            WHERE e.execution_id = ANY (v_chain) AND e.launch_key IS NOT NULL ORDER BY e.exec_no)
        WHERE i.job_name = r.job_name AND i.instance_key = r.instance_key;
        INSERT INTO batch_purges (execution_id) SELECT unnest(v_chain);
        DELETE FROM batch_job_coordination e WHERE e.execution_id = ANY (v_chain);
        DELETE FROM batch_limits l WHERE l.execution_id = ANY (v_chain);
        DELETE FROM batch_counts c WHERE c.execution_id = ANY (v_chain);
        DELETE FROM batch_staging s WHERE s.execution_id = ANY (v_chain);
        executions := executions + cardinality(v_chain);
    END LOOP;
    DELETE FROM batch_partitions p WHERE p.id = ANY (ARRAY(
        SELECT q.id FROM batch_purges g
        CROSS JOIN LATERAL (
            SELECT o.id FROM batch_partitions o WHERE o.execution_id = g.execution_id LIMIT p_limit) q
        LIMIT p_limit));
    GET DIAGNOSTICS partitions = ROW_COUNT;
    DELETE FROM batch_purges g
    WHERE (SELECT p.id FROM batch_partitions p WHERE p.execution_id = g.execution_id LIMIT 1) IS NULL;
    -- Their ids are in the order of their times, but for the moment that a transaction takes.
    DELETE FROM batch_events v WHERE v.id = ANY (ARRAY(
        SELECT o.id FROM (SELECT x.id, x.at FROM batch_events x ORDER BY x.id LIMIT p_limit) o
        WHERE o.at < v_events));
    GET DIAGNOSTICS events = ROW_COUNT;
    DELETE FROM batch_nodes n WHERE n.node_id = ANY (ARRAY(
        SELECT o.node_id FROM batch_nodes o
        WHERE o.removed_at < v_events
          AND o.recovered_at IS NOT NULL  -- guard: a node whose claims are not all recovered stays
        LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS nodes = ROW_COUNT;
    -- Locks of claims that are gone; the token that was looked at names the row.
    DELETE FROM batch_locks l
    USING (SELECT o.name, o.claim_token FROM batch_locks o
           WHERE NOT rowlock._stands(o.partition_id, o.claim_token)  -- guard: who holds a lock keeps it
           LIMIT p_limit) void
    WHERE l.name = void.name
      AND l.claim_token = void.claim_token;  -- guard: a lock that was taken over meanwhile stays
    more := executions >= p_limit OR events >= p_limit OR nodes >= p_limit
        OR EXISTS (SELECT FROM batch_purges);
    IF executions + partitions + events + nodes > 0 THEN
        PERFORM rowlock._event('purged', NULL, NULL, NULL, session_user, jsonb_build_object(
            'executions', executions, 'partitions', partitions, 'events', events, 'nodes', nodes));
    END IF;
    RETURN NEXT;
END
$$;

RESET search_path;
RESET ROLE;
