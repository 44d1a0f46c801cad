-- Recording a request. Every function pins search_path, and timezone so that times in JSON are UTC. They run with
-- the rights of their caller; who may call them is in the migration about access. PL/pgSQL keeps its plans for the
-- life of a connection, plain SQL functions do not before Postgres 18: what every turn calls is PL/pgSQL.

-- A refusal: SQLSTATE PTnnn (nnn is an HTTP status to PostgREST), the stable code, and what was not done.
CREATE FUNCTION turnkeeper.refuse(p_status integer, p_code text, p_description text) RETURNS void
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'PT' || p_status, MESSAGE = p_code, DETAIL = p_description;
END
$$;

-- The status of a conversation: its lowest unfinished turn's, else whether a call waits, else its last turn's.
CREATE FUNCTION turnkeeper.conversation_status(p_conversation_id uuid) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = turnkeeper, pg_temp AS $$
BEGIN
    RETURN coalesce(
        (SELECT t.status FROM conversation_turns t
          WHERE t.conversation_id = p_conversation_id AND t.status IN ('pending', 'running') ORDER BY t.turn LIMIT 1),
        (SELECT 'awaiting_approval' FROM tool_calls k
          WHERE k.conversation_id = p_conversation_id AND k.state = 'pending' LIMIT 1),
        (SELECT t.status FROM conversation_turns t
          WHERE t.conversation_id = p_conversation_id ORDER BY t.turn DESC LIMIT 1));
END
$$;

CREATE FUNCTION turnkeeper.store_artifacts(p_conversation_id uuid, p_artifacts jsonb) RETURNS void
LANGUAGE sql SET search_path = turnkeeper, pg_temp AS $$
    INSERT INTO artifacts (artifact_id, conversation_id, name, media_type, size_bytes, content)
    SELECT (a ->> 'artifact_id')::uuid, p_conversation_id, a ->> 'name', a ->> 'media_type', length(b.content), b.content
      FROM jsonb_array_elements(p_artifacts) AS a, LATERAL (SELECT decode(a ->> 'content', 'base64') AS content) AS b
        ON CONFLICT (artifact_id) DO NOTHING
$$;

-- The conversation of a request, locked; created if it is a first question. Checks who asks.
CREATE FUNCTION turnkeeper.conversation_of(p_request jsonb) RETURNS turnkeeper.conversations
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
DECLARE
    v_id uuid := (p_request ->> 'conversation_id')::uuid;
    c conversations;
BEGIN
    SELECT * INTO c FROM conversations WHERE conversation_id = v_id FOR UPDATE;
    IF NOT FOUND AND p_request ->> 'kind' = 'ask' THEN
        INSERT INTO conversations (conversation_id, account_id, user_id, team_id, title, target, target_id, model, metadata)
        VALUES (v_id, coalesce(p_request ->> 'account_id', p_request ->> 'default_account'), p_request ->> 'user_id',
                p_request ->> 'team_id', coalesce(p_request ->> 'title', ''), p_request -> 'target',
                p_request ->> 'target_id', p_request ->> 'model', coalesce(p_request -> 'metadata', '{}'))
        ON CONFLICT (conversation_id) DO NOTHING
        RETURNING * INTO c;
        IF NOT FOUND THEN  -- somebody else has just created it
            SELECT * INTO c FROM conversations WHERE conversation_id = v_id FOR UPDATE;
        END IF;
    END IF;
    IF c.conversation_id IS NULL THEN
        PERFORM refuse(404, 'conversation_unknown', format('There is no conversation %s; nothing was recorded.', v_id));
    END IF;
    -- The user of a decision is the person who decides, not the owner.
    IF c.account_id <> p_request ->> 'account_id' OR p_request ->> 'kind' <> 'tool_decisions'
        AND (c.user_id <> p_request ->> 'user_id' OR c.team_id <> p_request ->> 'team_id') THEN
        PERFORM refuse(403, 'identity_mismatch',
            'The request names another account, user or team than the conversation has; nothing was recorded.');
    END IF;
    RETURN c;
END
$$;

-- What a decision or a frontend result meets when it does not act: the verdict, or null if it may act.
CREATE FUNCTION turnkeeper.verdict_on(k turnkeeper.tool_calls) RETURNS text
LANGUAGE sql STABLE SET search_path = turnkeeper, pg_temp AS $$
    SELECT CASE
        WHEN k.conversation_id IS NULL THEN 'unknown'
        WHEN k.state = 'superseded' THEN 'stale'
        WHEN k.state = 'expired' THEN 'expired'
        WHEN k.state <> 'pending' THEN 'already_resolved'
        WHEN EXISTS (SELECT 1 FROM conversation_turns t
                      WHERE t.conversation_id = k.conversation_id AND t.turn > k.turn AND t.kind = 'ask'
                        AND t.status IN ('pending', 'running') AND t.request ->> 'supersede' IS DISTINCT FROM 'false')
            THEN 'stale'  -- a question is queued behind the call and will close it
        WHEN k.expires_at < now() THEN 'expired'
    END
$$;

-- One decision, by compare-and-set on its call; the verdict.
CREATE FUNCTION turnkeeper.decide(c turnkeeper.conversations, p_turn integer, p_user_id text, d jsonb) RETURNS text
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
DECLARE
    k tool_calls;
    v_approved boolean := (d ->> 'approved')::boolean;
    v_verdict text;
BEGIN
    SELECT * INTO k FROM tool_calls x
     WHERE x.conversation_id = c.conversation_id AND x.tool_call_id = d ->> 'tool_call_id' AND x.gated
       AND (x.approval_token_sha256 = d ->> 'approval_token_sha256'
            OR (d ->> 'by_key')::boolean AND x.turn = (d ->> 'turn')::integer AND x.step = (d ->> 'step')::integer
               AND x.call_index = (d ->> 'call_index')::integer)
     ORDER BY x.state <> 'pending', x.turn DESC, x.step DESC, x.call_index DESC LIMIT 1;
    v_verdict := coalesce(verdict_on(k), CASE WHEN v_approved THEN 'approved' ELSE 'denied' END);
    IF k.state = 'pending' AND v_verdict IN ('approved', 'denied', 'expired') THEN
        UPDATE tool_calls x
           SET state = v_verdict, decided_turn = p_turn, decided_at = now(),
               decided_by = CASE WHEN v_verdict <> 'expired' THEN p_user_id END,
               decision = CASE WHEN v_verdict <> 'expired' THEN jsonb_build_object(
                   'approved', v_approved, 'feedback', d -> 'feedback') END,
               reason = CASE WHEN v_verdict = 'expired' THEN 'the approval request had expired' END,
               ended_at = CASE WHEN v_verdict <> 'approved' THEN now() END
         WHERE x.conversation_id = k.conversation_id AND x.turn = k.turn AND x.step = k.step
           AND x.call_index = k.call_index;
    END IF;
    IF v_verdict = 'approved' AND d ? 'remember' THEN
        INSERT INTO approval_rules (account_id, user_id, conversation_id, scope, tool_name, prefix, created_by)
        SELECT c.account_id, CASE WHEN r.scope = 'user' THEN c.user_id END,
               CASE WHEN r.scope = 'conversation' THEN c.conversation_id END,
               r.scope, k.tool_name, d #>> '{remember,prefix}', p_user_id
          FROM (SELECT coalesce(d #>> '{remember,scope}', 'conversation') AS scope) AS r;
    END IF;
    RETURN v_verdict;
END
$$;

-- One result of a frontend tool; the verdict.
CREATE FUNCTION turnkeeper.take_result(c turnkeeper.conversations, p_turn integer, p_user_id text, d jsonb) RETURNS text
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
DECLARE
    k tool_calls;
    v_verdict text;
BEGIN
    SELECT * INTO k FROM tool_calls x
     WHERE x.conversation_id = c.conversation_id AND x.tool_call_id = d ->> 'tool_call_id' AND x.kind = 'frontend'
     ORDER BY x.state <> 'pending', x.turn DESC, x.step DESC, x.call_index DESC LIMIT 1;
    v_verdict := coalesce(verdict_on(k), 'result_recorded');
    IF k.state = 'pending' AND v_verdict IN ('result_recorded', 'expired') THEN
        UPDATE tool_calls x
           SET state = CASE WHEN v_verdict = 'expired' THEN 'expired'
                            WHEN (d ->> 'is_error')::boolean THEN 'failed' ELSE 'done' END,
               decided_turn = p_turn, decided_at = now(), ended_at = now(),
               decided_by = CASE WHEN v_verdict <> 'expired' THEN p_user_id END,
               decision = CASE WHEN v_verdict <> 'expired' THEN jsonb_build_object(
                   'content', d -> 'content', 'is_error', coalesce((d ->> 'is_error')::boolean, false)) END,
               reason = CASE WHEN v_verdict = 'expired' THEN 'the approval request had expired' END
         WHERE x.conversation_id = k.conversation_id AND x.turn = k.turn AND x.step = k.step
           AND x.call_index = k.call_index;
    END IF;
    RETURN v_verdict;
END
$$;

-- Ids repeat across turns: of two verdicts under one id, the one that took effect is told.
CREATE FUNCTION turnkeeper.noted(p_decisions jsonb, p_tool_call_id text, p_verdict text) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE SET search_path = turnkeeper, pg_temp AS $$
BEGIN
    IF p_decisions ->> p_tool_call_id IN ('approved', 'denied', 'result_recorded') THEN
        RETURN p_decisions;
    END IF;
    RETURN p_decisions || jsonb_build_object(p_tool_call_id, p_verdict);
END
$$;

CREATE FUNCTION turnkeeper.submit(p_request jsonb, p_artifacts jsonb DEFAULT '[]') RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    v_kind text := p_request ->> 'kind';
    v_decisions jsonb := '{}';
    v_verdict text;
    v_status text;
    c conversations := conversation_of(p_request);
    t conversation_turns;
    d jsonb;
BEGIN
    SELECT * INTO t FROM conversation_turns x
     WHERE x.account_id = c.account_id AND x.request_id = p_request ->> 'request_id';
    IF FOUND THEN
        IF t.conversation_id <> c.conversation_id OR t.digest <> p_request ->> 'digest' THEN
            PERFORM refuse(409, 'request_conflict',
                'Another request was recorded under this request_id; nothing was recorded.');
        END IF;
        RETURN jsonb_build_object('conversation_id', t.conversation_id, 'turn', t.turn, 'created', false,
            'status', t.status, 'queue', t.queue, 'decisions', t.decisions);
    END IF;

    IF v_kind = 'ask' AND p_request ->> 'supersede' = 'false' AND EXISTS (SELECT 1 FROM tool_calls k
        WHERE k.conversation_id = c.conversation_id AND k.state = 'pending' AND k.gated) THEN
        PERFORM refuse(409, 'approvals_open', 'A call still waits for a decision; the question was not recorded.');
    END IF;
    IF v_kind = 'retry' AND NOT EXISTS (SELECT 1 FROM conversation_turns x
        WHERE x.conversation_id = c.conversation_id AND x.turn = c.last_turn AND x.status = 'failed' AND x.retryable) THEN
        PERFORM refuse(409, 'not_retryable', 'The last turn did not fail, or may not be tried again; nothing was recorded.');
    END IF;
    IF v_kind = 'tool_decisions' AND c.last_turn = 0 THEN
        PERFORM refuse(400, 'request_invalid', 'The conversation has no turn that could wait; nothing was recorded.');
    END IF;

    -- Repeated entries count once; the order of the rest is kept.
    FOR d IN SELECT e.value FROM jsonb_array_elements(coalesce(p_request -> 'tool_decisions', '[]')) WITH ORDINALITY
        AS e (value, n) GROUP BY e.value ORDER BY min(e.n)
    LOOP
        v_verdict := decide(c, c.last_turn + 1, p_request ->> 'user_id', d);
        v_decisions := noted(v_decisions, d ->> 'tool_call_id', v_verdict);
    END LOOP;
    FOR d IN SELECT e.value FROM jsonb_array_elements(coalesce(p_request -> 'frontend_tool_results', '[]')) AS e (value)
    LOOP
        v_verdict := take_result(c, c.last_turn + 1, p_request ->> 'user_id', d);
        v_decisions := noted(v_decisions, d ->> 'tool_call_id', v_verdict);
    END LOOP;

    INSERT INTO conversation_turns
        (conversation_id, turn, account_id, request_id, digest, kind, request, queue, decisions)
    VALUES (c.conversation_id, c.last_turn + 1, c.account_id, p_request ->> 'request_id', p_request ->> 'digest', v_kind,
            p_request, p_request ->> 'queue', v_decisions)
    ON CONFLICT (account_id, request_id) DO NOTHING  -- recorded a moment ago on another conversation
    RETURNING * INTO t;
    IF NOT FOUND THEN
        PERFORM refuse(409, 'request_conflict', 'Another request was recorded under this request_id; nothing was recorded.');
    END IF;
    IF jsonb_array_length(p_artifacts) > 0 THEN
        PERFORM store_artifacts(c.conversation_id, p_artifacts);
    END IF;
    INSERT INTO conversation_events (conversation_id, seq, turn, attempt, event, data)
    SELECT c.conversation_id, c.last_seq + 1, t.turn, 0, 'user_message', jsonb_object_agg(e.key, e.value)
      FROM jsonb_each(jsonb_build_object(
            'request_id', t.request_id, 'kind', t.kind, 'ask', p_request -> 'ask', 'images', p_request -> 'images',
            'tool_decisions', (SELECT jsonb_agg(x - '{approval_token_sha256,by_key}'::text[])
                                 FROM jsonb_array_elements(p_request -> 'tool_decisions') AS x),
            'frontend_tool_results', p_request -> 'frontend_tool_results', 'metadata', p_request -> 'metadata',
            'decisions', v_decisions)) AS e
     WHERE e.value NOT IN ('null', '[]', '{}');
    IF v_kind = 'ask' THEN
        UPDATE tool_calls k
           SET state = 'superseded', decided_turn = t.turn, decided_at = now(), ended_at = now(),
               reason = 'superseded by a new request'
         WHERE k.conversation_id = c.conversation_id AND k.state = 'pending';
    END IF;
    v_status := conversation_status(c.conversation_id);
    UPDATE conversations x
       SET last_seq = c.last_seq + 1, last_turn = t.turn, status = v_status, updated_at = now(),
           next_ring_at = CASE WHEN v_status = 'pending' THEN now() ELSE x.next_ring_at END,
           ring_backoff_seconds = CASE WHEN v_status = 'pending' THEN 5 ELSE x.ring_backoff_seconds END
     WHERE x.conversation_id = c.conversation_id;
    RETURN jsonb_build_object('conversation_id', t.conversation_id, 'turn', t.turn, 'created', true, 'status', t.status,
        'queue', t.queue, 'decisions', t.decisions);
END
$$;

INSERT INTO turnkeeper.schema_migrations (version, min_compatible, name) VALUES (2, 2, 'submit');
