-- Claims: take partitions, and every way in which a holder's claim ends. Each write names its token,
-- and the token is compared by the statement that writes.
--
-- COLLATE "C" beside a row's id: without it the planner may prefer the partial index on CLAIMED rows to
-- the primary key, because the statistics were taken when there were none, and then each completion
-- reads every claim of the fleet (tried: 20 ms among 20,000 claims, 1 ms with it). An index of another
-- collation cannot serve the condition.
SET LOCAL ROLE rowlock_owner;
SET LOCAL search_path = rowlock, pg_temp;

-- Claim up to p_slots partitions to start at once and p_prefetch more to keep ready. A claim that
-- may not claim returns no rows and never raises. p_idle says that the node runs nothing at all, NULL that it cannot come
-- to that by claiming nothing, because it plans or finishes an execution;
-- p_seed (any number, new at each call) makes the order inside a priority fair in expectation.
-- p_after, {execution: [weight, id], …}, says behind which place of an execution's line to look; see passed.
CREATE FUNCTION rowlock.claim(
    p_node uuid, p_slots integer, p_prefetch integer, p_idle boolean, p_seed bigint, p_after jsonb DEFAULT '{}'
) RETURNS TABLE (
    id bigint, execution_id uuid, step text, partition_key text, claim_token uuid, claims integer,
    failures integer, lost integer, alone boolean, weight integer, started boolean, delivery text,
    slice text, checkpoint text,
    waited double precision  -- seconds from when it could be claimed
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := rowlock.now();
    v_want integer := p_slots + p_prefetch;
    v_pool text;
    v_jobs jsonb;
    v_only uuid;
    v_alone boolean;
    v_exec uuid[];
    v_share integer[];
    v_delivery text[];
    v_unsettled uuid[];  -- executions that have got a limit just now
    v_held uuid[];  -- executions whose limits this claim has locked
    v_ids bigint[];
    v_first integer;
    v_next integer := 1;
    v_kind text;
    v_row batch_partitions;
BEGIN
    IF v_want < 1 THEN
        RETURN;
    END IF;
    SELECT n.pool, n.jobs, n.only_execution INTO v_pool, v_jobs, v_only
    FROM batch_nodes n WHERE n.node_id = p_node AND n.status = 'ACTIVE' AND NOT n.draining;
    IF NOT FOUND THEN
        RETURN;
    END IF;

    -- A partition whose next loss would be its last runs only on a node that runs nothing else; a
    -- node that sees one takes no other work, so that it soon is such a node.
    v_alone := p_idle IS NOT NULL AND EXISTS (
        SELECT FROM (
            SELECT p.execution_id FROM batch_partitions p
            WHERE p.status = 'PENDING' AND p.ready AND p.alone
            ORDER BY p.execution_id, p.id OFFSET 0) p  -- this index first: it is nearly always empty
        JOIN batch_job_coordination e USING (execution_id)
        WHERE e.pool = v_pool AND e.status = 'RUNNING' AND NOT e.stopping AND NOT e.suspended
          AND (v_only IS NULL OR e.execution_id = v_only)
          AND rowlock._accepts(v_jobs, e.job_name, e.contract_hash)
          AND (NOT e.limited OR coalesce(rowlock._room(e.execution_id), 1) > 0));
    IF v_alone AND (NOT p_idle OR p_slots < 1) THEN  -- guard: a suspect runs alone
        RETURN;
    END IF;
    IF v_alone THEN
        v_want := 1;
    END IF;

    -- A second look only where others were quicker and took the last places of limited executions.
    FOR v_look IN 1..3 LOOP
        v_unsettled := ARRAY(SELECT l.execution_id FROM batch_limits l WHERE NOT l.settled);
        -- 1. The executions: by priority, inside one first by kind of delivery (one claim serves one kind)
        -- and then in an order, both drawn from the seed; each with its share. SKIP LOCKED: a long cancel
        -- stalls nobody, and no claim commits after it. Those at their limit take nobody's share.
        SELECT array_agg(y.execution_id ORDER BY y.priority DESC, y.kind, y.h),
               array_agg(y.share ORDER BY y.priority DESC, y.kind, y.h),
               array_agg(y.delivery ORDER BY y.priority DESC, y.kind, y.h)
        INTO v_exec, v_share, v_delivery
        FROM (
            SELECT e.execution_id, x.priority, x.kind, x.h, x.share, e.delivery FROM (
                SELECT e.execution_id, e.priority, hashtextextended(e.delivery, p_seed) AS kind,
                       hashint8extended(e.exec_no, p_seed) AS h,
                       ceil(v_want::numeric / count(*) OVER (PARTITION BY e.priority, e.delivery))::integer AS share
                FROM batch_job_coordination e
                WHERE e.pool = v_pool AND e.status = 'RUNNING' AND NOT e.stopping
                  AND NOT e.suspended  -- guard: a suspended execution gives nothing
                  AND (v_only IS NULL OR e.execution_id = v_only)
                  AND rowlock._accepts(v_jobs, e.job_name, e.contract_hash)
                  AND CASE WHEN v_alone
                      THEN (SELECT p.id FROM batch_partitions p WHERE p.execution_id = e.execution_id
                              AND p.status = 'PENDING' AND p.ready AND p.alone
                            ORDER BY p.id LIMIT 1)
                      ELSE (SELECT p.id FROM batch_partitions p WHERE p.execution_id = e.execution_id
                              AND p.status = 'PENDING' AND p.ready AND NOT p.alone
                              AND (-p.weight::bigint, p.id) > (
                                  coalesce(-(p_after -> e.execution_id::text ->> 0)::bigint, -2147483648),
                                  coalesce((p_after -> e.execution_id::text ->> 1)::bigint, 0))
                            ORDER BY -p.weight::bigint DESC, p.id DESC LIMIT 1)  -- from the end, as the beat does
                      END IS NOT NULL
                  AND (NOT e.limited OR coalesce(rowlock._room(e.execution_id), 1) > 0)
                  AND e.execution_id <> ALL (v_unsettled)  -- or the settling starves behind claims that overlap
                ORDER BY e.priority DESC, kind, h
                LIMIT v_want) x
            JOIN batch_job_coordination e USING (execution_id)
            WHERE NOT e.stopping
              AND e.status = 'RUNNING'  -- guard: no claim in an execution that is ending
            ORDER BY e.execution_id
            FOR KEY SHARE OF e SKIP LOCKED) y;  -- guard: whoever locks the execution sees this claim
        IF v_exec IS NULL THEN
            RETURN;
        END IF;

        -- 2. The own node row: from here on nobody can remove this node before the claim commits.
        PERFORM FROM batch_nodes n
        WHERE n.node_id = p_node
          AND n.status = 'ACTIVE'  -- guard: an unreachable or removed node claims nothing
          AND NOT n.draining  -- guard: a draining node claims nothing
        FOR KEY SHARE;  -- guard: nobody removes this node before the claim commits
        IF NOT FOUND THEN
            RETURN;
        END IF;

        -- A statement of its own behind the locks of the executions: a limit that was settled before those
        -- were taken is seen, and one that is set later is not settled before this claim has committed.
        EXIT WHEN NOT EXISTS (
            SELECT FROM batch_limits l WHERE l.execution_id = ANY (v_exec));  -- guard: also a limit set since the look

        -- The limits. Whoever holds a row has the only claim under way in its execution, and the count is a
        -- statement of its own behind the lock: it sees every claim before. Later looks come too late for
        -- the order of locks.
        IF v_look = 1 THEN
            v_held := ARRAY(
                SELECT l.execution_id FROM batch_limits l WHERE l.execution_id = ANY (v_exec)
                ORDER BY l.execution_id FOR UPDATE);  -- guard: claims of a limited execution take turns
        ELSE
            v_held := v_held || ARRAY(
                SELECT l.execution_id FROM batch_limits l WHERE l.execution_id = ANY (v_exec)
                ORDER BY l.execution_id FOR UPDATE SKIP LOCKED);
        END IF;
        SELECT array_agg(x.id ORDER BY x.o),
               array_agg(least(x.share, r.room) ORDER BY x.o),  -- guard: never more claims than the limit
               array_agg(x.delivery ORDER BY x.o)
        INTO v_exec, v_share, v_delivery
        FROM unnest(v_exec, v_share, v_delivery) WITH ORDINALITY AS x (id, share, delivery, o)
        LEFT JOIN LATERAL (
            SELECT true AS there, rowlock._room(l.execution_id) AS room
            FROM batch_limits l WHERE l.execution_id = x.id) r ON true
        WHERE r.there IS NULL
           OR (x.id = ANY (v_held) AND coalesce(r.room, 1) > 0);  -- guard: nothing from an execution at its limit
        EXIT WHEN v_exec IS NOT NULL;
    END LOOP;

    IF v_exec IS NULL THEN
        RETURN;
    END IF;

    -- 3. The partitions. Locking inside the lateral and = ANY(array) outside: joined as a FROM item
    -- the update becomes a table scan under a generic plan.
    IF v_alone THEN
        RETURN QUERY UPDATE batch_partitions t
        SET status = 'CLAIMED', assigned_node = p_node, claim_token = gen_random_uuid(),
            claims = t.claims + 1, claimed_at = v_now, started_at = v_now
        WHERE t.id = ANY (ARRAY(
            SELECT p.id FROM batch_partitions p
            WHERE p.execution_id = ANY (v_exec) AND p.status = 'PENDING' AND p.ready AND p.alone
            ORDER BY p.id LIMIT 1 FOR UPDATE SKIP LOCKED))
        RETURNING t.id, t.execution_id, t.step, t.partition_key, t.claim_token, t.claims, t.failures,
            t.lost, t.alone, t.weight, true, t.delivery, t.slice::text, t.checkpoint::text,
            extract(epoch FROM v_now - t.available_at)::double precision;
        RETURN;
    END IF;

    -- One claim takes either AT_LEAST_ONCE rows or a single AT_MOST_ONCE row, from the first stretch of
    -- executions of one kind that has any: what comes later in the order has to wait.
    WHILE v_next <= cardinality(v_exec) LOOP
        v_first := v_next;
        v_kind := v_delivery[v_first];
        WHILE v_delivery[v_next] = v_kind LOOP  -- NULL behind the last one
            v_next := v_next + 1;
        END LOOP;
        CONTINUE WHEN v_kind = 'AT_MOST_ONCE' AND p_slots < 1;  -- never prefetched
        FOR v_try IN 1..100 LOOP
            v_ids := ARRAY(
                SELECT p.id
                FROM unnest(v_exec[v_first:v_next - 1], v_share[v_first:v_next - 1])
                    WITH ORDINALITY AS e (x, share, o)
                CROSS JOIN LATERAL (
                    SELECT p.id FROM batch_partitions p
                    WHERE p.execution_id = e.x AND p.status = 'PENDING' AND p.ready AND NOT p.alone
                      AND (-p.weight::bigint, p.id) > (
                          coalesce(-(p_after -> e.x::text ->> 0)::bigint, -2147483648),
                          coalesce((p_after -> e.x::text ->> 1)::bigint, 0))
                    ORDER BY -p.weight::bigint, p.id
                    LIMIT CASE WHEN v_kind = 'AT_MOST_ONCE' THEN 1 ELSE e.share END
                    FOR UPDATE SKIP LOCKED) p
                LIMIT CASE WHEN v_kind = 'AT_MOST_ONCE' THEN 1 ELSE v_want END);
            EXIT WHEN cardinality(v_ids) = 0;
            IF v_kind = 'AT_LEAST_ONCE' THEN
                RETURN QUERY UPDATE batch_partitions t
                SET status = 'CLAIMED', assigned_node = p_node, claim_token = gen_random_uuid(),
                    claims = t.claims + 1, claimed_at = v_now,
                    started_at = CASE WHEN array_position(v_ids, t.id) <= p_slots THEN v_now END
                WHERE t.id = ANY (v_ids)
                  -- guard: a row with a loss in its history is never prefetched
                  AND (t.lost = 0 OR array_position(v_ids, t.id) <= p_slots)
                RETURNING t.id, t.execution_id, t.step, t.partition_key, t.claim_token, t.claims,
                    t.failures, t.lost, t.alone, t.weight, t.started_at IS NOT NULL, t.delivery, t.slice::text,
                    t.checkpoint::text, extract(epoch FROM v_now - t.available_at)::double precision;
                RETURN;
            END IF;
            UPDATE batch_partitions t
            SET status = 'CLAIMED', assigned_node = p_node, claim_token = gen_random_uuid(),
                claims = t.claims + 1, claimed_at = v_now, started_at = v_now
            WHERE t.id = v_ids[1]
            RETURNING t.* INTO v_row;
            -- guard: one start for ever, over all executions of the instance
            INSERT INTO batch_starts (job_name, instance_key, step, partition_key, execution_id,
                                      claim_token, node_id, started_at)
            SELECT e.job_name, e.instance_key, v_row.step, v_row.partition_key, e.execution_id,
                   v_row.claim_token, p_node, v_now
            FROM batch_job_coordination e WHERE e.execution_id = v_row.execution_id
            ON CONFLICT DO NOTHING;
            IF FOUND THEN
                RETURN QUERY SELECT v_row.id, v_row.execution_id, v_row.step, v_row.partition_key,
                    v_row.claim_token, v_row.claims, v_row.failures, v_row.lost, v_row.alone, v_row.weight, true,
                    v_row.delivery, v_row.slice::text, v_row.checkpoint::text,
                    extract(epoch FROM v_now - v_row.available_at)::double precision;
                RETURN;
            END IF;
            UPDATE batch_partitions t
            SET status = 'FAILED', started_at = NULL, ended_at = v_now, last_error = jsonb_build_object(
                    'type', 'StartedBefore', 'outcome', 'unknown', 'message',
                    'this AT_MOST_ONCE partition was started before, in another execution')
            WHERE t.id = v_row.id;
            PERFORM rowlock._count(v_row.execution_id, v_row.step, p_node, 0, 1, 0);
            PERFORM rowlock._event('partition_started_before', v_row.execution_id, v_row.id, p_node,
                                   'node ' || p_node, NULL);
            -- Look on in the same execution only: counters are locked in one order by everybody.
            v_exec := ARRAY[v_row.execution_id];
            v_share := ARRAY[1];
            v_first := 1;
            v_next := 2;
        END LOOP;
    END LOOP;
END
$$;

-- Up to which place of a line nothing waits, for the lines of this node in which it takes p_seconds or more to find
-- that: there a claim may begin to look (p_after) until something comes back before it. A partition that was claimed is
-- no longer in the index of those that wait, but while somebody holds an old snapshot its entry is, and everybody who
-- comes from the beginning of the line passes over it. Measured here, because a way to the server may be long as well.
CREATE FUNCTION rowlock.passed(p_node uuid, p_seconds double precision)
RETURNS TABLE (execution_id uuid, weight integer, id bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_began timestamptz;
BEGIN
    FOR execution_id IN
        SELECT e.execution_id FROM batch_nodes n
        JOIN batch_job_coordination e ON e.pool = n.pool AND e.status = 'RUNNING'
        WHERE n.node_id = p_node AND NOT e.stopping AND NOT e.suspended
          AND (n.only_execution IS NULL OR e.execution_id = n.only_execution)
          AND e.total >= 1000  -- of fewer nothing is worth a place in each claim
          AND rowlock._accepts(n.jobs, e.job_name, e.contract_hash)
        ORDER BY e.total DESC LIMIT 100
    LOOP
        v_began := rowlock.now();
        SELECT p.weight, p.id - 1 INTO weight, id FROM batch_partitions p
        WHERE p.execution_id = passed.execution_id AND p.status = 'PENDING' AND p.ready AND NOT p.alone
        ORDER BY -p.weight::bigint, p.id LIMIT 1;
        IF rowlock.now() - v_began >= make_interval(secs => p_seconds) THEN
            weight := coalesce(passed.weight, -2147483648);  -- the end of the line: nobody waits
            id := coalesce(passed.id, 9223372036854775807);
            RETURN NEXT;
        END IF;
    END LOOP;
END
$$;

-- Completions of one node, in one statement. Each answer is 'completed' (also for a repetition of
-- one that was accepted before) or 'lost'.
-- Rows are locked in the order of the primary key, which a bitmap scan would not keep: a node that sends the same batch
-- again over its other connection may sort it otherwise (tried: a deadlock).
CREATE FUNCTION rowlock.complete(p_node uuid, p_ids bigint[], p_tokens uuid[], p_results jsonb[])
RETURNS TABLE (id bigint, outcome text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := rowlock.now();  -- once, not for each row
    v_done bigint[] := ARRAY[]::bigint[];
BEGIN
    PERFORM FROM batch_nodes n
    WHERE n.node_id = p_node
      AND n.status <> 'REMOVED'  -- guard: a removed node completes nothing
    FOR KEY SHARE;  -- guard: nobody removes this node before its completions commit
    IF FOUND THEN
        -- By position in the arrays, not joined with them: no plan knows how many there are, and takes a nested loop,
        -- which compares each row with each (tried: 28 ms for 500 rows, 9 so).
        WITH done AS (
            UPDATE batch_partitions p
            SET status = 'COMPLETED', result = p_results[array_position(p_tokens, p.claim_token)], ended_at = v_now
            WHERE p.id = ANY (p_ids)
              AND p.id = p_ids[array_position(p_tokens, p.claim_token)]  -- guard: only the claim that was taken
              AND p.status COLLATE "C" = 'CLAIMED'  -- guard: terminal states never change
            RETURNING p.id, p.execution_id, p.step
        ), counted AS (
            INSERT INTO batch_counts AS c (execution_id, step, node_id, completed)
            SELECT d.execution_id, d.step, p_node, count(*) FROM done d
            GROUP BY d.execution_id, d.step ORDER BY d.execution_id, d.step
            ON CONFLICT (execution_id, step, node_id) DO UPDATE
            SET completed = c.completed + excluded.completed
        )
        SELECT coalesce(array_agg(d.id), '{}') INTO v_done FROM done d;
    END IF;
    RETURN QUERY
        SELECT d.id, 'completed' FROM unnest(v_done) AS d (id)
        UNION ALL
        SELECT s.id, CASE WHEN p.status = 'COMPLETED' AND p.claim_token = s.token
                     THEN 'completed' ELSE 'lost' END
        FROM unnest(p_ids, p_tokens) AS s (id, token)
        LEFT JOIN batch_partitions p ON p.id = s.id AND p.id = ANY (p_ids)
        WHERE NOT s.id = ANY (v_done);
END
$$;

-- The end of one attempt without a result. p_kind says what happened:
--   retry      a failure: again after p_delay_seconds, unless max_attempts is reached
--   never      a failure that no retry can mend
--   unstarted  the same, before author code began: an AT_MOST_ONCE start is taken back
--   unknown    AT_MOST_ONCE work that was cut off: outcome unknown
--   later      no failure: the author asked for another time
-- Answers 'retry', 'failed', 'cancelled', 'lost', or 'completed' if this token did that before; a
-- repetition gets the answer of the first.
-- Whatever the delay and the error say, recording a failure does not fail.
CREATE FUNCTION rowlock.fail(
    p_node uuid, p_id bigint, p_token uuid, p_error jsonb, p_kind text, p_delay_seconds double precision
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_now timestamptz := rowlock.now();
    v_execution batch_job_coordination;
    v_row batch_partitions;
    v_failures integer;
    v_answer text;
    v_error jsonb := coalesce(p_error, '{}');
    -- At most a year: NaN and Infinity sort above everything, and no interval holds them.
    v_delay double precision := least(greatest(coalesce(p_delay_seconds, 0), 0), 366 * 86400);
BEGIN
    SELECT e.* INTO v_execution FROM batch_job_coordination e
    WHERE e.execution_id = (SELECT p.execution_id FROM batch_partitions p WHERE p.id = p_id)
    FOR KEY SHARE;  -- guard: it cannot begin to end before its row is PENDING
    PERFORM FROM batch_nodes
    WHERE node_id = p_node AND status <> 'REMOVED'  -- guard: a removed node fails nothing
    FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN 'lost';
    END IF;
    SELECT p.* INTO v_row FROM batch_partitions p
    WHERE p.id = p_id AND p.claim_token = p_token  -- guard: only the claim that was taken
    FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 'lost';
    ELSIF v_row.status = 'COMPLETED' THEN
        RETURN 'completed';  -- by this token: the answer of that COMMIT was lost
    ELSIF v_row.status <> 'CLAIMED' THEN  -- guard: terminal states never change
        -- The same write again: its answer was lost, not its effect.
        RETURN CASE v_row.status WHEN 'PENDING' THEN 'retry' ELSE lower(v_row.status) END;
    END IF;

    v_failures := v_row.failures + (p_kind <> 'later')::integer;
    IF v_row.delivery = 'AT_MOST_ONCE'  -- guard: AT_MOST_ONCE work is never retried
       OR p_kind IN ('never', 'unstarted', 'unknown')
       OR (p_kind <> 'later' AND v_failures >= (v_execution.policy ->> 'max_attempts')::integer) THEN
        v_answer := 'failed';
    ELSIF v_execution.status <> 'RUNNING' THEN  -- guard: nothing becomes PENDING in an execution that ends
        v_answer := 'cancelled';
    ELSE
        v_answer := 'retry';
    END IF;

    UPDATE batch_partitions p
    SET status = CASE v_answer WHEN 'retry' THEN 'PENDING' ELSE upper(v_answer) END,
        assigned_node = CASE WHEN v_answer <> 'retry' THEN p.assigned_node END,
        failures = v_failures,
        alone = v_answer = 'retry' AND p.lost > 0
            AND v_failures >= (v_execution.policy ->> 'max_attempts')::integer - 1,
        ready = v_answer <> 'retry' OR v_delay = 0,
        available_at = CASE WHEN v_answer = 'retry' THEN v_now + make_interval(secs => v_delay) END,
        started_at = CASE WHEN v_answer <> 'retry' THEN p.started_at END,
        ended_at = CASE WHEN v_answer <> 'retry' THEN v_now END,
        last_error = v_error || jsonb_build_object('attempt', p.claims)
            || CASE p_kind WHEN 'unknown' THEN '{"outcome": "unknown"}'::jsonb
               WHEN 'unstarted' THEN '{"outcome": "not started"}' ELSE '{}' END
    WHERE p.id = p_id;
    IF p_kind = 'unstarted' THEN
        DELETE FROM batch_starts s
        WHERE s.job_name = v_execution.job_name AND s.instance_key = v_execution.instance_key
          AND s.step = v_row.step AND s.partition_key = v_row.partition_key
          AND s.claim_token = p_token;  -- guard: its own start, no other
    END IF;
    IF v_answer <> 'retry' THEN
        PERFORM rowlock._count(v_row.execution_id, v_row.step, p_node, 0,
                               (v_answer = 'failed')::integer, (v_answer = 'cancelled')::integer);
    ELSIF p_kind = 'retry' THEN
        PERFORM rowlock._count(v_row.execution_id, v_row.step, p_node, 0, 0, 0, 1);
    END IF;
    PERFORM rowlock._event('partition_' || CASE v_answer WHEN 'retry' THEN 'retried' ELSE v_answer END,
        v_row.execution_id, p_id, p_node, 'node ' || p_node, jsonb_build_object(
            'claims', v_row.claims, 'failures', v_failures, 'kind', p_kind,
            'type', v_error -> 'type', 'delay_seconds', v_delay));
    RETURN v_answer;
END
$$;

-- Hand claims back. AT_MOST_ONCE rows only with p_unstarted, which says that author code did not
-- begin; their start is deleted by the same statement. p_died says that it did not because the process that
-- was to run it died: a failure. Answers 'released', 'cancelled', 'kept' (a
-- started AT_MOST_ONCE claim, which stands), 'completed' (by this token, before) or 'lost'.
CREATE FUNCTION rowlock.release(
    p_node uuid, p_ids bigint[], p_tokens uuid[], p_unstarted boolean, p_died boolean DEFAULT false
)
RETURNS TABLE (id bigint, outcome text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := rowlock.now();
    r record;
    v_done bigint[] := ARRAY[]::bigint[];
    v_live boolean;
BEGIN
    PERFORM FROM batch_job_coordination e
    WHERE e.execution_id = ANY (ARRAY(
        SELECT DISTINCT p.execution_id FROM batch_partitions p WHERE p.id = ANY (p_ids)))
    ORDER BY e.execution_id FOR KEY SHARE;  -- guard: it cannot begin to end before its rows are PENDING
    PERFORM FROM batch_nodes n
    WHERE n.node_id = p_node AND n.status <> 'REMOVED'  -- guard: a removed node releases nothing
    FOR KEY SHARE;
    v_live := FOUND;
    FOR r IN
        SELECT p.id, p.execution_id, p.step, p.partition_key, p.delivery, p.claims,
               e.status AS execution_status, e.job_name, e.instance_key
        FROM unnest(p_ids, p_tokens) AS s (id, token)
        JOIN batch_partitions p ON p.id = s.id AND p.id = ANY (p_ids)
        JOIN batch_job_coordination e ON e.execution_id = p.execution_id
        WHERE v_live AND p.claim_token = s.token  -- guard: only the claim that was taken
          AND p.status COLLATE "C" = 'CLAIMED'  -- guard: terminal states never change
          AND (p.delivery = 'AT_LEAST_ONCE' OR p_unstarted)  -- guard: a start is not handed back
        ORDER BY p.id FOR UPDATE OF p
    LOOP
        UPDATE batch_partitions p
        SET status = CASE WHEN r.execution_status = 'RUNNING'
                     THEN 'PENDING'
                     ELSE 'CANCELLED' END,  -- guard: nothing becomes PENDING in an execution that ends
            assigned_node = CASE WHEN r.execution_status <> 'RUNNING' THEN p.assigned_node END,
            ready = true, available_at = v_now, started_at = NULL, failures = p.failures + p_died::integer,
            ended_at = CASE WHEN r.execution_status <> 'RUNNING' THEN v_now END
        WHERE p.id = r.id;
        IF r.delivery = 'AT_MOST_ONCE' THEN
            DELETE FROM batch_starts s
            WHERE s.job_name = r.job_name AND s.instance_key = r.instance_key AND s.step = r.step
              AND s.partition_key = r.partition_key
              AND s.claim_token = (SELECT p.claim_token FROM batch_partitions p WHERE p.id = r.id);
        END IF;
        -- What was only kept ready comes and goes without being told: that is no event of the work.
        IF NOT p_unstarted OR r.delivery = 'AT_MOST_ONCE' THEN
            PERFORM rowlock._event('partition_released', r.execution_id, r.id, p_node, 'node ' || p_node,
                                   jsonb_build_object('claims', r.claims, 'started', NOT p_unstarted));
        END IF;
        v_done := v_done || r.id;
        id := r.id;
        outcome := CASE WHEN r.execution_status = 'RUNNING' THEN 'released' ELSE 'cancelled' END;
        RETURN NEXT;
    END LOOP;
    IF cardinality(v_done) > 0 THEN
        PERFORM rowlock._count_ended(p_node, v_done);
        PERFORM pg_notify('rowlock', 'work');
    END IF;
    RETURN QUERY
        SELECT s.id, CASE WHEN p.claim_token IS DISTINCT FROM s.token THEN 'lost'
                     WHEN p.status = 'CLAIMED' AND v_live THEN 'kept'
                     WHEN p.status = 'COMPLETED' THEN 'completed'
                     WHEN p.status = 'PENDING' THEN 'released'
                     WHEN p.status = 'CANCELLED' THEN 'cancelled'
                     ELSE 'lost' END
        FROM unnest(p_ids, p_tokens) AS s (id, token)
        LEFT JOIN batch_partitions p ON p.id = s.id AND p.id = ANY (p_ids)
        WHERE NOT s.id = ANY (v_done);
END
$$;

-- Write a checkpoint outside a transaction of the author. False: the claim is gone.
-- Checkpoints are numbered ("saves"): a statement whose answer was lost is sent again over another connection, and
-- may itself arrive after that, when the network delivers what the old connection still had under way.
CREATE FUNCTION rowlock.checkpoint(p_node uuid, p_id bigint, p_token uuid, p_checkpoint jsonb)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
BEGIN
    PERFORM FROM batch_nodes
    WHERE node_id = p_node AND status <> 'REMOVED'  -- guard: a removed node writes no checkpoint
    FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE batch_partitions SET checkpoint = p_checkpoint
    WHERE id = p_id
      AND claim_token = p_token  -- guard: only the claim that was taken
      AND status COLLATE "C" = 'CLAIMED'  -- guard: terminal states never change
      -- guard: none takes the place of a later one
      AND coalesce((p_checkpoint ->> 'saves')::bigint > (checkpoint ->> 'saves')::bigint, true);
    RETURN FOUND OR rowlock._stands(p_id, p_token);  -- it, or a later one, is there
END
$$;

-- What attempts tell of themselves: `counters` takes the place of what was told before, so that it may be sent
-- twice. It is numbered ("told": the attempt, and how often it has told), because it may also arrive late (see
-- checkpoint). Returns the partitions whose claim stands.
CREATE FUNCTION rowlock.report(p_node uuid, p_ids bigint[], p_tokens uuid[], p_counters jsonb[]) RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
BEGIN
    PERFORM FROM batch_nodes
    WHERE node_id = p_node AND status <> 'REMOVED'  -- guard: a removed node reports nothing
    FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH sent AS MATERIALIZED (
        SELECT * FROM unnest(p_ids, p_tokens, p_counters) AS s (id, token, counters)
    ), held AS MATERIALIZED (
        SELECT p.id, p.execution_id, p.step, s.counters,
               -- guard: none takes the place of a later one
               coalesce(s.counters -> 'told' > p.counters -> 'told', true) AS newer,
               coalesce((s.counters ->> 'skipped')::bigint, 0) - coalesce((p.counters ->> 'skipped')::bigint, 0) AS more
        FROM sent s JOIN batch_partitions p ON p.id = s.id
        WHERE p.id = ANY (p_ids)
          AND p.claim_token = s.token  -- guard: only the claim that was taken
          AND p.status COLLATE "C" = 'CLAIMED'  -- guard: terminal states never change
        ORDER BY p.id FOR NO KEY UPDATE OF p
    ), written AS (
        UPDATE batch_partitions p SET counters = h.counters
        FROM held h WHERE p.id = h.id AND p.id = ANY (p_ids) AND h.newer
    ), counted AS (
        INSERT INTO batch_counts AS c (execution_id, step, node_id, skipped)
        SELECT h.execution_id, h.step, p_node, sum(h.more)
        FROM held h WHERE h.newer
        GROUP BY h.execution_id, h.step HAVING sum(h.more) <> 0 ORDER BY h.execution_id, h.step
        ON CONFLICT (execution_id, step, node_id) DO UPDATE SET skipped = c.skipped + excluded.skipped
    )
    SELECT h.id FROM held h;  -- it, or a later one, is there
END
$$;

-- Whether a claim stands. A token is drawn once: of one that is gone this stays false for ever.
CREATE FUNCTION rowlock._stands(p_id bigint, p_token uuid) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    SELECT EXISTS (
        SELECT FROM batch_partitions p
        WHERE p.id = p_id
          AND p.claim_token = p_token  -- guard: only the claim that was taken
          AND p.status COLLATE "C" = 'CLAIMED')  -- guard: what has ended holds nothing
$$;

-- Take a named lock of author code for a claim. Answers 'acquired' (also for a repetition), 'busy' or 'lost'.
-- The lock belongs to the token: when its claim ends, whatever ends it, the lock is free, in the same transaction.
-- A busy answer has locked no row, so that many may ask often.
-- A claim may take the same lock again and again. Its acquisitions are numbered, because what was sent twice may arrive
-- late (see checkpoint), and a release that does must not give back what was acquired after it.
CREATE FUNCTION rowlock.acquire_lock(p_node uuid, p_id bigint, p_token uuid, p_name text, p_number bigint DEFAULT 0)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_holder batch_locks;
BEGIN
    PERFORM FROM batch_nodes n
    WHERE n.node_id = p_node
      AND n.status <> 'REMOVED'  -- guard: a removed node takes no lock
      AND rowlock._stands(p_id, p_token);  -- guard: only for a claim that stands
    IF NOT FOUND THEN
        RETURN 'lost';
    END IF;
    SELECT l.* INTO v_holder FROM batch_locks l WHERE l.name = p_name;
    IF v_holder.claim_token IS DISTINCT FROM p_token
       AND rowlock._stands(v_holder.partition_id, v_holder.claim_token) THEN  -- guard: who holds a lock keeps it
        RETURN 'busy';
    END IF;
    INSERT INTO batch_locks AS l (name, partition_id, claim_token, number, acquired_at)
    VALUES (p_name, p_id, p_token, p_number, rowlock.now())
    ON CONFLICT (name) DO UPDATE
    SET partition_id = excluded.partition_id, claim_token = excluded.claim_token, acquired_at = excluded.acquired_at,
        number = CASE WHEN l.claim_token = excluded.claim_token THEN greatest(l.number, excluded.number)
                 ELSE excluded.number END
    WHERE l.claim_token = v_holder.claim_token;  -- guard: it is taken over only from who was seen to be gone
    RETURN CASE WHEN FOUND THEN 'acquired' ELSE 'busy' END;
END
$$;

-- Give a lock back before the claim ends. Waits for nobody; of a claim that is gone it tidies up.
CREATE FUNCTION rowlock.release_lock(p_token uuid, p_name text, p_number bigint DEFAULT 0) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
BEGIN
    DELETE FROM batch_locks l
    WHERE l.name = p_name
      AND l.claim_token = p_token  -- guard: nobody gives back the lock of another
      AND l.number <= p_number;  -- guard: what was acquired again stays
    RETURN FOUND;
END
$$;

-- What this node holds, for comparing with what it believes to hold.
CREATE FUNCTION rowlock.claims_of(p_node uuid) RETURNS TABLE (id bigint, claim_token uuid, delivery text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    SELECT p.id, p.claim_token, p.delivery FROM batch_partitions p
    WHERE p.status = 'CLAIMED' AND p.assigned_node = p_node;
$$;

-- Keep what an AT_MOST_ONCE attempt reported after its claim was taken away: beside its start, and as an event,
-- once. The event alone where somebody has resolved the partition as retry meanwhile, which deletes the start: the
-- work was done twice, and nothing else would tell. False: there is no such start.
CREATE FUNCTION rowlock.record_evidence(p_id bigint, p_token uuid, p_evidence jsonb) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_row batch_partitions;
BEGIN
    SELECT p.* INTO v_row FROM batch_partitions p WHERE p.id = p_id;
    UPDATE batch_starts s SET evidence = coalesce(s.evidence, p_evidence || jsonb_build_object('at', rowlock.now()))
    FROM batch_job_coordination e
    WHERE e.execution_id = v_row.execution_id AND s.job_name = e.job_name AND s.instance_key = e.instance_key
      AND s.step = v_row.step AND s.partition_key = v_row.partition_key
      AND s.claim_token = p_token;  -- guard: evidence of this start, no other
    IF NOT FOUND AND v_row.claim_token IS DISTINCT FROM p_token THEN
        RETURN false;
    END IF;
    IF NOT EXISTS (SELECT FROM batch_events v
                   WHERE v.execution_id = v_row.execution_id AND v.partition_id = p_id
                     AND v.event = 'late_evidence') THEN
        PERFORM rowlock._event('late_evidence', v_row.execution_id, p_id, v_row.assigned_node,
                               'node ' || v_row.assigned_node, p_evidence);
    END IF;
    RETURN true;
END
$$;

RESET search_path;
RESET ROLE;
