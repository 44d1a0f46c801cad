-- What is kept beside the turns: feedback, dead letters, artifacts; and renaming and deleting conversations.

-- Also for signed-in users, on their own rows: the policies decide what the first SELECT finds.
CREATE FUNCTION turnkeeper.record_feedback(
    p_request_id text, p_rating text, p_category text DEFAULT NULL, p_comment text DEFAULT NULL,
    p_account_id text DEFAULT NULL
) RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    v_turns jsonb := (
        SELECT jsonb_agg(jsonb_build_object('account_id', t.account_id, 'id', t.conversation_id, 'turn', t.turn))
          FROM conversation_turns t
         WHERE t.request_id = p_request_id AND (p_account_id IS NULL OR t.account_id = p_account_id));
    f feedback;
BEGIN
    IF p_rating IS NULL OR p_rating NOT IN ('up', 'down') THEN
        PERFORM refuse(400, 'request_invalid', 'rating is neither up nor down; nothing was recorded.');
    END IF;
    IF v_turns IS NULL THEN
        PERFORM refuse(400, 'request_invalid', 'No turn has this request_id; nothing was recorded.');
    END IF;
    IF jsonb_array_length(v_turns) > 1 THEN
        PERFORM refuse(400, 'request_invalid', 'Several accounts have this request_id: name one; nothing was recorded.');
    END IF;
    INSERT INTO feedback AS x (account_id, request_id, conversation_id, turn, rating, category, comment)
    VALUES (v_turns #>> '{0,account_id}', p_request_id, (v_turns #>> '{0,id}')::uuid, (v_turns #>> '{0,turn}')::integer,
            p_rating, p_category, p_comment)
    ON CONFLICT (account_id, request_id) DO UPDATE
        SET rating = excluded.rating, category = excluded.category, comment = excluded.comment, updated_at = now()
    RETURNING * INTO f;
    RETURN to_jsonb(f);
END
$$;

CREATE FUNCTION turnkeeper.record_dead_letter(p_letter jsonb) RETURNS bigint
LANGUAGE sql SET search_path = turnkeeper, pg_temp AS $$
    INSERT INTO dead_letters (account_id, conversation_id, queue, job_id, function, payload, code, description)
    SELECT p_letter ->> 'account_id', p_letter ->> 'conversation_id', p_letter ->> 'queue', p_letter ->> 'job_id',
           p_letter ->> 'function', p_letter -> 'payload', p_letter ->> 'code', p_letter ->> 'description'
    RETURNING letter_id
$$;

CREATE FUNCTION turnkeeper.take_dead_letter(p_letter_id bigint) RETURNS jsonb
LANGUAGE sql SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
    DELETE FROM dead_letters d WHERE d.letter_id = p_letter_id RETURNING to_jsonb(d)
$$;

CREATE FUNCTION turnkeeper.list_dead_letters(p_limit integer DEFAULT 100) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
    SELECT coalesce(jsonb_agg(to_jsonb(x) ORDER BY x.letter_id DESC), '[]')
      FROM (SELECT * FROM dead_letters d ORDER BY d.letter_id DESC LIMIT p_limit) AS x
$$;

CREATE FUNCTION turnkeeper.put_artifact(p_token text, p_artifact jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
DECLARE
    v_conversation_id uuid;
BEGIN
    SELECT t.conversation_id INTO v_conversation_id
      FROM conversation_turns t JOIN conversations c ON c.conversation_id = t.conversation_id
     WHERE t.lease_token = p_token AND t.status = 'running' FOR UPDATE OF c, t;
    IF NOT FOUND THEN
        PERFORM refuse(409, 'lease_lost', 'Another attempt owns the turn, or it has ended; the artifact was not stored.');
    END IF;
    PERFORM store_artifacts(v_conversation_id, jsonb_build_array(p_artifact));
    RETURN 'true';
END
$$;

-- p_artifact_id may come from a model, so it need not be a uuid.
CREATE FUNCTION turnkeeper.get_artifact(p_conversation_id uuid, p_artifact_id text) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = turnkeeper, pg_temp AS $$
    SELECT jsonb_build_object('artifact_id', a.artifact_id, 'name', a.name, 'media_type', a.media_type,
                              'content', translate(encode(a.content, 'base64'), E'\n', ''))
      FROM artifacts a WHERE a.conversation_id = p_conversation_id AND a.artifact_id::text = lower(p_artifact_id)
$$;

CREATE FUNCTION turnkeeper.rename(p_conversation_id uuid, p_title text) RETURNS jsonb
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    c conversations;
BEGIN
    UPDATE conversations x SET title = p_title, updated_at = now()
     WHERE x.conversation_id = p_conversation_id RETURNING * INTO c;
    IF NOT FOUND THEN
        PERFORM refuse(404, 'conversation_unknown', format('There is no conversation %s; nothing was renamed.', p_conversation_id));
    END IF;
    RETURN to_jsonb(c);
END
$$;

CREATE FUNCTION turnkeeper.delete_conversation(p_conversation_id uuid) RETURNS boolean
LANGUAGE plpgsql SET search_path = turnkeeper, pg_temp AS $$
BEGIN
    DELETE FROM dead_letters d WHERE d.conversation_id = p_conversation_id::text;
    DELETE FROM conversations c WHERE c.conversation_id = p_conversation_id;
    RETURN FOUND;
END
$$;

INSERT INTO turnkeeper.schema_migrations (version, min_compatible, name) VALUES (6, 6, 'beside');
