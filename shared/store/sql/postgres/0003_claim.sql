-- Claiming a turn, and ending it where the claim finds that it must not run.

-- Close the calls up to a turn that ended by error or stop, save those that a later turn has decided.
CREATE FUNCTION turnkeeper.close_calls(p_conversation_id uuid, p_turn integer, p_status text) RETURNS void
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
BEGIN
    UPDATE tool_calls k
       SET state = CASE WHEN k.state = 'executing' THEN 'unknown' ELSE 'superseded' END, ended_at = now(),
           reason = CASE p_status WHEN 'stopped' THEN 'the turn was stopped' ELSE 'the turn ended with an error' END
     WHERE k.conversation_id = p_conversation_id AND k.turn <= p_turn AND k.result_seq IS NULL
       AND (k.state = 'executing' OR k.state IN ('pending', 'approved') AND coalesce(k.decided_turn, 0) <= p_turn);
END
$$;

-- End an unclaimed turn with an event of its own; the event's row.
CREATE FUNCTION turnkeeper.end_turn(
    t turnkeeper.conversation_turns, p_status text, p_reason text, p_event text, p_description text, p_retryable boolean
) RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    v_data jsonb := jsonb_build_object('code', p_reason, 'description', p_description, 'retryable', p_retryable);
    v_duration bigint := coalesce(extract(epoch FROM now() - t.started_at) * 1000, 0);
    v_seq bigint;
    e conversation_events;
BEGIN
    UPDATE conversation_turns x
       SET status = p_status, finish_reason = p_reason, retryable = p_retryable, crashes = t.crashes, ended_at = now(),
           error = CASE WHEN p_status = 'failed' THEN v_data END, duration_ms = v_duration,
           wait_reason = NULL, wait_until = NULL
     WHERE x.conversation_id = t.conversation_id AND x.turn = t.turn;
    UPDATE conversations x
       SET last_seq = x.last_seq + 1, duration_ms = x.duration_ms + v_duration, updated_at = now()
     WHERE x.conversation_id = t.conversation_id RETURNING x.last_seq INTO v_seq;
    INSERT INTO conversation_events (conversation_id, seq, turn, attempt, event, data)
    VALUES (t.conversation_id, v_seq, t.turn, t.attempt, p_event, v_data) RETURNING * INTO e;
    IF p_reason <> 'approvals_open' THEN  -- such a question closes nothing
        PERFORM close_calls(t.conversation_id, t.turn, p_status);
    END IF;
    IF t.status = 'running' THEN
        PERFORM give_place(t.account_id);
    END IF;
    RETURN to_jsonb(e);
END
$$;

-- A turn of the account runs no more: the one that has waited longest for its place is due now.
CREATE FUNCTION turnkeeper.give_place(p_account_id text) RETURNS void
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
BEGIN
    UPDATE conversations c SET next_ring_at = now(), ring_backoff_seconds = 5
     WHERE c.conversation_id = (
        SELECT x.conversation_id FROM conversation_turns t JOIN conversations x ON x.conversation_id = t.conversation_id
         WHERE t.account_id = p_account_id AND t.wait_reason = 'account_limit' AND x.next_ring_at > now()
         ORDER BY t.created_at LIMIT 1 FOR UPDATE OF x SKIP LOCKED);
END
$$;

-- Whether a turn of the account may begin. Two that ask at once are told one after the other.
CREATE FUNCTION turnkeeper.has_place(p_account_id text, p_account_turns integer) RETURNS boolean
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(current_schema() || ' ' || p_account_id, 0));
    RETURN p_account_turns > (
        SELECT count(*) FROM conversation_turns t WHERE t.account_id = p_account_id AND t.status = 'running');
END
$$;

-- Turn t waits for a place of its account; the conversation is rung again after its back-off, or by give_place.
CREATE FUNCTION turnkeeper.wait_for_place(t turnkeeper.conversation_turns) RETURNS void
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
BEGIN
    UPDATE conversation_turns x SET wait_reason = 'account_limit', wait_until = NULL
     WHERE x.conversation_id = t.conversation_id AND x.turn = t.turn AND x.wait_reason IS DISTINCT FROM 'account_limit';
    UPDATE conversations x
       SET next_ring_at = now() + make_interval(secs => x.ring_backoff_seconds),
           ring_backoff_seconds = least(60, x.ring_backoff_seconds * 2)
     WHERE x.conversation_id = t.conversation_id AND x.next_ring_at <= now();
END
$$;

-- The answer to a claim that got turn t, with all that hydration needs, so that it is one round trip. JSON as text,
-- since building jsonb would take a large snapshot apart and put it together again at every level.
CREATE FUNCTION turnkeeper.lease_answer(
    c turnkeeper.conversations, t turnkeeper.conversation_turns, p_submitted jsonb, p_ended jsonb
) RETURNS json
LANGUAGE plpgsql STABLE SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    s conversation_events;
BEGIN
    SELECT * INTO s FROM conversation_events e
     WHERE e.conversation_id = t.conversation_id AND e.event IN
           ('answer_end', 'approval_required', 'history_compacted', 'ai_answer_end', 'conversation_history_compacted')
     ORDER BY e.seq DESC LIMIT 1;
    RETURN json_build_object(
        'result', 'lease', 'now', now(), 'submitted', p_submitted, 'ended', p_ended, 'taken_over', t.taken_over,
        'conversation', to_json(c),
        'turn', to_json(t),
        'snapshot', CASE WHEN s.seq IS NOT NULL THEN to_json(s) END,
        'turns', (SELECT coalesce(json_agg(json_build_object('turn', x.turn, 'kind', x.kind, 'request', x.request)
                                           ORDER BY x.turn), '[]')
                    FROM conversation_turns x WHERE x.conversation_id = t.conversation_id
                     AND x.turn > coalesce(s.turn, 0) AND x.turn <= t.turn),
        'events', (SELECT coalesce(json_agg(to_json(e) ORDER BY e.seq), '[]')
                     FROM conversation_events e WHERE e.conversation_id = t.conversation_id
                      AND e.seq > coalesce(s.seq, 0) AND e.turn BETWEEN coalesce(s.turn, 0) AND t.turn
                      AND e.event IN ('ai_message', 'tool_call_result', 'tool_calling_result')),
        'calls', (SELECT coalesce(json_agg(to_json(k) ORDER BY k.turn, k.step, k.call_index), '[]')
                    FROM tool_calls k WHERE k.conversation_id = t.conversation_id AND k.turn <= t.turn
                     AND k.result_seq IS NULL),
        'rules', (SELECT coalesce(json_agg(to_json(r) ORDER BY r.rule_id), '[]')
                    FROM approval_rules r WHERE r.account_id = c.account_id
                     AND (r.scope = 'account' OR r.scope = 'user' AND r.user_id = c.user_id
                          OR r.scope = 'conversation' AND r.conversation_id = c.conversation_id)));
END
$$;

CREATE FUNCTION turnkeeper.claim(
    p_conversation_id uuid, p_worker text, p_claim_id text, p_lease_seconds double precision, p_max_crashes integer,
    p_request jsonb DEFAULT NULL, p_artifacts jsonb DEFAULT '[]', p_account_turns integer DEFAULT NULL,
    p_account_cost_usd double precision DEFAULT NULL
) RETURNS json
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    v_lease_end timestamptz := now() + make_interval(secs => p_lease_seconds);
    v_submitted jsonb;
    v_ended jsonb := '[]';
    c conversations;
    t conversation_turns;
BEGIN
    IF p_request IS NOT NULL THEN
        v_submitted := submit(p_request, p_artifacts);
    END IF;
    SELECT * INTO c FROM conversations WHERE conversation_id = p_conversation_id FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM refuse(404, 'conversation_unknown', format('There is no conversation %s.', p_conversation_id));
    END IF;

    LOOP
        SELECT * INTO t FROM conversation_turns x
         WHERE x.conversation_id = p_conversation_id AND x.status IN ('pending', 'running') ORDER BY x.turn LIMIT 1;
        IF NOT FOUND THEN
            IF v_ended <> '[]' THEN
                UPDATE conversations SET next_ring_at = NULL, status = conversation_status(p_conversation_id)
                 WHERE conversation_id = p_conversation_id;
            END IF;
            RETURN json_build_object('result', 'idle', 'now', now(), 'submitted', v_submitted, 'ended', v_ended);
        END IF;
        IF t.status = 'running' AND t.claim_id = p_claim_id THEN  -- the reply to this claim was lost
            UPDATE conversation_turns x SET lease_expires_at = v_lease_end
             WHERE x.conversation_id = t.conversation_id AND x.turn = t.turn RETURNING * INTO t;
            EXIT;
        END IF;
        IF t.status = 'running' AND t.lease_expires_at > now() THEN
            RETURN json_build_object('result', 'busy', 'now', now(), 'submitted', v_submitted, 'ended', v_ended);
        END IF;
        IF t.status = 'running' THEN
            t.crashes := t.crashes + 1;
        END IF;
        IF t.stop_requested_at IS NOT NULL THEN
            v_ended := v_ended || end_turn(t, 'stopped', 'stopped', 'turn_stopped', 'The turn was stopped on request.', false);
        ELSIF t.crashes >= p_max_crashes THEN
            v_ended := v_ended || end_turn(t, 'failed', 'crash_cap', 'error',
                format('The turn was given up after %s attempts that were cut off.', t.crashes), true);
        ELSIF t.kind = 'ask' AND t.request ->> 'supersede' = 'false' AND t.attempt = 0 AND EXISTS (
            SELECT 1 FROM tool_calls k
             WHERE k.conversation_id = t.conversation_id AND k.turn < t.turn AND k.gated
               AND (k.state = 'pending' OR k.state = 'approved' AND k.decided_turn > t.turn)) THEN
            v_ended := v_ended || end_turn(t, 'failed', 'approvals_open', 'error',
                'A call still waits for a decision; the question was not asked.', false);
        ELSIF t.kind <> 'tool_decisions' AND t.attempt = 0 AND p_account_cost_usd <= (
            SELECT coalesce(sum(x.cost_usd), 0) FROM conversation_turns x
             WHERE x.account_id = t.account_id AND x.started_at >= date_trunc('day', now())) THEN
            v_ended := v_ended || end_turn(t, 'failed', 'account_budget', 'error',
                'The account has spent its budget of the day; the question was not asked.', true);
        ELSIF p_account_turns IS NOT NULL AND t.status = 'pending' AND NOT has_place(t.account_id, p_account_turns) THEN
            PERFORM wait_for_place(t);
            IF v_ended <> '[]' THEN
                UPDATE conversations SET status = 'pending' WHERE conversation_id = p_conversation_id;
            END IF;
            RETURN json_build_object('result', 'busy', 'now', now(), 'submitted', v_submitted, 'ended', v_ended,
                'wait_reason', 'account_limit');
        ELSE
            UPDATE conversation_turns x
               SET status = 'running', attempt = x.attempt + 1, crashes = t.crashes, worker = p_worker,
                   taken_over = CASE WHEN x.status = 'running' THEN 'crash' WHEN x.attempt > 0 THEN 'release' END,
                   wait_reason = NULL, wait_until = NULL,
                   claim_id = p_claim_id, lease_token = gen_random_uuid()::text, lease_expires_at = v_lease_end,
                   last_batch = 0, last_batch_result = NULL, started_at = coalesce(x.started_at, now())
             WHERE x.conversation_id = t.conversation_id AND x.turn = t.turn RETURNING * INTO t;
            IF t.turn > 1 THEN
                PERFORM settle_before(t);
            END IF;
            EXIT;
        END IF;
    END LOOP;

    UPDATE conversations x SET status = 'running', next_ring_at = v_lease_end, ring_backoff_seconds = 5, updated_at = now()
     WHERE x.conversation_id = p_conversation_id RETURNING * INTO c;
    RETURN lease_answer(c, t, v_submitted, v_ended);
END
$$;

-- Taking turn t completes the turns that waited before it, and closes or expires what they left open.
CREATE FUNCTION turnkeeper.settle_before(t turnkeeper.conversation_turns) RETURNS void
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
BEGIN
    UPDATE conversation_turns x SET status = 'completed'
     WHERE x.conversation_id = t.conversation_id AND x.turn < t.turn AND x.status = 'awaiting_approval';
    UPDATE tool_calls k
       SET state = CASE WHEN t.kind = 'ask' THEN 'superseded' ELSE 'expired' END,
           reason = CASE WHEN t.kind = 'ask' THEN 'superseded by a new request' ELSE 'the approval request had expired' END,
           decided_turn = CASE WHEN t.kind = 'ask' THEN coalesce(k.decided_turn, t.turn) ELSE t.turn END,
           decided_at = coalesce(k.decided_at, now()), ended_at = now()
     WHERE k.conversation_id = t.conversation_id AND k.turn < t.turn AND k.result_seq IS NULL
       AND (k.state = 'pending' AND (t.kind = 'ask' OR k.expires_at < now())
            OR t.kind = 'ask' AND k.state = 'approved' AND k.decided_turn IS DISTINCT FROM t.turn);
END
$$;

INSERT INTO turnkeeper.schema_migrations (version, min_compatible, name) VALUES (3, 3, 'claim');
