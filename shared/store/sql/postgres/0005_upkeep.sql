-- Leases between claim and end, rings, and stops.

CREATE FUNCTION turnkeeper.renew(p_tokens jsonb, p_lease_seconds double precision) RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
DECLARE
    v_lease_end timestamptz := now() + make_interval(secs => p_lease_seconds);
BEGIN
    -- Locked in one order, so that two processes cannot wait for each other.
    WITH mine AS MATERIALIZED (
        SELECT t.conversation_id, t.turn
          FROM conversation_turns t JOIN conversations c ON c.conversation_id = t.conversation_id
         WHERE t.lease_token IN (SELECT jsonb_array_elements_text(p_tokens)) AND t.status = 'running'
         ORDER BY t.conversation_id FOR UPDATE OF c, t
    ), leases AS (
        UPDATE conversation_turns t SET lease_expires_at = v_lease_end FROM mine
         WHERE t.conversation_id = mine.conversation_id AND t.turn = mine.turn
    )
    UPDATE conversations c SET next_ring_at = v_lease_end FROM mine WHERE c.conversation_id = mine.conversation_id;
    RETURN (SELECT jsonb_build_object(
        'lost', coalesce(jsonb_agg(k.token) FILTER (WHERE t.turn IS NULL), '[]'),
        'stopped', coalesce(jsonb_agg(k.token) FILTER (WHERE t.status = 'running' AND t.stop_requested_at IS NOT NULL), '[]'))
        FROM jsonb_array_elements_text(p_tokens) AS k (token)
        LEFT JOIN conversation_turns t ON t.lease_token = k.token);
END
$$;

CREATE FUNCTION turnkeeper.release(p_token text, p_delay_seconds double precision DEFAULT 0) RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
DECLARE
    r record;
BEGIN
    SELECT t.conversation_id, t.turn, t.queue INTO r
      FROM conversation_turns t JOIN conversations c ON c.conversation_id = t.conversation_id
     WHERE t.lease_token = p_token AND t.status = 'running' FOR UPDATE OF c, t;
    IF NOT FOUND THEN
        PERFORM refuse(409, 'lease_lost', 'Another attempt owns the turn, or it has ended; nothing was released.');
    END IF;
    UPDATE conversation_turns t
       SET status = 'pending', lease_token = NULL, lease_expires_at = NULL, claim_id = NULL
     WHERE t.conversation_id = r.conversation_id AND t.turn = r.turn;
    UPDATE conversations c
       SET status = 'pending', next_ring_at = now() + make_interval(secs => p_delay_seconds),
           ring_backoff_seconds = 5, updated_at = now()
     WHERE c.conversation_id = r.conversation_id;
    RETURN jsonb_build_object('conversation_id', r.conversation_id, 'queue', r.queue);
END
$$;

-- One statement. A conversation that somebody has locked is being worked on: it is left for the next time. PL/pgSQL,
-- so that it is planned for the given p_everything: usually only what is due is looked at.
CREATE FUNCTION turnkeeper.reap(p_limit integer DEFAULT 100, p_everything boolean DEFAULT false) RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
DECLARE
    v_rung jsonb;
BEGIN
    WITH due AS MATERIALIZED (
        SELECT c.conversation_id, t.queue, t.lease_expires_at
          FROM conversations c
         CROSS JOIN LATERAL (
               SELECT x.queue, x.status, x.lease_expires_at FROM conversation_turns x
                WHERE x.conversation_id = c.conversation_id AND x.status IN ('pending', 'running')
                ORDER BY x.turn LIMIT 1) AS t
         WHERE c.next_ring_at IS NOT NULL
           AND (c.next_ring_at <= now() OR p_everything AND (t.status = 'pending' OR t.lease_expires_at <= now()))
         ORDER BY c.next_ring_at LIMIT p_limit FOR UPDATE OF c SKIP LOCKED
    ), rung AS (
        UPDATE conversations c
           SET next_ring_at = CASE WHEN due.lease_expires_at > now() THEN
                   least(due.lease_expires_at, now() + make_interval(secs => c.ring_backoff_seconds))
                   ELSE now() + make_interval(secs => c.ring_backoff_seconds) END,
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
    PERFORM close_calls(p_conversation_id, t.turn, 'the turn was stopped');
    UPDATE conversations x SET status = 'stopped', next_ring_at = NULL, updated_at = now()
     WHERE x.conversation_id = p_conversation_id;
    RETURN jsonb_build_object('turn', t.turn, 'effect', 'stopped', 'queue', NULL);
END
$$;

INSERT INTO turnkeeper.schema_migrations (version, min_compatible, name) VALUES (5, 5, 'upkeep');
