-- Reads. Each answers JSON rows with the column names of the tables.

CREATE FUNCTION turnkeeper.get_conversation(p_conversation_id uuid) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
    SELECT to_jsonb(c) FROM conversations c WHERE c.conversation_id = p_conversation_id
$$;

-- p_before: 'updated_at,conversation_id' of the last row of the page before, or an updated_at alone.
CREATE FUNCTION turnkeeper.list_conversations(
    p_account_id text DEFAULT NULL, p_status text DEFAULT NULL, p_limit integer DEFAULT 50, p_before text DEFAULT NULL
) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    v_before timestamptz := split_part(p_before, ',', 1);
    v_behind uuid := nullif(split_part(p_before, ',', 2), '');
BEGIN  -- PL/pgSQL, so that it is planned for the filters that are given
    RETURN (SELECT coalesce(jsonb_agg(to_jsonb(x) ORDER BY x.updated_at DESC, x.conversation_id), '[]')
      FROM (SELECT * FROM conversations c
             WHERE (p_account_id IS NULL OR c.account_id = p_account_id) AND (p_status IS NULL OR c.status = p_status)
               AND (p_before IS NULL OR c.updated_at <= v_before)
               AND (p_before IS NULL OR c.updated_at < v_before OR c.conversation_id > v_behind)
             ORDER BY c.updated_at DESC, c.conversation_id LIMIT p_limit) AS x);
END
$$;

CREATE FUNCTION turnkeeper.list_turns(p_conversation_id uuid) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
    SELECT coalesce(jsonb_agg(to_jsonb(t) ORDER BY t.turn), '[]')
      FROM conversation_turns t WHERE t.conversation_id = p_conversation_id
$$;

CREATE FUNCTION turnkeeper.get_turn_of(p_request_id text, p_account_id text) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
    SELECT to_jsonb(t) FROM conversation_turns t WHERE t.account_id = p_account_id AND t.request_id = p_request_id
$$;

-- Without p_full a snapshot's messages are counted instead of sent.
CREATE FUNCTION turnkeeper.list_events(
    p_conversation_id uuid, p_after bigint DEFAULT 0, p_limit integer DEFAULT 1000, p_full boolean DEFAULT false
) RETURNS json
LANGUAGE sql STABLE SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
    SELECT coalesce(json_agg(to_json(x) ORDER BY x.seq), '[]')
      FROM (SELECT e.conversation_id, e.seq, e.turn, e.attempt, e.event,
                   CASE WHEN p_full OR jsonb_typeof(e.data -> 'messages') IS DISTINCT FROM 'array' THEN e.data
                        ELSE (e.data - 'messages')
                             || jsonb_build_object('message_count', jsonb_array_length(e.data -> 'messages')) END AS data,
                   e.created_at
              FROM conversation_events e
             WHERE e.conversation_id = p_conversation_id AND e.seq > p_after ORDER BY e.seq LIMIT p_limit) AS x
$$;

CREATE FUNCTION turnkeeper.list_calls(p_conversation_id uuid) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
    SELECT coalesce(jsonb_agg(to_jsonb(k) ORDER BY k.turn, k.step, k.call_index), '[]')
      FROM tool_calls k WHERE k.conversation_id = p_conversation_id
$$;

CREATE FUNCTION turnkeeper.list_approvals(p_account_id text DEFAULT NULL, p_conversation_id uuid DEFAULT NULL) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
    SELECT coalesce(jsonb_agg(to_jsonb(k) - 'approval_token_sha256'
                || jsonb_build_object('account_id', c.account_id, 'user_id', c.user_id, 'title', c.title)
            ORDER BY k.created_at, k.conversation_id, k.turn, k.step, k.call_index), '[]')
      FROM tool_calls k JOIN conversations c ON c.conversation_id = k.conversation_id
     WHERE k.state = 'pending' AND k.gated AND (p_account_id IS NULL OR c.account_id = p_account_id)
       AND (p_conversation_id IS NULL OR k.conversation_id = p_conversation_id)
$$;

CREATE FUNCTION turnkeeper.usage_by(p_by text DEFAULT 'model', p_account_id text DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
BEGIN
    IF p_by IS NULL OR p_by NOT IN ('model', 'account', 'day') THEN
        PERFORM refuse(400, 'content_refused', 'Usage is summed by model, account or day.');
    END IF;
    RETURN (SELECT coalesce(jsonb_agg(jsonb_build_object(p_by, u.key) || (to_jsonb(u) - 'key') ORDER BY u.key), '[]')
        FROM (SELECT CASE p_by WHEN 'model' THEN coalesce(t.model, '') WHEN 'account' THEN t.account_id
                          ELSE to_char(t.created_at, 'YYYY-MM-DD') END AS key,
                     count(*) AS turns, sum(t.rounds) AS rounds,
                     sum(t.prompt_tokens) AS prompt_tokens, sum(t.completion_tokens) AS completion_tokens,
                     sum(t.cached_tokens) AS cached_tokens, sum(t.cost_usd) AS cost_usd,
                     coalesce(sum(t.duration_ms), 0) AS duration_ms,
                     count(*) FILTER (WHERE f.rating = 'up') AS thumbs_up,
                     count(*) FILTER (WHERE f.rating = 'down') AS thumbs_down
                FROM conversation_turns t
                LEFT JOIN feedback f ON f.account_id = t.account_id AND f.request_id = t.request_id
               WHERE p_account_id IS NULL OR t.account_id = p_account_id
               GROUP BY 1) AS u);
END
$$;

CREATE FUNCTION turnkeeper.health() RETURNS jsonb
LANGUAGE sql STABLE SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
    SELECT jsonb_build_object(
        'now', now(), 'kind', 'postgres',
        'schema_version', (SELECT max(m.version) FROM schema_migrations m),
        'min_compatible', (SELECT max(m.min_compatible) FROM schema_migrations m),
        'pending', count(*) FILTER (WHERE t.status = 'pending'),
        'running', count(*) FILTER (WHERE t.status = 'running'))
      FROM conversation_turns t WHERE t.status IN ('pending', 'running')
$$;

INSERT INTO turnkeeper.schema_migrations (version, min_compatible, name) VALUES (7, 7, 'reads');
