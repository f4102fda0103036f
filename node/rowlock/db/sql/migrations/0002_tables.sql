-- The tables. What must always be true of a row is said here as a CHECK, before any code says it.
SET LOCAL ROLE rowlock_owner;
SET LOCAL search_path = rowlock, pg_temp;

-- The only reading of the database's clock; tests replace this one function. STABLE, although the
-- clock is not: one reading per statement is enough, and it may stand in an index condition.
CREATE FUNCTION rowlock.now() RETURNS timestamptz
LANGUAGE sql STABLE
AS 'SELECT pg_catalog.clock_timestamp()';

-- The server's end of a node's connection, beyond doubt: a pid is used again, and after a restart, also one
-- after a crash, or a promotion all backends are others.
CREATE TYPE backend AS (
    pid               integer,
    started_at        timestamptz,
    server_runs_since timestamptz
);

-- Nodes: one row per incarnation, never reused.
CREATE TABLE batch_nodes (
    node_id        uuid PRIMARY KEY,
    name           text NOT NULL CHECK (name <> '' AND octet_length(name) <= 200),
    pool           text NOT NULL CHECK (pool <> '' AND octet_length(pool) <= 100),
    -- ACTIVE -> UNREACHABLE -> ACTIVE | REMOVED; ACTIVE -> REMOVED only by the node itself
    status         text NOT NULL DEFAULT 'ACTIVE' CHECK (status IN ('ACTIVE', 'UNREACHABLE', 'REMOVED')),
    draining       boolean NOT NULL DEFAULT false,
    slots          integer NOT NULL CHECK (slots >= 0),
    load           integer NOT NULL DEFAULT 0,
    beat           bigint NOT NULL DEFAULT 0,
    heartbeat_at   timestamptz NOT NULL,          -- for people; nothing is decided by it
    started_at     timestamptz NOT NULL,
    jobs           jsonb NOT NULL DEFAULT '{}',   -- {"job name": ["accepted contract hash", ...]}
    only_execution uuid,                          -- claims and masters this execution alone
    labels         jsonb NOT NULL DEFAULT '{}',
    orphans        jsonb NOT NULL DEFAULT '[]',   -- AT_MOST_ONCE attempts of an earlier incarnation still running
    version        text NOT NULL,
    -- Of its two connections; NULL: not known, and then nobody can say that it is gone.
    beat_backend   backend,
    work_backend   backend,
    beat_opened    bigint NOT NULL DEFAULT 0,     -- the number under which each was announced: later ones are higher
    work_opened    bigint NOT NULL DEFAULT 0,
    -- Whether they can prove its death. off: it does not want that; pooler: they are not its own; unreadable:
    -- the owner of these functions is no member of pg_read_all_stats; hidden: it is, and this service shows no
    -- checkpointer all the same
    evidence       text NOT NULL DEFAULT 'off' CHECK (evidence IN ('on', 'off', 'pooler', 'unreadable', 'hidden')),
    removed_at     timestamptz,
    removed_reason text,
    recovered_at   timestamptz,                   -- removed, and no claim names it any more
    CONSTRAINT removed_nodes_say_when CHECK ((status = 'REMOVED') = (removed_at IS NOT NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

CREATE INDEX batch_nodes_unrecovered ON batch_nodes (node_id)
    WHERE status = 'REMOVED' AND recovered_at IS NULL;

-- The servers that this schema has been on. Another timeline of the same server is one that was promoted, or
-- restored from a backup: it may lack what the one before had answered last.
CREATE TABLE batch_servers (
    system_identifier text NOT NULL,
    timeline          integer NOT NULL,
    seen_at           timestamptz NOT NULL,
    PRIMARY KEY (system_identifier, timeline)
);

-- What nodes know about jobs: published so that a launch without the author's code can be checked.
CREATE TABLE batch_contracts (
    job_name      text NOT NULL,
    contract_hash text NOT NULL,
    schemas       jsonb NOT NULL,
    policy        jsonb NOT NULL,
    delivery      text NOT NULL CHECK (delivery IN ('AT_LEAST_ONCE', 'AT_MOST_ONCE')),
    published_at  timestamptz NOT NULL,
    PRIMARY KEY (job_name, contract_hash)
);

-- The identity of a piece of business work. Outlives its executions.
CREATE TABLE batch_instances (
    job_name     text NOT NULL,
    instance_key text NOT NULL CHECK (instance_key <> '' AND octet_length(instance_key) <= 512),
    state        text NOT NULL CHECK (state IN ('RUNNING', 'COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED')),
    execution_id uuid NOT NULL,                   -- the current, that is the latest, execution
    created_at   timestamptz NOT NULL,
    -- What must be known when the executions have been purged: the parameters that the instance stands
    -- for, and the launch keys that have had their execution.
    parameters_digest bytea NOT NULL,
    launch_keys  text[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (job_name, instance_key)
);

-- What every move reads of a policy. A policy that lacks it would not fail its own execution alone:
-- the recovery of a node's claims would raise at its rows, for ever, and so keep its neighbours. Whole
-- numbers by their text: to JSON 3.0 is one, to a cast it is not.
CREATE FUNCTION rowlock._is_policy(p_policy jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT coalesce(
        jsonb_typeof(p_policy -> 'max_attempts') = 'number' AND p_policy ->> 'max_attempts' ~ '^[1-9][0-9]{0,5}$'
        AND jsonb_path_exists(p_policy, '$.has_finish ? (@.type() == "boolean")')
        AND (coalesce(jsonb_typeof(p_policy -> 'max_failed'), 'null') = 'null'
             OR (jsonb_typeof(p_policy -> 'max_failed') = 'number' AND p_policy ->> 'max_failed' ~ '^[0-9]{1,18}$')
             OR jsonb_path_exists(p_policy, '$.max_failed ? (@ like_regex "^[0-9]{1,3}([.][0-9]{1,6})?%$")')),
        false)
$$;

-- Executions: one run of an instance, driven by one master at a time.
CREATE TABLE batch_job_coordination (
    execution_id     uuid PRIMARY KEY,
    exec_no          bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    job_name         text NOT NULL,
    contract_hash    text NOT NULL,
    policy           jsonb NOT NULL CHECK (rowlock._is_policy(policy)),
    delivery         text NOT NULL CHECK (delivery IN ('AT_LEAST_ONCE', 'AT_MOST_ONCE')),
    instance_key     text NOT NULL,
    launch_key       text UNIQUE,
    parameters       jsonb NOT NULL,
    pool             text NOT NULL,
    priority         integer NOT NULL DEFAULT 0,
    -- REQUESTED -> PLANNING -> RUNNING -> FINISHING -> COMPLETED; RUNNING -> COMPLETED without finish()
    -- any of the first four -> CLOSING -> CANCELLED | FAILED; PLANNING, RUNNING, FINISHING -> FAILED
    -- any of the five -> ABANDONED; a restart of a sealed plan begins as RUNNING
    -- (protocol/states.py has the same as a table)
    status           text NOT NULL DEFAULT 'REQUESTED' CHECK (status IN (
        'REQUESTED', 'PLANNING', 'RUNNING', 'CLOSING', 'FINISHING',
        'COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED')),
    suspended        boolean NOT NULL DEFAULT false,  -- nothing of it is claimed; what runs goes on
    limited          boolean NOT NULL DEFAULT false,  -- claims must look at its row in batch_limits
    cancel_requested boolean NOT NULL DEFAULT false,
    -- No new claims: an early end is on its way. Written by a transaction of its own before the one
    -- that locks the row, which would starve behind claims that overlap (tried: 8 claimers, commits
    -- of 5 ms: a cancel waited until the work ran out).
    stopping         boolean NOT NULL DEFAULT false,
    master_node      uuid,
    master_epoch     bigint NOT NULL DEFAULT 0,
    masters_lost     integer NOT NULL DEFAULT 0,  -- went without a word in partition() or finish()
    step             text,
    total            bigint,                      -- partitions of the sealed plan
    first_id         bigint,                      -- their ids lie between these two, so that reading
    last_id          bigint,                      -- results passes over nobody else's history
    counts           jsonb,                       -- the recount that ended the execution
    summary          jsonb,
    failure_reason   text,                        -- one CamelCase word
    failure_message  text,
    restart_of       uuid,                        -- the execution of the same instance before this one
    carried          bigint NOT NULL DEFAULT 0,   -- partitions of the plan that those before have COMPLETED
    requester        jsonb NOT NULL DEFAULT '{}',
    -- What becomes of it when its BatchJob is deleted.
    deletion_policy  text NOT NULL DEFAULT 'CANCEL' CHECK (deletion_policy IN ('CANCEL', 'ORPHAN')),
    deadline_at      timestamptz,                 -- then it is closed and FAILED
    adopt_after      timestamptz NOT NULL,        -- from then on any node may become the first master
    requested_at     timestamptz NOT NULL,
    started_at       timestamptz,
    ended_at         timestamptz,
    revision         bigint NOT NULL DEFAULT 0,   -- grows at each change
    CONSTRAINT ended_executions_say_when CHECK (
        (status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED')) = (ended_at IS NOT NULL)),
    CONSTRAINT sealed_plans_are_counted CHECK (
        status NOT IN ('RUNNING', 'FINISHING', 'COMPLETED') OR (total IS NOT NULL AND step IS NOT NULL)),
    CONSTRAINT failures_have_a_reason CHECK (status <> 'FAILED' OR failure_reason IS NOT NULL)
) WITH (fillfactor = 70);

CREATE INDEX batch_executions_live ON batch_job_coordination (pool, status)
    WHERE status NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED');
CREATE INDEX batch_executions_by_job ON batch_job_coordination (job_name, exec_no DESC);
-- What has this Kubernetes resource asked for? The operator looks at each change of one.
CREATE INDEX batch_executions_by_requester ON batch_job_coordination ((requester ->> 'uid'), exec_no DESC)
    WHERE requester ->> 'uid' IS NOT NULL;
CREATE INDEX batch_executions_by_deadline ON batch_job_coordination (deadline_at)
    WHERE deadline_at IS NOT NULL AND ended_at IS NULL AND status <> 'CLOSING';
CREATE INDEX batch_executions_by_end ON batch_job_coordination (ended_at) WHERE ended_at IS NOT NULL;

-- At most so many claims of an execution at a time. Only executions that were ever limited have a row; the
-- claim that takes from one locks it, and counts.
CREATE TABLE batch_limits (
    execution_id uuid PRIMARY KEY,
    parallelism  integer CHECK (parallelism >= 1),  -- NULL: no limit any more
    settled      boolean NOT NULL DEFAULT true      -- false: claims that know nothing of it may be under way
) WITH (fillfactor = 50);
CREATE INDEX batch_limits_unsettled ON batch_limits (execution_id) WHERE NOT settled;

CREATE FUNCTION rowlock._next_revision() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.revision := OLD.revision + 1;
    RETURN NEW;
END
$$;
CREATE TRIGGER next_revision BEFORE UPDATE ON batch_job_coordination
    FOR EACH ROW EXECUTE FUNCTION rowlock._next_revision();

-- Partitions. No foreign key to the execution: the seal is the only inserter and holds the
-- execution's row, and a key check per row would double the time of a large plan.
CREATE TABLE batch_partitions (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    execution_id  uuid NOT NULL,
    step          text NOT NULL,
    partition_key text NOT NULL CHECK (partition_key <> '' AND octet_length(partition_key) <= 512),
    -- PENDING -> CLAIMED -> PENDING | COMPLETED | FAILED | CANCELLED; PENDING -> CANCELLED
    -- a restart also begins with FAILED (carried) and COMPLETED (resolved) ones
    status        text NOT NULL DEFAULT 'PENDING' CHECK (status IN (
        'PENDING', 'CLAIMED', 'COMPLETED', 'FAILED', 'CANCELLED')),
    assigned_node uuid,                           -- kept on terminal rows: who had it last
    claim_token   uuid,                           -- kept after the claim: recognises a repeated write
    claims        integer NOT NULL DEFAULT 0,     -- grows at each claim, never falls
    failures      integer NOT NULL DEFAULT 0,     -- compared with max_attempts
    lost          integer NOT NULL DEFAULT 0,     -- nodes that died while they held it
    alone         boolean NOT NULL DEFAULT false, -- its next loss is its last: only for a node that runs nothing else
    delivery      text NOT NULL CHECK (delivery IN ('AT_LEAST_ONCE', 'AT_MOST_ONCE')),
    ready         boolean NOT NULL DEFAULT true,  -- false: delayed until available_at, then promoted
    available_at  timestamptz,                    -- until when it is delayed; afterwards since when it waits
    weight        integer NOT NULL DEFAULT 0,     -- larger is claimed first
    slice         jsonb NOT NULL,
    checkpoint    jsonb,
    result        jsonb,
    -- For people: how far the attempt says it is (done, total), how many items were skipped, and the first of them;
    -- and the number of what was told (see report).
    counters      jsonb,
    last_error    jsonb,
    -- What a person decided about a FAILED row: {how, by, why, at, result}. The row stays as it is; the
    -- next execution of the instance goes by it.
    resolution    jsonb,
    claimed_at    timestamptz,
    started_at    timestamptz,                    -- NULL while only prefetched
    ended_at      timestamptz,
    CONSTRAINT one_plan_has_each_key_once UNIQUE (execution_id, step, partition_key),
    CONSTRAINT claimed_rows_have_an_owner CHECK (
        status <> 'CLAIMED'
        OR (assigned_node IS NOT NULL AND claim_token IS NOT NULL AND claimed_at IS NOT NULL)),
    CONSTRAINT terminal_rows_say_when CHECK (
        (status IN ('COMPLETED', 'FAILED', 'CANCELLED')) = (ended_at IS NOT NULL)),
    CONSTRAINT failed_rows_say_why CHECK (status <> 'FAILED' OR last_error IS NOT NULL),
    -- Such a row is claimed without a record of its start.
    CONSTRAINT alone_rows_may_be_repeated CHECK (NOT alone OR delivery = 'AT_LEAST_ONCE'),
    CONSTRAINT delayed_rows_say_until_when CHECK (ready OR status <> 'PENDING' OR available_at IS NOT NULL)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
        autovacuum_analyze_scale_factor = 0.05);

-- Every index is partial on live rows, so that the cost of a claim does not know the history. Whether one
-- holds anything is asked as (SELECT … ORDER BY the index LIMIT 1) IS NOT NULL, never as EXISTS, which
-- forgets the order: where half of the table is PENDING the planner expects to meet such a row at once in
-- a plain scan, and then reads a million rows of other executions (tried: 300 ms a claim, 1 ms so).
-- The line of an execution: heavy ones first. The weight is negated so that a place in it is one comparison of rows,
-- and widened because the least integer has no negative.
CREATE INDEX batch_partitions_ready ON batch_partitions (execution_id, (-weight::bigint), id)
    WHERE status = 'PENDING' AND ready AND NOT alone;
CREATE INDEX batch_partitions_alone ON batch_partitions (execution_id, id)
    WHERE status = 'PENDING' AND ready AND alone;
CREATE INDEX batch_partitions_delayed ON batch_partitions (available_at)
    WHERE status = 'PENDING' AND NOT ready;
CREATE INDEX batch_partitions_delayed_of ON batch_partitions (execution_id, id)
    WHERE status = 'PENDING' AND NOT ready;
-- By execution first: limits and views count the claims of one. Those of a node are looked for when it is
-- lost and at its own reconciliations, and then among all claims there are, which is no long list.
CREATE INDEX batch_partitions_claimed ON batch_partitions (execution_id, assigned_node)
    WHERE status = 'CLAIMED';

-- Progress, one row per acting node, so that no two nodes ever update the same one. The sums are
-- what a watcher reads; the end of an execution recounts the partitions themselves.
CREATE TABLE batch_counts (
    execution_id uuid NOT NULL,
    step         text NOT NULL,
    node_id      uuid NOT NULL,
    completed    bigint NOT NULL DEFAULT 0,
    failed       bigint NOT NULL DEFAULT 0,
    cancelled    bigint NOT NULL DEFAULT 0,
    retried      bigint NOT NULL DEFAULT 0,       -- attempts that failed, or were lost, and are made again
    -- Items skipped, by what this node has reported of a partition less what was reported of it before: a sum
    -- over nodes, each of which may be negative.
    skipped      bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (execution_id, step, node_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

-- Starts of AT_MOST_ONCE partitions, over all executions of the instance: the row is inserted by
-- the transaction that claims, and a conflict means "started before".
CREATE TABLE batch_starts (
    job_name      text NOT NULL,
    instance_key  text NOT NULL,
    step          text NOT NULL,
    partition_key text NOT NULL,
    execution_id  uuid NOT NULL,
    claim_token   uuid NOT NULL,
    node_id       uuid NOT NULL,
    started_at    timestamptz NOT NULL,
    evidence      jsonb,                          -- a completion that came after the claim was taken away
    PRIMARY KEY (job_name, instance_key, step, partition_key)
);

-- Named locks of author code, each held by a claim: once that is no more, the row says nothing. It is
-- taken over by the next who asks, or deleted.
CREATE TABLE batch_locks (
    name         text PRIMARY KEY CHECK (name <> '' AND octet_length(name) <= 200),
    partition_id bigint NOT NULL,
    claim_token  uuid NOT NULL,
    number       bigint NOT NULL,                 -- which acquisition of this claim
    acquired_at  timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

-- Plans being made: one row per chunk, keyed by the epoch of the master that makes it.
CREATE TABLE batch_staging (
    execution_id uuid NOT NULL,
    epoch        bigint NOT NULL,
    chunk        integer NOT NULL,
    keys         text[] NOT NULL,
    slices       jsonb[] NOT NULL,
    weights      integer[] NOT NULL,
    PRIMARY KEY (execution_id, epoch, chunk),
    CONSTRAINT chunks_are_parallel CHECK (
        cardinality(keys) = cardinality(slices) AND cardinality(keys) = cardinality(weights))
);

-- Executions that were purged, and whose partitions are still to be deleted: too many for one transaction.
CREATE TABLE batch_purges (
    execution_id uuid PRIMARY KEY
);

-- Append-only audit of everything off the happy path and of every operator verb.
CREATE TABLE batch_events (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz NOT NULL,
    event        text NOT NULL,
    execution_id uuid,
    partition_id bigint,
    node_id      uuid,
    actor        text NOT NULL,
    detail       jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX batch_events_by_execution ON batch_events (execution_id, id) WHERE execution_id IS NOT NULL;

CREATE FUNCTION rowlock._event(
    p_event text, p_execution uuid, p_partition bigint, p_node uuid, p_actor text, p_detail jsonb
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    INSERT INTO batch_events (at, event, execution_id, partition_id, node_id, actor, detail)
    VALUES (rowlock.now(), p_event, p_execution, p_partition, p_node, p_actor, coalesce(p_detail, '{}'));
$$;

CREATE FUNCTION rowlock._count(
    p_execution uuid, p_step text, p_node uuid, p_completed bigint, p_failed bigint, p_cancelled bigint,
    p_retried bigint DEFAULT 0
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    INSERT INTO batch_counts AS c (execution_id, step, node_id, completed, failed, cancelled, retried)
    VALUES (p_execution, p_step, p_node, p_completed, p_failed, p_cancelled, p_retried)
    ON CONFLICT (execution_id, step, node_id) DO UPDATE
    SET completed = c.completed + excluded.completed,
        failed = c.failed + excluded.failed,
        cancelled = c.cancelled + excluded.cancelled,
        retried = c.retried + excluded.retried;
$$;

-- Count partitions that have just ended, under the node that ended them, and with p_retried those that
-- wait again; counters in the order of their keys, as the lock order demands.
CREATE FUNCTION rowlock._count_ended(p_node uuid, p_ids bigint[], p_retried boolean DEFAULT false)
RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$
    INSERT INTO batch_counts AS c (execution_id, step, node_id, completed, failed, cancelled, retried)
    SELECT p.execution_id, p.step, p_node, count(*) FILTER (WHERE p.status = 'COMPLETED'),
           count(*) FILTER (WHERE p.status = 'FAILED'), count(*) FILTER (WHERE p.status = 'CANCELLED'),
           count(*) FILTER (WHERE p.status = 'PENDING')
    FROM batch_partitions p
    WHERE p.id = ANY (p_ids)
      AND (p.status IN ('COMPLETED', 'FAILED', 'CANCELLED') OR (p_retried AND p.status = 'PENDING'))
    GROUP BY p.execution_id, p.step ORDER BY p.execution_id, p.step
    ON CONFLICT (execution_id, step, node_id) DO UPDATE
    SET completed = c.completed + excluded.completed,
        failed = c.failed + excluded.failed,
        cancelled = c.cancelled + excluded.cancelled,
        retried = c.retried + excluded.retried;
$$;

RESET search_path;
RESET ROLE;
