-- What the tests of faults put beside rowlock's schema: business rows, a record of every change of
-- state, and two triggers that refuse what must never happen. Refusals count in a sequence, which no
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
    at      timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE SEQUENCE fleet.violations;

CREATE FUNCTION fleet.watch_partition() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF OLD.status IN ('COMPLETED', 'FAILED', 'CANCELLED')
       -- A person's word stands beside the row, and changes nothing of it.
       AND to_jsonb(OLD) - 'resolution' <> to_jsonb(NEW) - 'resolution' THEN
        PERFORM nextval('fleet.violations');
        RAISE EXCEPTION 'violation: partition % is % and was to be changed: % -> %',
            OLD.partition_key, OLD.status, OLD, NEW;
    ELSIF NEW.claims < OLD.claims OR NEW.failures < OLD.failures OR NEW.lost < OLD.lost
       OR (NEW.claim_token IS DISTINCT FROM OLD.claim_token) <> (NEW.claims > OLD.claims) THEN
        PERFORM nextval('fleet.violations');
        RAISE EXCEPTION 'violation: counters of partition % went wrong: % -> %',
            OLD.partition_key, OLD, NEW;
    ELSIF OLD.status <> NEW.status THEN
        INSERT INTO fleet.transitions (execution_id, key, was, became, node, token, claims)
        VALUES (OLD.execution_id, OLD.partition_key, OLD.status, NEW.status,
                coalesce(NEW.assigned_node, OLD.assigned_node), NEW.claim_token, NEW.claims);
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER fleet_watch BEFORE UPDATE ON rowlock.batch_partitions
    FOR EACH ROW EXECUTE FUNCTION fleet.watch_partition();

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
