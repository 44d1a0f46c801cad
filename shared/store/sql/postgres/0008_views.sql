-- The same rows in the words of a session list and of a transcript. They show a caller what the tables show him.

CREATE VIEW turnkeeper.sessions WITH (security_invoker = true) AS
SELECT c.conversation_id AS session_id,
       c.account_id,
       c.user_id,
       c.team_id,
       c.target ->> 'mode'         AS mode,
       c.target ->> 'server_id'    AS server_id,
       c.target ->> 'server_name'  AS server_name,
       c.target ->> 'server_host'  AS server_host,
       c.target ->> 'cluster_id'   AS cluster_id,
       c.target ->> 'cluster_name' AS cluster_name,
       c.target ->> 'namespace'    AS namespace,
       c.target ->> 'pod'          AS pod_name,
       c.target ->> 'container'    AS container,
       c.title,
       CASE c.status WHEN 'completed' THEN 'done' WHEN 'stopped' THEN 'aborted' WHEN 'failed' THEN 'error'
                     ELSE 'running' END AS status,
       t.provider,
       coalesce(t.model, c.model) AS model,
       c.rounds,
       c.prompt_tokens + c.completion_tokens AS total_tokens,
       c.duration_ms AS duration,
       t.error ->> 'description' AS error,
       c.created_at,
       c.updated_at
  FROM turnkeeper.conversations c
  LEFT JOIN turnkeeper.conversation_turns t ON t.conversation_id = c.conversation_id AND t.turn = c.last_turn;

CREATE VIEW turnkeeper.session_messages WITH (security_invoker = true) AS
SELECT e.conversation_id AS session_id,
       e.seq,
       e.turn,
       coalesce((e.data ->> 'step')::integer, k.step) AS round,
       CASE WHEN e.event = 'user_message' THEN 'session'
            WHEN e.event = 'ai_message' THEN 'thought'
            WHEN e.event IN ('tool_call_started', 'start_tool_calling') THEN 'tool_call'
            WHEN e.event IN ('tool_call_result', 'tool_calling_result') THEN 'tool_result'
            WHEN e.event IN ('answer_end', 'ai_answer_end') THEN 'done'
            ELSE 'error' END AS type,
       CASE WHEN e.event = 'user_message' THEN 'user'
            WHEN e.event IN ('tool_call_result', 'tool_calling_result') THEN 'tool'
            ELSE 'assistant' END AS role,
       CASE WHEN e.event = 'user_message' THEN e.data ->> 'ask'
            WHEN e.event = 'ai_message' THEN e.data #>> '{message,content}'
            WHEN e.event IN ('answer_end', 'ai_answer_end') THEN e.data ->> 'content'
            WHEN e.event IN ('error', 'turn_stopped') THEN e.data ->> 'description' END AS content,
       coalesce(k.tool_name, e.data ->> 'tool_name', e.data ->> 'name') AS tool_name,
       coalesce(k.arguments, e.data ->> 'arguments') AS tool_args,
       CASE WHEN e.event IN ('tool_call_result', 'tool_calling_result')
            THEN coalesce(e.data #>> '{message,content}', k.result_summary) END AS tool_output,
       coalesce(k.risk, e.data ->> 'risk') AS risk,
       CASE WHEN k.state IS NOT NULL THEN k.state = 'done'
            WHEN e.event = 'error' THEN false
            WHEN e.event IN ('answer_end', 'ai_answer_end') THEN true END AS success,
       coalesce(k.duration_ms, (e.data ->> 'duration_ms')::numeric::bigint) AS duration,
       (e.data #>> '{usage,prompt_tokens}')::numeric::bigint
           + (e.data #>> '{usage,completion_tokens}')::numeric::bigint AS tokens,
       e.created_at
  FROM turnkeeper.conversation_events e
  LEFT JOIN turnkeeper.tool_calls k
    ON k.conversation_id = e.conversation_id AND k.turn <= e.turn AND k.result_seq = e.seq
   AND e.event = 'tool_call_result'
 WHERE e.event IN ('user_message', 'ai_message', 'tool_call_started', 'start_tool_calling', 'tool_call_result',
                   'tool_calling_result', 'answer_end', 'ai_answer_end', 'error', 'turn_stopped');

INSERT INTO turnkeeper.schema_migrations (version, min_compatible, name) VALUES (8, 8, 'views');
