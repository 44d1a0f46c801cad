-- min_compatible: 1
-- The tables of docs/store.md for SQLite. JSON is text, times are RFC 3339 UTC text with microseconds (so that they
-- sort), booleans are 0 and 1, ids are text.

CREATE TABLE conversations (
    conversation_id      TEXT PRIMARY KEY,
    account_id           TEXT NOT NULL,
    user_id              TEXT,
    team_id              TEXT,
    title                TEXT NOT NULL DEFAULT '',
    status               TEXT NOT NULL DEFAULT 'pending'
                         CHECK (status IN ('pending', 'running', 'awaiting_approval', 'completed', 'failed', 'stopped')),
    target               TEXT,
    target_id            TEXT,
    model                TEXT,
    metadata             TEXT NOT NULL DEFAULT '{}',
    last_seq             INTEGER NOT NULL DEFAULT 0,
    last_turn            INTEGER NOT NULL DEFAULT 0,
    next_ring_at         TEXT,
    ring_backoff_seconds INTEGER NOT NULL DEFAULT 5,
    rounds               INTEGER NOT NULL DEFAULT 0,
    tool_calls           INTEGER NOT NULL DEFAULT 0,
    prompt_tokens        INTEGER NOT NULL DEFAULT 0,
    completion_tokens    INTEGER NOT NULL DEFAULT 0,
    cached_tokens        INTEGER NOT NULL DEFAULT 0,
    cost_usd             REAL NOT NULL DEFAULT 0,
    duration_ms          INTEGER NOT NULL DEFAULT 0,
    created_at           TEXT NOT NULL,
    updated_at           TEXT NOT NULL
) STRICT;

CREATE INDEX conversations_due ON conversations (next_ring_at) WHERE next_ring_at IS NOT NULL;
CREATE INDEX conversations_activity ON conversations (account_id, updated_at);
CREATE INDEX conversations_updated ON conversations (updated_at);

CREATE TABLE conversation_turns (
    conversation_id   TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE,
    turn              INTEGER NOT NULL,
    account_id        TEXT NOT NULL,
    request_id        TEXT NOT NULL,
    digest            TEXT NOT NULL,
    kind              TEXT NOT NULL CHECK (kind IN ('ask', 'tool_decisions', 'retry')),
    request           TEXT NOT NULL,
    queue             TEXT NOT NULL,
    status            TEXT NOT NULL
                      CHECK (status IN ('pending', 'running', 'awaiting_approval', 'completed', 'failed', 'stopped')),
    attempt           INTEGER NOT NULL DEFAULT 0,
    crashes           INTEGER NOT NULL DEFAULT 0,
    worker            TEXT,
    lease_token       TEXT,
    lease_expires_at  TEXT,
    claim_id          TEXT,
    last_batch        INTEGER NOT NULL DEFAULT 0,
    last_batch_result TEXT,
    stop_requested_at TEXT,
    taken_over        TEXT CHECK (taken_over IN ('crash', 'release')),
    wait_reason       TEXT CHECK (wait_reason IN ('delayed', 'account_limit')),
    wait_until        TEXT,
    decisions         TEXT NOT NULL DEFAULT '{}',
    provider          TEXT,
    model             TEXT,
    rounds            INTEGER NOT NULL DEFAULT 0,
    tool_calls        INTEGER NOT NULL DEFAULT 0,
    prompt_tokens     INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens     INTEGER NOT NULL DEFAULT 0,
    cost_usd          REAL NOT NULL DEFAULT 0,
    finish_reason     TEXT,
    duration_ms       INTEGER,
    error             TEXT,
    retryable         INTEGER NOT NULL DEFAULT 0,
    created_at        TEXT NOT NULL,
    started_at        TEXT,
    ended_at          TEXT,
    PRIMARY KEY (conversation_id, turn),
    UNIQUE (request_id, account_id)  -- in this order, since feedback knows the first alone
) STRICT;

CREATE INDEX turns_unfinished ON conversation_turns (conversation_id, turn) WHERE status IN ('pending', 'running');
CREATE UNIQUE INDEX turns_token ON conversation_turns (lease_token) WHERE lease_token IS NOT NULL;
-- The limits of an account: what runs, what waits for a place, and what was begun today.
CREATE INDEX turns_running ON conversation_turns (account_id) WHERE status = 'running';
CREATE INDEX turns_limited ON conversation_turns (account_id, created_at) WHERE wait_reason = 'account_limit';
CREATE INDEX turns_begun ON conversation_turns (account_id, started_at) WHERE started_at IS NOT NULL;

CREATE TABLE conversation_events (
    conversation_id TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE,
    seq             INTEGER NOT NULL,
    turn            INTEGER NOT NULL,
    attempt         INTEGER NOT NULL,
    event           TEXT NOT NULL,
    data            TEXT NOT NULL,
    created_at      TEXT NOT NULL,
    PRIMARY KEY (conversation_id, seq)
) STRICT;

CREATE INDEX events_snapshots ON conversation_events (conversation_id, seq) WHERE event IN
    ('answer_end', 'approval_required', 'history_compacted', 'ai_answer_end', 'conversation_history_compacted');

CREATE TABLE tool_calls (
    conversation_id       TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE,
    turn                  INTEGER NOT NULL,
    step                  INTEGER NOT NULL,
    call_index            INTEGER NOT NULL,
    tool_call_id          TEXT NOT NULL,
    tool_name             TEXT NOT NULL,
    arguments             TEXT NOT NULL,
    arguments_digest      TEXT NOT NULL,
    risk                  TEXT NOT NULL CHECK (risk IN ('read_only', 'idempotent', 'side_effect')),
    kind                  TEXT NOT NULL CHECK (kind IN ('tool', 'frontend')),
    gated                 INTEGER NOT NULL,
    state                 TEXT NOT NULL CHECK (state IN ('pending', 'approved', 'denied', 'expired', 'superseded',
                                                         'executing', 'done', 'failed', 'unknown')),
    approval_token_sha256 TEXT,
    expires_at            TEXT,
    decided_turn          INTEGER,
    decided_by            TEXT,
    decision              TEXT,
    reason                TEXT,
    result_summary        TEXT,
    result_raw            TEXT,
    result_seq            INTEGER,
    duration_ms           INTEGER,
    created_at            TEXT NOT NULL,
    decided_at            TEXT,
    started_at            TEXT,
    ended_at              TEXT,
    PRIMARY KEY (conversation_id, turn, step, call_index)
) STRICT;

CREATE INDEX calls_waiting ON tool_calls (conversation_id) WHERE state = 'pending';
CREATE INDEX calls_without_result ON tool_calls (conversation_id, turn) WHERE result_seq IS NULL;
CREATE INDEX calls_by_id ON tool_calls (conversation_id, tool_call_id);

CREATE TABLE approval_rules (
    rule_id         INTEGER PRIMARY KEY AUTOINCREMENT,
    account_id      TEXT NOT NULL,
    user_id         TEXT,
    conversation_id TEXT REFERENCES conversations ON DELETE CASCADE,
    scope           TEXT NOT NULL CHECK (scope IN ('conversation', 'user', 'account')),
    tool_name       TEXT NOT NULL,
    prefix          TEXT,
    created_by      TEXT,
    created_at      TEXT NOT NULL
) STRICT;

CREATE INDEX rules_account ON approval_rules (account_id);
CREATE INDEX rules_conversation ON approval_rules (conversation_id);

CREATE TABLE dead_letters (
    letter_id       INTEGER PRIMARY KEY AUTOINCREMENT,
    account_id      TEXT,
    conversation_id TEXT,
    queue           TEXT,
    job_id          TEXT,
    function        TEXT,
    payload         TEXT,
    code            TEXT NOT NULL,
    description     TEXT NOT NULL,
    created_at      TEXT NOT NULL
) STRICT;

CREATE TABLE feedback (
    account_id      TEXT NOT NULL,
    request_id      TEXT NOT NULL,
    conversation_id TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE,
    turn            INTEGER NOT NULL,
    rating          TEXT NOT NULL CHECK (rating IN ('up', 'down')),
    category        TEXT,
    comment         TEXT,
    created_at      TEXT NOT NULL,
    updated_at      TEXT NOT NULL,
    PRIMARY KEY (account_id, request_id)
) STRICT;

CREATE INDEX feedback_conversation ON feedback (conversation_id);

CREATE TABLE artifacts (
    artifact_id     TEXT PRIMARY KEY,
    conversation_id TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE,
    name            TEXT NOT NULL,
    media_type      TEXT NOT NULL,
    size_bytes      INTEGER NOT NULL,
    content         BLOB NOT NULL,
    created_at      TEXT NOT NULL
) STRICT;

CREATE INDEX artifacts_conversation ON artifacts (conversation_id);

-- A conversation as a session: one row, with the statuses running, done, aborted, error.
CREATE VIEW sessions AS
SELECT c.conversation_id AS session_id,
       c.account_id,
       c.user_id,
       c.team_id,
       json_extract(c.target, '$.mode')         AS mode,
       json_extract(c.target, '$.server_id')    AS server_id,
       json_extract(c.target, '$.server_name')  AS server_name,
       json_extract(c.target, '$.server_host')  AS server_host,
       json_extract(c.target, '$.cluster_id')   AS cluster_id,
       json_extract(c.target, '$.cluster_name') AS cluster_name,
       json_extract(c.target, '$.namespace')    AS namespace,
       json_extract(c.target, '$.pod')          AS pod_name,
       json_extract(c.target, '$.container')    AS container,
       c.title,
       CASE c.status WHEN 'completed' THEN 'done' WHEN 'stopped' THEN 'aborted' WHEN 'failed' THEN 'error'
                     ELSE 'running' END AS status,
       t.provider,
       coalesce(t.model, c.model) AS model,
       c.rounds,
       c.prompt_tokens + c.completion_tokens AS total_tokens,
       c.duration_ms AS duration,
       json_extract(t.error, '$.description') AS error,
       c.created_at,
       c.updated_at
FROM conversations c
LEFT JOIN conversation_turns t ON t.conversation_id = c.conversation_id AND t.turn = c.last_turn;

-- The log as rows that a person reads: session, thought, tool_call, tool_result, done, error.
CREATE VIEW session_messages AS
SELECT e.conversation_id AS session_id,
       e.seq,
       e.turn,
       coalesce(json_extract(e.data, '$.step'), k.step) AS round,
       CASE e.event
           WHEN 'user_message' THEN 'session'
           WHEN 'ai_message' THEN 'thought'
           WHEN 'tool_call_started' THEN 'tool_call'
           WHEN 'start_tool_calling' THEN 'tool_call'
           WHEN 'tool_call_result' THEN 'tool_result'
           WHEN 'tool_calling_result' THEN 'tool_result'
           WHEN 'answer_end' THEN 'done'
           WHEN 'ai_answer_end' THEN 'done'
           ELSE 'error'
       END AS type,
       CASE WHEN e.event = 'user_message' THEN 'user'
            WHEN e.event IN ('tool_call_result', 'tool_calling_result') THEN 'tool'
            ELSE 'assistant' END AS role,
       CASE WHEN e.event = 'user_message' THEN json_extract(e.data, '$.ask')
            WHEN e.event = 'ai_message' THEN json_extract(e.data, '$.message.content')
            WHEN e.event IN ('answer_end', 'ai_answer_end') THEN json_extract(e.data, '$.content')
            WHEN e.event IN ('error', 'turn_stopped') THEN json_extract(e.data, '$.description') END AS content,
       coalesce(k.tool_name, json_extract(e.data, '$.tool_name'), json_extract(e.data, '$.name')) AS tool_name,
       coalesce(k.arguments, json_extract(e.data, '$.params'), json_extract(e.data, '$.arguments')) AS tool_args,
       CASE WHEN e.event IN ('tool_call_result', 'tool_calling_result')
            THEN coalesce(json_extract(e.data, '$.message.content'), k.result_summary) END AS tool_output,
       coalesce(k.risk, json_extract(e.data, '$.risk')) AS risk,
       CASE WHEN k.state IS NOT NULL THEN k.state = 'done'
            WHEN e.event = 'error' THEN 0
            WHEN e.event IN ('answer_end', 'ai_answer_end') THEN 1 END AS success,
       coalesce(k.duration_ms, json_extract(e.data, '$.duration_ms')) AS duration,
       CASE WHEN e.event = 'ai_message' THEN json_extract(e.data, '$.usage.prompt_tokens')
                                           + json_extract(e.data, '$.usage.completion_tokens') END AS tokens,
       e.created_at
FROM conversation_events e
LEFT JOIN tool_calls k
       ON k.conversation_id = e.conversation_id AND k.result_seq = e.seq AND e.event = 'tool_call_result'
WHERE e.event IN ('user_message', 'ai_message', 'tool_call_started', 'start_tool_calling', 'tool_call_result',
                  'tool_calling_result', 'answer_end', 'ai_answer_end', 'error', 'turn_stopped');
