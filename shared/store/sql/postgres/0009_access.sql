-- Who may do what. anon: nothing. authenticated: read his own rows, save what workers alone need to know, and give
-- feedback on them. service_role: run the functions. Roles that the server does not have are passed over.

-- Who is asking, from the claims that PostgREST has verified: {"account_id", "user_id"}, null where there is none.
-- Replace this function where identity travels otherwise; every policy asks it and nothing else.
CREATE FUNCTION turnkeeper.identity() RETURNS jsonb
LANGUAGE sql STABLE SET search_path = turnkeeper, pg_temp AS $$
    SELECT jsonb_build_object('account_id', coalesce(x.claims ->> 'account_id', x.claims #>> '{app_metadata,account_id}'),
                              'user_id', x.claims ->> 'sub')
      FROM (SELECT nullif(current_setting('request.jwt.claims', true), '')::jsonb AS claims) AS x
$$;

ALTER TABLE turnkeeper.schema_migrations ENABLE ROW LEVEL SECURITY;
ALTER TABLE turnkeeper.conversations ENABLE ROW LEVEL SECURITY;
ALTER TABLE turnkeeper.conversation_turns ENABLE ROW LEVEL SECURITY;
ALTER TABLE turnkeeper.conversation_events ENABLE ROW LEVEL SECURITY;
ALTER TABLE turnkeeper.tool_calls ENABLE ROW LEVEL SECURITY;
ALTER TABLE turnkeeper.approval_rules ENABLE ROW LEVEL SECURITY;
ALTER TABLE turnkeeper.dead_letters ENABLE ROW LEVEL SECURITY;
ALTER TABLE turnkeeper.feedback ENABLE ROW LEVEL SECURITY;
ALTER TABLE turnkeeper.artifacts ENABLE ROW LEVEL SECURITY;

-- Grants and policies for the roles that exist now. Idempotent: run it again after adding such a role; a migration
-- that adds a function ends with it, since Postgres lets everybody run a new function.
CREATE FUNCTION turnkeeper.apply_access() RETURNS void
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp SET client_min_messages = warning AS $$
DECLARE
    v_schema text := current_schema();  -- of the search_path above
    v_own text := 'EXISTS (SELECT 1 FROM conversations c WHERE c.conversation_id = %I.conversation_id)';
    v_role text;
    v_table text;
BEGIN
    FOREACH v_role IN ARRAY ARRAY['public', 'anon', 'authenticated'] LOOP
        CONTINUE WHEN v_role <> 'public' AND to_regrole(v_role) IS NULL;
        EXECUTE format('REVOKE ALL ON SCHEMA %I FROM %s', v_schema, v_role);
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA %I FROM %s', v_schema, v_role);
        EXECUTE format('REVOKE ALL ON ALL SEQUENCES IN SCHEMA %I FROM %s', v_schema, v_role);
        EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA %I FROM %s', v_schema, v_role);
    END LOOP;

    IF to_regrole('service_role') IS NOT NULL THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO service_role', v_schema);
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA %I TO service_role', v_schema);
        EXECUTE format('GRANT USAGE ON ALL SEQUENCES IN SCHEMA %I TO service_role', v_schema);
        EXECUTE format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA %I TO service_role', v_schema);
        REVOKE EXECUTE ON FUNCTION apply_access() FROM service_role;
        REVOKE INSERT, UPDATE, DELETE ON schema_migrations FROM service_role;
        FOR v_table IN SELECT tablename FROM pg_tables WHERE schemaname = v_schema LOOP
            EXECUTE format('DROP POLICY IF EXISTS worker ON %I', v_table);
            EXECUTE format('CREATE POLICY worker ON %I TO service_role USING (true) WITH CHECK (true)', v_table);
        END LOOP;
    END IF;

    IF to_regrole('authenticated') IS NOT NULL THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO authenticated', v_schema);
        GRANT SELECT ON conversations, conversation_events, feedback, artifacts, sessions, session_messages TO authenticated;
        -- Column by column: without the request as sent, its digest, the claim, the worker, tokens and their hashes.
        GRANT SELECT (conversation_id, turn, account_id, request_id, kind, queue, status, attempt, crashes,
            lease_expires_at, last_batch, stop_requested_at, taken_over, wait_reason, wait_until, decisions, provider,
            model, rounds, tool_calls, prompt_tokens, completion_tokens, cached_tokens, cost_usd, finish_reason,
            duration_ms, error, retryable, created_at, started_at, ended_at) ON conversation_turns TO authenticated;
        GRANT SELECT (conversation_id, turn, step, call_index, tool_call_id, tool_name, arguments, arguments_digest, risk,
            kind, gated, state, expires_at, decided_turn, decided_by, decision, reason, result_summary, result_raw,
            result_seq, duration_ms, created_at, decided_at, started_at, ended_at) ON tool_calls TO authenticated;
        GRANT INSERT, UPDATE ON feedback TO authenticated;
        GRANT EXECUTE ON FUNCTION identity(), refuse(integer, text, text),
            record_feedback(text, text, text, text, text) TO authenticated;
        DROP POLICY IF EXISTS own ON conversations;
        CREATE POLICY own ON conversations FOR SELECT TO authenticated USING (
            account_id = (SELECT identity() ->> 'account_id') AND user_id = (SELECT identity() ->> 'user_id'));
        FOREACH v_table IN ARRAY ARRAY['conversation_turns', 'conversation_events', 'tool_calls', 'artifacts', 'feedback']
        LOOP
            EXECUTE format('DROP POLICY IF EXISTS own ON %I', v_table);
            EXECUTE format('CREATE POLICY own ON %I FOR SELECT TO authenticated USING (' || v_own || ')', v_table, v_table);
        END LOOP;
        DROP POLICY IF EXISTS give ON feedback;
        DROP POLICY IF EXISTS change ON feedback;
        CREATE POLICY give ON feedback FOR INSERT TO authenticated WITH CHECK (EXISTS (
            SELECT 1 FROM conversation_turns t WHERE t.conversation_id = feedback.conversation_id
               AND t.turn = feedback.turn AND t.account_id = feedback.account_id AND t.request_id = feedback.request_id));
        CREATE POLICY change ON feedback FOR UPDATE TO authenticated
            USING (EXISTS (SELECT 1 FROM conversations c WHERE c.conversation_id = feedback.conversation_id))
            WITH CHECK (EXISTS (
            SELECT 1 FROM conversation_turns t WHERE t.conversation_id = feedback.conversation_id
               AND t.turn = feedback.turn AND t.account_id = feedback.account_id AND t.request_id = feedback.request_id));
    END IF;
END
$$;

SELECT turnkeeper.apply_access();

INSERT INTO turnkeeper.schema_migrations (version, min_compatible, name) VALUES (9, 9, 'access');
