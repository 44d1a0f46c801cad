-- Leases between claim and end, rings, and stops.

-- What somebody has locked is passed by, so that one conversation that hangs does not cost the others their leases.
CREATE FUNCTION turnkeeper.renew(p_tokens jsonb, p_lease_seconds double precision) RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
DECLARE
    v_lease_end timestamptz := now() + make_interval(secs => p_lease_seconds);
    v_renewed text[];
BEGIN
    WITH mine AS MATERIALIZED (
        SELECT t.conversation_id, t.turn, t.lease_token
          FROM conversation_turns t JOIN conversations c ON c.conversation_id = t.conversation_id
         WHERE t.lease_token IN (SELECT jsonb_array_elements_text(p_tokens)) AND t.status = 'running'
           FOR UPDATE OF c, t SKIP LOCKED
    ), leases AS (
        UPDATE conversation_turns t SET lease_expires_at = v_lease_end FROM mine
         WHERE t.conversation_id = mine.conversation_id AND t.turn = mine.turn
    ), rings AS (
        UPDATE conversations c SET next_ring_at = v_lease_end FROM mine WHERE c.conversation_id = mine.conversation_id
    )
    SELECT array_agg(mine.lease_token) INTO v_renewed FROM mine;
    RETURN (SELECT jsonb_build_object(
        'lost', coalesce(jsonb_agg(k.token) FILTER (WHERE t.turn IS NULL), '[]'),
        'stopped', coalesce(jsonb_agg(k.token) FILTER (WHERE t.status = 'running' AND t.stop_requested_at IS NOT NULL), '[]'),
        'skipped', coalesce(jsonb_agg(k.token) FILTER (
            WHERE t.status = 'running' AND k.token <> ALL (coalesce(v_renewed, '{}'))), '[]'))
        FROM jsonb_array_elements_text(p_tokens) AS k (token)
        LEFT JOIN conversation_turns t ON t.lease_token = k.token);
END
$$;

CREATE FUNCTION turnkeeper.release(p_token text, p_delay_seconds double precision DEFAULT 0) RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
DECLARE
    r record;
BEGIN
    SELECT t.conversation_id, t.turn, t.account_id, t.queue INTO r
      FROM conversation_turns t JOIN conversations c ON c.conversation_id = t.conversation_id
     WHERE t.lease_token = p_token AND t.status = 'running' FOR UPDATE OF c, t;
    IF NOT FOUND THEN
        PERFORM refuse(409, 'lease_lost', 'Another attempt owns the turn, or it has ended; nothing was released.');
    END IF;
    UPDATE conversation_turns t
       SET status = 'pending', lease_token = NULL, lease_expires_at = NULL, claim_id = NULL,
           wait_reason = CASE WHEN p_delay_seconds > 0 THEN 'delayed' END,
           wait_until = CASE WHEN p_delay_seconds > 0 THEN now() + make_interval(secs => p_delay_seconds) END
     WHERE t.conversation_id = r.conversation_id AND t.turn = r.turn;
    PERFORM give_place(r.account_id);
    UPDATE conversations c
       SET status = 'pending', next_ring_at = now() + make_interval(secs => p_delay_seconds),
           ring_backoff_seconds = 5, updated_at = now()
     WHERE c.conversation_id = r.conversation_id;
    RETURN jsonb_build_object('conversation_id', r.conversation_id, 'queue', r.queue);
END
$$;

-- What is due, put off by its back-off. A conversation that somebody has locked is being worked on: it is left for the
-- next time. One whose lease was renewed by an append is due only when that ends. With p_everything nothing is answered:
-- what only a back-off holds up becomes due now, for the pages that follow.
CREATE FUNCTION turnkeeper.reap(p_limit integer DEFAULT 100, p_everything boolean DEFAULT false) RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
DECLARE
    v_rung jsonb;
BEGIN
    IF p_everything THEN
        UPDATE conversations c SET next_ring_at = now() WHERE c.conversation_id IN (
            SELECT x.conversation_id FROM conversations x
             WHERE x.next_ring_at > now() AND NOT EXISTS (
                SELECT 1 FROM conversation_turns t WHERE t.conversation_id = x.conversation_id
                   AND t.status IN ('pending', 'running') AND (t.lease_expires_at > now() OR t.wait_until > now()))
               FOR UPDATE OF x SKIP LOCKED);
        RETURN '[]';
    END IF;
    WITH live AS MATERIALIZED (
        SELECT c.conversation_id, t.lease_expires_at
          FROM conversations c JOIN conversation_turns t ON t.conversation_id = c.conversation_id
         WHERE c.next_ring_at <= now() AND t.status = 'running' AND t.lease_expires_at > now()
           FOR UPDATE OF c SKIP LOCKED
    ), due AS MATERIALIZED (
        SELECT c.conversation_id, t.queue
          FROM conversations c
         CROSS JOIN LATERAL (
               SELECT x.queue, x.lease_expires_at FROM conversation_turns x
                WHERE x.conversation_id = c.conversation_id AND x.status IN ('pending', 'running')
                ORDER BY x.turn LIMIT 1) AS t
         WHERE c.next_ring_at <= now() AND coalesce(t.lease_expires_at, now()) <= now()
         ORDER BY c.next_ring_at LIMIT p_limit FOR UPDATE OF c SKIP LOCKED
    ), later AS (
        UPDATE conversations c SET next_ring_at = live.lease_expires_at
          FROM live WHERE c.conversation_id = live.conversation_id
    ), rung AS (
        UPDATE conversations c
           SET next_ring_at = now() + make_interval(secs => c.ring_backoff_seconds),
               ring_backoff_seconds = least(60, c.ring_backoff_seconds * 2)
          FROM due WHERE c.conversation_id = due.conversation_id
        RETURNING c.conversation_id, due.queue
    )
    SELECT coalesce(jsonb_agg(jsonb_build_object('conversation_id', r.conversation_id, 'queue', r.queue)), '[]')
      INTO v_rung FROM rung AS r;
    RETURN v_rung;
END
$$;

CREATE FUNCTION turnkeeper.stop(p_conversation_id uuid, p_turn integer DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
DECLARE
    c conversations;
    t conversation_turns;
BEGIN
    SELECT * INTO c FROM conversations WHERE conversation_id = p_conversation_id FOR UPDATE;
    SELECT * INTO t FROM conversation_turns x
     WHERE x.conversation_id = p_conversation_id AND x.status IN ('pending', 'running')
       AND (p_turn IS NULL OR x.turn = p_turn)
     ORDER BY x.turn LIMIT 1;
    IF FOUND THEN
        UPDATE conversation_turns x SET stop_requested_at = coalesce(x.stop_requested_at, now())
         WHERE x.conversation_id = p_conversation_id AND x.turn = t.turn;
        UPDATE conversations x SET next_ring_at = now(), ring_backoff_seconds = 5
         WHERE x.conversation_id = p_conversation_id AND conversation_status(p_conversation_id) = 'pending';
        RETURN jsonb_build_object('turn', t.turn, 'effect', 'flagged', 'queue', t.queue);
    END IF;
    SELECT * INTO t FROM conversation_turns x
     WHERE x.conversation_id = p_conversation_id AND x.turn = c.last_turn AND x.status = 'awaiting_approval'
       AND (p_turn IS NULL OR x.turn = p_turn) AND conversation_status(p_conversation_id) NOT IN ('pending', 'running');
    IF NOT FOUND THEN
        RETURN jsonb_build_object('turn', NULL, 'effect', 'none', 'queue', NULL);
    END IF;
    UPDATE conversation_turns x
       SET status = 'stopped', finish_reason = 'stopped', stop_requested_at = now(), ended_at = now()
     WHERE x.conversation_id = p_conversation_id AND x.turn = t.turn;
    PERFORM close_calls(p_conversation_id, t.turn, 'stopped');
    UPDATE conversations x SET status = 'stopped', next_ring_at = NULL, updated_at = now()
     WHERE x.conversation_id = p_conversation_id;
    RETURN jsonb_build_object('turn', t.turn, 'effect', 'stopped', 'queue', NULL);
END
$$;

INSERT INTO turnkeeper.schema_migrations (version, min_compatible, name) VALUES (5, 5, 'upkeep');
