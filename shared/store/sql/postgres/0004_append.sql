-- Writing a batch. The hot path: set-based, and what a batch does not hold costs no statement.

-- What a batch does to tool_calls. Rows of p_calls: the changes of shared/events.py, each with its event's seq.
CREATE FUNCTION turnkeeper.apply_calls(p_conversation_id uuid, p_turn integer, p_calls jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
DECLARE
    v_ops jsonb := (SELECT jsonb_object_agg(o.op, o.n) FROM (
        SELECT k ->> 'op' AS op, count(*) AS n FROM jsonb_array_elements(p_calls) AS k GROUP BY 1) AS o);
    v_changed integer;
BEGIN
    -- Below, all changes of one kind are one statement: equal to their order in the batch if each call's are in turn.
    IF (SELECT count(*) FROM jsonb_object_keys(v_ops)) > 1 AND EXISTS (
        SELECT 1 FROM (
            SELECT o.rank < lag(o.rank) OVER (PARTITION BY coalesce(k ->> 'turn', p_turn::text), k ->> 'step',
                                              k ->> 'call_index' ORDER BY n) AS back
              FROM jsonb_array_elements(p_calls) WITH ORDINALITY AS c (k, n),
                   LATERAL (SELECT array_position('{new,await,start,result}', k ->> 'op') AS rank) AS o) AS x
         WHERE x.back) THEN
        PERFORM refuse(500, 'internal', 'The batch changes a call after its end; it was not written.');
    END IF;
    IF v_ops ? 'new' THEN
        INSERT INTO tool_calls (conversation_id, turn, step, call_index, tool_call_id, tool_name, arguments,
                                arguments_digest, risk, kind, gated, state, decided_by, reason, decided_at)
        SELECT p_conversation_id, p_turn, k.step, k.call_index, k.tool_call_id, k.tool_name, k.arguments,
               k.arguments_digest, k.risk, k.kind, k.gated, k.state, k.decided_by,
               k.reason, CASE WHEN k.state <> 'pending' THEN now() END
          FROM jsonb_to_recordset(p_calls) AS k (op text, step integer, call_index integer, tool_call_id text,
               tool_name text, arguments text, arguments_digest text, risk text, kind text, gated boolean, state text,
               decided_by text, reason text)
         WHERE k.op = 'new';
    END IF;
    IF v_ops ? 'await' THEN
        UPDATE tool_calls x
           SET approval_token_sha256 = coalesce(x.approval_token_sha256, k.approval_token_sha256),
               expires_at = CASE WHEN x.approval_token_sha256 IS NULL THEN k.expires_at ELSE x.expires_at END
          FROM jsonb_to_recordset(p_calls) AS k (op text, turn integer, step integer, call_index integer,
               approval_token_sha256 text, expires_at timestamptz)
         WHERE k.op = 'await' AND x.conversation_id = p_conversation_id AND x.turn = k.turn AND x.step = k.step
           AND x.call_index = k.call_index;
        GET DIAGNOSTICS v_changed = ROW_COUNT;
        PERFORM check_changed('await', v_changed, v_ops);
    END IF;
    IF v_ops ? 'start' THEN
        UPDATE tool_calls x SET state = 'executing', started_at = now()
          FROM jsonb_to_recordset(p_calls) AS k (op text, turn integer, step integer, call_index integer)
         WHERE k.op = 'start' AND x.conversation_id = p_conversation_id AND x.turn = k.turn AND x.step = k.step
           AND x.call_index = k.call_index AND x.state = 'approved';
        GET DIAGNOSTICS v_changed = ROW_COUNT;
        PERFORM check_changed('start', v_changed, v_ops);
    END IF;
    IF v_ops ? 'result' THEN
        UPDATE tool_calls x
           SET state = k.state, result_seq = k.seq, result_summary = k.result_summary, result_raw = k.result_raw,
               duration_ms = k.duration_ms, ended_at = coalesce(x.ended_at, now())
          FROM jsonb_to_recordset(p_calls) AS k (op text, turn integer, step integer, call_index integer, state text,
               result_summary text, result_raw text, duration_ms bigint, seq bigint)
         WHERE k.op = 'result' AND x.conversation_id = p_conversation_id AND x.turn = k.turn AND x.step = k.step
           AND x.call_index = k.call_index AND x.result_seq IS NULL
           AND k.state NOT IN ('pending', 'approved', 'executing')
           AND (x.state IN ('pending', 'approved', 'executing') OR x.state = k.state);
        GET DIAGNOSTICS v_changed = ROW_COUNT;
        PERFORM check_changed('result', v_changed, v_ops);
    END IF;
END
$$;

CREATE FUNCTION turnkeeper.check_changed(p_op text, p_changed integer, p_ops jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
BEGIN
    IF p_changed <> (p_ops ->> p_op)::integer THEN
        PERFORM refuse(500, 'internal', format(
            '%s of %s changes "%s" are not allowed in the state of their call; the batch was not written.',
            (p_ops ->> p_op)::integer - p_changed, p_ops ->> p_op, p_op));
    END IF;
END
$$;

-- A newer snapshot makes the messages of older ones superfluous; a compaction keeps its own, since events cannot
-- rebuild a summary.
CREATE FUNCTION turnkeeper.drop_messages(p_conversation_id uuid, p_kept integer) RETURNS void
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
BEGIN
    -- Looked up in a select of its own: there the partial index answers for "data ? 'messages'", while an update would
    -- unpack the data to check it again.
    UPDATE conversation_events e SET data = e.data - 'messages'
     WHERE e.conversation_id = p_conversation_id AND e.seq IN (
        SELECT f.seq FROM (
            SELECT s.seq, s.event FROM conversation_events s
             WHERE s.conversation_id = p_conversation_id AND s.data ? 'messages' AND s.event IN ('answer_end',
                   'approval_required', 'history_compacted', 'ai_answer_end', 'conversation_history_compacted')
             ORDER BY s.seq DESC OFFSET greatest(p_kept, 1)) AS f
         WHERE f.event NOT IN ('history_compacted', 'conversation_history_compacted'));
END
$$;

CREATE FUNCTION turnkeeper.append(
    p_token text, p_batch integer, p_events jsonb, p_finish jsonb DEFAULT NULL, p_snapshots_kept integer DEFAULT 1,
    p_lease_seconds double precision DEFAULT NULL
) RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    v_status text := coalesce(p_finish ->> 'status', 'running');
    v_reason text := p_finish ->> 'finish_reason';
    v_duration bigint;
    v_answer jsonb;
    v_calls jsonb;
    v_new integer;
    v_stopped boolean;  -- an approval_required that arrives under a stop request
    v_queue text;  -- of the next unfinished turn, when this one ends
    r record;
    w record;
BEGIN
    -- The conversation's row is locked first, then the turn's; both are read as they are after the wait.
    SELECT c.conversation_id, c.last_seq, t.account_id, t.turn, t.attempt, t.status, t.last_batch, t.last_batch_result,
           t.stop_requested_at IS NOT NULL AS stop_requested, t.started_at
      INTO r
      FROM conversation_turns t JOIN conversations c ON c.conversation_id = t.conversation_id
     WHERE t.lease_token = p_token FOR UPDATE OF c, t;
    IF p_batch = r.last_batch AND r.last_batch_result IS NOT NULL THEN
        RETURN r.last_batch_result;
    END IF;
    IF r.status IS DISTINCT FROM 'running' OR p_batch IS DISTINCT FROM r.last_batch + 1 THEN
        PERFORM refuse(409, 'lease_lost', 'Another attempt owns the turn, or it has ended; nothing was written.');
    END IF;

    WITH written AS (
        INSERT INTO conversation_events (conversation_id, seq, turn, attempt, event, data)
        SELECT r.conversation_id, r.last_seq + e.n, r.turn, r.attempt,
               CASE WHEN s.stopped THEN 'turn_stopped' ELSE e.value ->> 'event' END,
               CASE WHEN s.stopped THEN '{}' ELSE e.value -> 'data' END
          FROM jsonb_array_elements(p_events) WITH ORDINALITY AS e (value, n),
               LATERAL (SELECT r.stop_requested AND e.value ->> 'event' = 'approval_required' AS stopped) AS s
        RETURNING event, data ? 'messages' AS messages,
            CASE WHEN event IN ('ai_message', 'history_compacted', 'error', 'turn_stopped')
                 THEN data -> 'usage' END AS usage)  -- an answer_end repeats the turn's total
    SELECT count(*) AS events,
           count(*) FILTER (WHERE x.event = 'ai_message') AS rounds,
           coalesce(bool_or(x.messages AND x.event IN ('answer_end', 'approval_required', 'history_compacted')), false)
               AS snapshot,
           coalesce(sum((x.usage ->> 'prompt_tokens')::numeric), 0)::bigint AS prompt_tokens,
           coalesce(sum((x.usage ->> 'completion_tokens')::numeric), 0)::bigint AS completion_tokens,
           coalesce(sum((x.usage ->> 'cached_tokens')::numeric), 0)::bigint AS cached_tokens,
           coalesce(sum((x.usage ->> 'cost_usd')::numeric), 0) AS cost_usd
      INTO w FROM written AS x;

    SELECT jsonb_agg(k || jsonb_build_object('seq', r.last_seq + e.n)), count(*) FILTER (WHERE k ->> 'op' = 'new')
      INTO v_calls, v_new
      FROM jsonb_array_elements(p_events) WITH ORDINALITY AS e (value, n), jsonb_array_elements(e.value -> 'calls') AS k
     WHERE NOT (r.stop_requested AND e.value ->> 'event' = 'approval_required');
    IF v_calls IS NOT NULL THEN
        PERFORM apply_calls(r.conversation_id, r.turn, v_calls);
    END IF;
    IF w.snapshot THEN
        PERFORM drop_messages(r.conversation_id, p_snapshots_kept);
    END IF;

    v_stopped := r.stop_requested AND v_status = 'awaiting_approval';
    IF v_stopped THEN
        v_status := 'stopped';
        v_reason := 'stopped';
    END IF;
    IF v_status IN ('failed', 'stopped') THEN
        PERFORM close_calls(r.conversation_id, r.turn, v_status);
    END IF;
    IF p_finish IS NOT NULL THEN
        v_duration := extract(epoch FROM now() - r.started_at) * 1000;
        SELECT t.queue INTO v_queue FROM conversation_turns t
         WHERE t.conversation_id = r.conversation_id AND t.turn > r.turn AND t.status IN ('pending', 'running')
         ORDER BY t.turn LIMIT 1;
        PERFORM give_place(r.account_id);
    END IF;
    v_answer := jsonb_build_object('first_seq', r.last_seq + 1, 'status', v_status,
        'stop_requested', r.stop_requested, 'next_queue', v_queue);

    UPDATE conversation_turns t
       SET last_batch = p_batch, last_batch_result = v_answer, status = v_status,
           lease_expires_at = greatest(t.lease_expires_at, now() + make_interval(secs => p_lease_seconds)),
           crashes = CASE WHEN w.rounds > 0 THEN 0 ELSE t.crashes END,
           rounds = t.rounds + w.rounds, tool_calls = t.tool_calls + v_new,
           prompt_tokens = t.prompt_tokens + w.prompt_tokens,
           completion_tokens = t.completion_tokens + w.completion_tokens,
           cached_tokens = t.cached_tokens + w.cached_tokens, cost_usd = t.cost_usd + w.cost_usd,
           provider = coalesce(p_finish ->> 'provider', t.provider), model = coalesce(p_finish ->> 'model', t.model),
           finish_reason = v_reason, duration_ms = v_duration,
           error = CASE WHEN NOT v_stopped THEN nullif(p_finish -> 'error', 'null') END,
           retryable = coalesce((p_finish #>> '{error,retryable}')::boolean, false),
           ended_at = CASE WHEN p_finish IS NOT NULL THEN now() END
     WHERE t.conversation_id = r.conversation_id AND t.turn = r.turn;
    IF p_finish IS NULL THEN  -- no indexed column changes, so that the row stays where its index entries point
        UPDATE conversations c
           SET last_seq = c.last_seq + w.events, rounds = c.rounds + w.rounds, tool_calls = c.tool_calls + v_new,
               prompt_tokens = c.prompt_tokens + w.prompt_tokens,
               completion_tokens = c.completion_tokens + w.completion_tokens,
               cached_tokens = c.cached_tokens + w.cached_tokens, cost_usd = c.cost_usd + w.cost_usd
         WHERE c.conversation_id = r.conversation_id;
    ELSE
        UPDATE conversations c
           SET last_seq = c.last_seq + w.events, rounds = c.rounds + w.rounds, tool_calls = c.tool_calls + v_new,
               prompt_tokens = c.prompt_tokens + w.prompt_tokens,
               completion_tokens = c.completion_tokens + w.completion_tokens,
               cached_tokens = c.cached_tokens + w.cached_tokens, cost_usd = c.cost_usd + w.cost_usd,
               duration_ms = c.duration_ms + v_duration, updated_at = now(), ring_backoff_seconds = 5,
               status = conversation_status(c.conversation_id),
               next_ring_at = CASE WHEN v_queue IS NOT NULL THEN now() END
         WHERE c.conversation_id = r.conversation_id;
    END IF;
    RETURN v_answer;
END
$$;

INSERT INTO turnkeeper.schema_migrations (version, min_compatible, name) VALUES (4, 4, 'append');
