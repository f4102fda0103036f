-- The fence of ctx.transaction(): a deferred trigger decides at COMMIT whether the author's rows
-- may stand. rowlock inserts a fence first and arms it just before its own COMMIT, with the
-- checkpoint, the completion or the end of the execution in it. Unarmed it raises, so that a COMMIT
-- the author wrote is refused; armed it makes the holder's write, and raises if that changes nothing.
-- Deferred triggers fire in the order in which they were queued: the look comes before everything that
-- the author has deferred (a foreign key may wait there for somebody's row), and the write, which the arming
-- queues, after all of it. The other way round such a COMMIT would keep the node's counters meanwhile, and
-- hold up its completions and its removal, or meet another one in a deadlock.
SET LOCAL ROLE rowlock_owner;
SET LOCAL search_path = rowlock, pg_temp;

-- Unlogged: no row of it outlives its transaction.
CREATE UNLOGGED TABLE batch_fences (
    fence_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    partition_id bigint,
    claim_token  uuid,
    execution_id uuid,
    epoch        bigint,
    armed        text CHECK (armed IN ('checkpoint', 'completion', 'finish')),
    body         jsonb,
    CONSTRAINT a_fence_guards_one_thing CHECK (
        (partition_id IS NOT NULL AND claim_token IS NOT NULL)
        <> (execution_id IS NOT NULL AND epoch IS NOT NULL))
);

CREATE FUNCTION rowlock.fence_open(p_partition bigint, p_token uuid) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_fence bigint;
BEGIN
    -- Without a lock: a holder that freezes now stands in nobody's way. The trigger looks again.
    PERFORM FROM batch_partitions
    WHERE id = p_partition AND claim_token = p_token  -- guard: only the claim that was taken
      AND status COLLATE "C" = 'CLAIMED';
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the claim on partition % is gone', p_partition USING ERRCODE = 'RL002';
    END IF;
    -- For `stranded_sessions`; until the transaction ends.
    PERFORM set_config('application_name', 'rowlock work ' || p_token, true);
    INSERT INTO batch_fences (partition_id, claim_token) VALUES (p_partition, p_token)
    RETURNING fence_id INTO v_fence;
    RETURN v_fence;
END
$$;

CREATE FUNCTION rowlock.fence_open_finish(p_execution uuid, p_epoch bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_fence bigint;
BEGIN
    PERFORM FROM batch_job_coordination
    WHERE execution_id = p_execution AND master_epoch = p_epoch AND status = 'FINISHING';
    IF NOT FOUND THEN
        RAISE EXCEPTION 'execution % has another master', p_execution USING ERRCODE = 'RL002';
    END IF;
    PERFORM set_config('application_name',
                       format('rowlock finish %s %s', replace(p_execution::text, '-', ''), p_epoch), true);
    INSERT INTO batch_fences (execution_id, epoch) VALUES (p_execution, p_epoch)
    RETURNING fence_id INTO v_fence;
    RETURN v_fence;
END
$$;

-- False: the fence is gone, that is, the transaction it was opened in is over.
CREATE FUNCTION rowlock.fence_arm(p_fence bigint, p_kind text, p_body jsonb) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
BEGIN
    UPDATE batch_fences SET armed = p_kind, body = p_body
    WHERE fence_id = p_fence
      AND (p_kind = 'finish') = (execution_id IS NOT NULL);  -- guard: a fence is armed for what it guards
    RETURN FOUND;
END
$$;

CREATE FUNCTION rowlock._fence_check() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
DECLARE
    v_fence batch_fences;
    v_execution batch_job_coordination;
    v_row batch_partitions;
BEGIN
    IF TG_OP = 'INSERT' THEN
        SELECT f.* INTO v_fence FROM batch_fences f WHERE f.fence_id = NEW.fence_id;
    ELSE
        DELETE FROM batch_fences WHERE fence_id = NEW.fence_id RETURNING * INTO v_fence;
    END IF;
    IF v_fence.armed IS NULL THEN  -- guard: only rowlock commits
        RAISE EXCEPTION 'this transaction belongs to rowlock: leave the with block to commit it, raise to roll it back'
            USING ERRCODE = 'RL001';
    END IF;
    IF TG_OP = 'INSERT' THEN
        RETURN NULL;
    END IF;
    IF v_fence.armed = 'finish' THEN
        -- Not by the answer of finish(), which says COMPLETED to a repetition as well: this is another
        -- run of it (the first one's COMMIT was in doubt), and its rows would be there twice.
        SELECT l.* INTO v_execution FROM rowlock._lock_execution(v_fence.execution_id) l;
        IF v_execution.status <> 'FINISHING'  -- guard: the transaction of finish() takes effect once
           OR rowlock.finish(v_fence.execution_id, v_fence.epoch, v_fence.body, NULL, NULL) <> 'COMPLETED' THEN
            RAISE EXCEPTION 'execution % has another master', v_fence.execution_id USING ERRCODE = 'RL002';
        END IF;
        RETURN NULL;
    END IF;
    UPDATE batch_partitions p
    SET checkpoint = CASE v_fence.armed WHEN 'checkpoint' THEN v_fence.body ELSE p.checkpoint END,
        result = CASE v_fence.armed WHEN 'completion' THEN v_fence.body ELSE p.result END,
        status = CASE v_fence.armed WHEN 'completion' THEN 'COMPLETED' ELSE p.status END,
        ended_at = CASE v_fence.armed WHEN 'completion' THEN rowlock.now() END
    WHERE p.id = v_fence.partition_id
      AND p.claim_token = v_fence.claim_token  -- guard: business rows only of the claim that was taken
      AND p.status COLLATE "C" = 'CLAIMED'  -- guard: terminal states never change
    RETURNING p.* INTO v_row;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the claim on partition % is gone', v_fence.partition_id USING ERRCODE = 'RL002';
    END IF;
    IF v_fence.armed = 'completion' THEN
        PERFORM rowlock._count(v_row.execution_id, v_row.step, v_row.assigned_node, 1, 0, 0);
    END IF;
    RETURN NULL;
END
$$;

-- Sessions in a transaction of an author whose claim, or mastership, is gone: it can never commit, and
-- its holder may sleep for ever on business rows that the next attempt needs. Only those that the
-- caller may end (pg_terminate_backend): a work role of its own is beyond a node's reach.
-- Looked for twice: what is claimed is seen as it was when a statement began, the sessions as they are a moment
-- later, and an attempt that began in between would be taken for one whose claim is gone.
CREATE FUNCTION rowlock.stranded_sessions() RETURNS TABLE (pid integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_pids integer[];
BEGIN
    FOR v_look IN 1..2 LOOP
        v_pids := ARRAY(
            SELECT a.pid FROM pg_stat_activity a
            WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
              AND (v_pids IS NULL OR a.pid = ANY (v_pids))
              AND pg_has_role(session_user, a.usesysid, 'USAGE')
              AND CASE
                  WHEN a.application_name ~ '^rowlock work [0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN NOT EXISTS (
                      SELECT FROM batch_partitions p
                      WHERE p.status = 'CLAIMED'  -- guard: the transaction of a claim that stands is its holder's
                        AND p.claim_token = right(a.application_name, 36)::uuid)
                  WHEN a.application_name ~ '^rowlock finish [0-9a-f]{32} [0-9]{1,18}$' THEN NOT EXISTS (
                      SELECT FROM batch_job_coordination e
                      WHERE e.execution_id = split_part(a.application_name, ' ', 3)::uuid
                        AND e.master_epoch = split_part(a.application_name, ' ', 4)::bigint
                        AND e.status = 'FINISHING')
                  ELSE false END);
        EXIT WHEN cardinality(v_pids) = 0;
        PERFORM pg_stat_clear_snapshot();  -- or the second look would see the sessions of the first
    END LOOP;
    RETURN QUERY SELECT unnest(v_pids);
END
$$;

CREATE CONSTRAINT TRIGGER fence_check AFTER INSERT OR UPDATE ON batch_fences
    DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION rowlock._fence_check();
-- Also where a superuser has set session_replication_role.
ALTER TABLE batch_fences ENABLE ALWAYS TRIGGER fence_check;

RESET search_path;
RESET ROLE;
