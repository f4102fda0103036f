-- The five roles, and who owns the schema. Roles belong to the cluster, not to the database, so they
-- may exist already; two databases may even create them at the same moment.
DO $$
DECLARE
    v_role text;
BEGIN
    FOREACH v_role IN ARRAY ARRAY[
        'rowlock_owner', 'rowlock_node', 'rowlock_operator', 'rowlock_admin', 'rowlock_reader'
    ] LOOP
        -- Asked first, because a login without CREATEROLE is refused whether the role exists or not.
        CONTINUE WHEN EXISTS (SELECT FROM pg_roles WHERE rolname = v_role);
        BEGIN
            EXECUTE format('CREATE ROLE %I NOLOGIN', v_role);
        EXCEPTION WHEN duplicate_object OR unique_violation THEN
            NULL;
        END;
    END LOOP;
    -- A migrating login that is no superuser must be able to act as the owner. Who creates a role may
    -- administer it, and from PostgreSQL 16 on that alone does not mean acting as it.
    IF NOT pg_has_role(current_user, 'rowlock_owner',
                       CASE WHEN current_setting('server_version_num')::integer >= 160000 THEN 'SET' ELSE 'MEMBER' END)
    THEN
        EXECUTE format('GRANT rowlock_owner TO %I', current_user);
    END IF;
    -- Which backends live is shown in full to members of pg_read_all_stats alone, and the functions run as the
    -- owner. Without it every node's evidence is 'unreadable', and lost nodes are found by silence only.
    IF NOT pg_has_role('rowlock_owner', 'pg_read_all_stats', 'USAGE') THEN
        BEGIN
            GRANT pg_read_all_stats TO rowlock_owner;
        EXCEPTION WHEN insufficient_privilege THEN
            RAISE WARNING 'lost nodes will be found by silence only until a superuser runs'
                          ' GRANT pg_read_all_stats TO rowlock_owner';
        END;
    END IF;
    EXECUTE format('GRANT CREATE ON DATABASE %I TO rowlock_owner', current_database());
    -- Who may make temporary objects may try to put them in front of ours. The functions do not fall
    -- for it (their search_path ends with pg_temp); this is the second belt. A program that needs
    -- temporary tables gets the right by name: GRANT TEMPORARY ON DATABASE … TO its role.
    EXECUTE format('REVOKE TEMPORARY ON DATABASE %I FROM PUBLIC', current_database());
END
$$;

CREATE SCHEMA IF NOT EXISTS rowlock;
ALTER SCHEMA rowlock OWNER TO rowlock_owner;
GRANT USAGE ON SCHEMA rowlock TO rowlock_node, rowlock_operator, rowlock_admin, rowlock_reader;

-- PostgreSQL gives EXECUTE on every new function to PUBLIC. Only a default privilege without
-- IN SCHEMA can take that away.
ALTER DEFAULT PRIVILEGES FOR ROLE rowlock_owner REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
