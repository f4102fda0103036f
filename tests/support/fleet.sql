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

-- What no statement may ever see, by a look every 50 ms: a claim whose owner is gone although a node lives
-- that would have recovered it, and a session of rowlock's own that sits in a transaction.
CREATE TABLE fleet.sightings (
    what    text NOT NULL,
    whose   text NOT NULL,
    looks   integer NOT NULL DEFAULT 1,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (what, whose)
);

CREATE PROCEDURE fleet.look_on(every_seconds float)
LANGUAGE plpgsql
AS $$
BEGIN
    LOOP
        INSERT INTO fleet.sightings AS s (what, whose)
        SELECT 'claim without an owner', p.partition_key || ' ' || p.claim_token
          FROM rowlock.batch_partitions p
         WHERE p.status = 'CLAIMED'
           AND NOT EXISTS (SELECT FROM rowlock.batch_nodes n
                            WHERE n.node_id = p.assigned_node AND n.status <> 'REMOVED')
           AND EXISTS (SELECT FROM rowlock.batch_nodes n
                        WHERE n.status = 'ACTIVE'
                          AND n.heartbeat_at > clock_timestamp() - interval '1 s')
        UNION ALL
        SELECT 'idle in transaction', format('%s %s', a.application_name, a.query)
          FROM pg_stat_activity a
         WHERE a.datname = current_database()
           AND a.state LIKE 'idle in transaction%'
           AND a.state_change < clock_timestamp() - interval '1 s'
           AND a.application_name LIKE 'rowlock %'
           -- An author's transaction lasts as long as its attempt, or as finish().
           AND a.application_name NOT LIKE 'rowlock work%'
           AND a.application_name NOT LIKE 'rowlock finish%'
        ON CONFLICT (what, whose) DO UPDATE SET looks = s.looks + 1;
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
