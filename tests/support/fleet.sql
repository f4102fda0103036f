-- What the tests of faults put beside rowlock's schema: business rows, a record of every change of
-- state, two triggers that refuse what must never happen, and a procedure that looks on. Refusals count in a sequence, which no
-- rollback undoes.
CREATE SCHEMA fleet;
GRANT USAGE ON SCHEMA fleet TO PUBLIC;

CREATE TABLE fleet.effects (
    key     text NOT NULL,
    item    integer NOT NULL,
    attempt integer NOT NULL,
    node    text NOT NULL,
    at      timestamptz NOT NULL DEFAULT clock_timestamp()
);
GRANT SELECT, INSERT ON fleet.effects TO PUBLIC;

CREATE TABLE fleet.transitions (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    execution_id uuid NOT NULL,
    key     text NOT NULL,
    was     text NOT NULL,
    became  text NOT NULL,
    node    uuid,
    token   uuid,
    claims  integer NOT NULL,
    beat    bigint,  -- of the node, when it claimed
    at      timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE SEQUENCE fleet.violations;

CREATE FUNCTION fleet.watch_partition() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    claimed boolean := NEW.claims > OLD.claims;
    beat_then bigint;
BEGIN
    IF claimed THEN
        SELECT n.beat INTO beat_then FROM rowlock.batch_nodes n
         WHERE n.node_id = NEW.assigned_node AND n.status = 'ACTIVE';
    END IF;
    IF OLD.status IN ('COMPLETED', 'FAILED', 'CANCELLED')
       -- A person's word stands beside the row, and changes nothing of it.
       AND to_jsonb(OLD) - 'resolution' <> to_jsonb(NEW) - 'resolution' THEN
        PERFORM nextval('fleet.violations');
        RAISE EXCEPTION 'violation: partition % is % and was to be changed: % -> %',
            OLD.partition_key, OLD.status, OLD, NEW;
    ELSIF NEW.claims < OLD.claims OR NEW.failures < OLD.failures OR NEW.lost < OLD.lost
       OR (NEW.claim_token IS DISTINCT FROM OLD.claim_token) <> claimed THEN
        PERFORM nextval('fleet.violations');
        RAISE EXCEPTION 'violation: counters of partition % went wrong: % -> %',
            OLD.partition_key, OLD, NEW;
    ELSIF claimed AND beat_then IS NULL THEN
        PERFORM nextval('fleet.violations');
        RAISE EXCEPTION 'violation: partition % was claimed by a node that is not active: % -> %',
            OLD.partition_key, OLD, NEW;
    ELSIF OLD.status <> NEW.status THEN
        INSERT INTO fleet.transitions (execution_id, key, was, became, node, token, claims, beat)
        VALUES (OLD.execution_id, OLD.partition_key, OLD.status, NEW.status,
                coalesce(NEW.assigned_node, OLD.assigned_node), NEW.claim_token, NEW.claims, beat_then);
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER fleet_watch BEFORE UPDATE ON rowlock.batch_partitions
    FOR EACH ROW EXECUTE FUNCTION fleet.watch_partition();

-- What may be so for a moment and not for long: a claim whose owner is gone, or silent, although a node lives
-- that would have recovered it; a session of rowlock's own that sits in a transaction. Looked for again and again;
-- kept is for how many looks in a row. No clock is asked, since tests set the server's.
CREATE TABLE fleet.sightings (
    what  text NOT NULL,
    whose text NOT NULL,
    looks integer NOT NULL,
    PRIMARY KEY (what, whose)
);
CREATE SEQUENCE fleet.looks;  -- how many there have been: a test knows by it that somebody looks

-- A node is known to live for so long after a beat; whoever observes it begins anew after a longer silence of its own.
CREATE PROCEDURE fleet.look_on(every_seconds float, living_seconds float)
LANGUAGE plpgsql
AS $$
DECLARE
    second_ integer := ceil(1 / every_seconds);  -- in looks: no sighting that is shorter is kept
    living integer := ceil(living_seconds / every_seconds);
    nodes jsonb := '{}';  -- the beat of each, and how many looks ago it changed
    odd jsonb := '{}';    -- what is seen now, and in how many looks before
BEGIN
    LOOP
        SELECT coalesce(jsonb_object_agg(n.node_id, jsonb_build_object('beat', n.beat, 'silent',
                   CASE WHEN (nodes #>> ARRAY[n.node_id::text, 'beat'])::bigint = n.beat
                        THEN (nodes #>> ARRAY[n.node_id::text, 'silent'])::integer + 1
                        ELSE 0 END)), '{}')
          INTO nodes
          FROM rowlock.batch_nodes n WHERE n.status <> 'REMOVED';
        COMMIT;  -- holds no two tables at a time, as a migration may
        SELECT coalesce(jsonb_object_agg(o.what, coalesce((odd ->> o.what)::integer, 0) + 1), '{}')
          INTO odd
          FROM (SELECT CASE WHEN nodes ? p.assigned_node::text THEN 'claim of a silent node'
                            ELSE 'claim without an owner' END
                       || format(': %s %s %s', p.partition_key, p.claim_token,
                                 nodes #>> ARRAY[p.assigned_node::text, 'beat']) AS what
                  FROM rowlock.batch_partitions p
                 WHERE p.status = 'CLAIMED'
                   AND coalesce((nodes #>> ARRAY[p.assigned_node::text, 'silent'])::integer, second_) >= second_
                   AND EXISTS (SELECT FROM rowlock.batch_nodes n
                                WHERE n.status = 'ACTIVE' AND n.node_id IS DISTINCT FROM p.assigned_node
                                  AND (nodes #>> ARRAY[n.node_id::text, 'silent'])::integer <= living)
                UNION
                SELECT format('idle in transaction: %s %s since %s, after %s', a.pid, a.application_name,
                              a.state_change, a.query)
                  FROM pg_stat_activity a
                 WHERE a.datname = current_database()
                   AND a.state LIKE 'idle in transaction%'
                   AND a.application_name LIKE 'rowlock %'
                   -- An author's transaction lasts as long as its attempt, or as finish().
                   AND a.application_name NOT LIKE 'rowlock work%'
                   AND a.application_name NOT LIKE 'rowlock finish%') o;
        INSERT INTO fleet.sightings AS s (what, whose, looks)
        SELECT split_part(o.key, ': ', 1), o.key, o.value::integer
          FROM jsonb_each_text(odd) o WHERE o.value::integer >= second_
        ON CONFLICT (what, whose) DO UPDATE SET looks = greatest(s.looks, excluded.looks);
        PERFORM nextval('fleet.looks');
        COMMIT;
        PERFORM pg_sleep(every_seconds);
    END LOOP;
END
$$;

CREATE FUNCTION fleet.watch_execution() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF OLD.ended_at IS NOT NULL OR NEW.master_epoch < OLD.master_epoch THEN
        PERFORM nextval('fleet.violations');
        RAISE EXCEPTION 'violation: execution % is % and was to be changed: % -> %',
            OLD.execution_id, OLD.status, OLD, NEW;
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER fleet_watch BEFORE UPDATE ON rowlock.batch_job_coordination
    FOR EACH ROW EXECUTE FUNCTION fleet.watch_execution();
