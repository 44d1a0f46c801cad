-- The tables of docs/store.md. In these files the word turnkeeper stands for the schema and for nothing else:
-- another schema name is put in its place when they are applied. Postgres 15 or newer.

CREATE SCHEMA IF NOT EXISTS turnkeeper;

CREATE TABLE turnkeeper.schema_migrations (
    version        integer PRIMARY KEY,
    min_compatible integer NOT NULL,
    name           text NOT NULL,
    applied_at     timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE turnkeeper.conversations (
    conversation_id      uuid PRIMARY KEY,
    account_id           text NOT NULL,
    user_id              text,
    team_id              text,
    title                text NOT NULL DEFAULT '',
    status               text NOT NULL DEFAULT 'pending'
                         CHECK (status IN ('pending', 'running', 'awaiting_approval', 'completed', 'failed', 'stopped')),
    target               jsonb,
    target_id            text,
    model                text,
    metadata             jsonb NOT NULL DEFAULT '{}',
    last_seq             bigint NOT NULL DEFAULT 0,
    last_turn            integer NOT NULL DEFAULT 0,
    next_ring_at         timestamptz,
    ring_backoff_seconds integer NOT NULL DEFAULT 5,
    rounds               integer NOT NULL DEFAULT 0,
    tool_calls           integer NOT NULL DEFAULT 0,
    prompt_tokens        bigint NOT NULL DEFAULT 0,
    completion_tokens    bigint NOT NULL DEFAULT 0,
    cached_tokens        bigint NOT NULL DEFAULT 0,
    cost_usd             numeric NOT NULL DEFAULT 0,
    duration_ms          bigint NOT NULL DEFAULT 0,
    created_at           timestamptz NOT NULL DEFAULT now(),
    updated_at           timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 80);

CREATE INDEX conversations_due ON turnkeeper.conversations (next_ring_at) WHERE next_ring_at IS NOT NULL;
CREATE INDEX conversations_activity ON turnkeeper.conversations (account_id, updated_at DESC);
CREATE INDEX conversations_updated ON turnkeeper.conversations (updated_at DESC);

CREATE TABLE turnkeeper.conversation_turns (
    conversation_id   uuid NOT NULL REFERENCES turnkeeper.conversations ON DELETE CASCADE,
    turn              integer NOT NULL,
    account_id        text NOT NULL,
    request_id        text NOT NULL,
    digest            text NOT NULL,
    kind              text NOT NULL CHECK (kind IN ('ask', 'tool_decisions', 'retry')),
    request           jsonb NOT NULL,
    queue             text NOT NULL,
    status            text NOT NULL DEFAULT 'pending'
                      CHECK (status IN ('pending', 'running', 'awaiting_approval', 'completed', 'failed', 'stopped')),
    attempt           integer NOT NULL DEFAULT 0,
    crashes           integer NOT NULL DEFAULT 0,
    worker            text,
    lease_token       text,
    lease_expires_at  timestamptz,
    claim_id          text,
    last_batch        integer NOT NULL DEFAULT 0,
    last_batch_result jsonb,
    stop_requested_at timestamptz,
    taken_over        text CHECK (taken_over IN ('crash', 'release')),
    wait_reason       text CHECK (wait_reason IN ('delayed', 'account_limit')),
    wait_until        timestamptz,
    decisions         jsonb NOT NULL DEFAULT '{}',
    provider          text,
    model             text,
    rounds            integer NOT NULL DEFAULT 0,
    tool_calls        integer NOT NULL DEFAULT 0,
    prompt_tokens     bigint NOT NULL DEFAULT 0,
    completion_tokens bigint NOT NULL DEFAULT 0,
    cached_tokens     bigint NOT NULL DEFAULT 0,
    cost_usd          numeric NOT NULL DEFAULT 0,
    finish_reason     text,
    duration_ms       bigint,
    error             jsonb,
    retryable         boolean NOT NULL DEFAULT false,
    created_at        timestamptz NOT NULL DEFAULT now(),
    started_at        timestamptz,
    ended_at          timestamptz,
    PRIMARY KEY (conversation_id, turn),
    UNIQUE (request_id, account_id)  -- in this order, since feedback knows the first alone
) WITH (fillfactor = 80);

CREATE INDEX turns_unfinished ON turnkeeper.conversation_turns (conversation_id, turn)
    WHERE status IN ('pending', 'running');
CREATE INDEX turns_waiting ON turnkeeper.conversation_turns (conversation_id) WHERE status = 'awaiting_approval';
CREATE UNIQUE INDEX turns_token ON turnkeeper.conversation_turns (lease_token) WHERE lease_token IS NOT NULL;
-- The limits of an account: what runs, what waits for a place, and what was begun today.
CREATE INDEX turns_running ON turnkeeper.conversation_turns (account_id) WHERE status = 'running';
CREATE INDEX turns_limited ON turnkeeper.conversation_turns (account_id, created_at) WHERE wait_reason = 'account_limit';
CREATE INDEX turns_begun ON turnkeeper.conversation_turns (account_id, started_at) WHERE started_at IS NOT NULL;

CREATE TABLE turnkeeper.conversation_events (
    conversation_id uuid NOT NULL REFERENCES turnkeeper.conversations ON DELETE CASCADE,
    seq             bigint NOT NULL,
    turn            integer NOT NULL,
    attempt         integer NOT NULL,
    event           text NOT NULL,
    data            jsonb NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (conversation_id, seq)
);

-- The latest snapshot of a conversation, and those that still hold messages (found without unpacking them).
CREATE INDEX events_snapshots ON turnkeeper.conversation_events (conversation_id, seq) WHERE event IN
    ('answer_end', 'approval_required', 'history_compacted', 'ai_answer_end', 'conversation_history_compacted');
CREATE INDEX events_with_messages ON turnkeeper.conversation_events (conversation_id, seq) WHERE event IN
    ('answer_end', 'approval_required', 'history_compacted', 'ai_answer_end', 'conversation_history_compacted')
    AND data ? 'messages';

CREATE TABLE turnkeeper.tool_calls (
    conversation_id       uuid NOT NULL REFERENCES turnkeeper.conversations ON DELETE CASCADE,
    turn                  integer NOT NULL,
    step                  integer NOT NULL,
    call_index            integer NOT NULL,
    tool_call_id          text NOT NULL,
    tool_name             text NOT NULL,
    arguments             text NOT NULL,
    arguments_digest      text NOT NULL,
    risk                  text NOT NULL CHECK (risk IN ('read_only', 'idempotent', 'side_effect')),
    kind                  text NOT NULL CHECK (kind IN ('tool', 'frontend')),
    gated                 boolean NOT NULL,
    state                 text NOT NULL CHECK (state IN ('pending', 'approved', 'denied', 'expired', 'superseded',
                                                         'executing', 'done', 'failed', 'unknown')),
    approval_token_sha256 text,
    expires_at            timestamptz,
    decided_turn          integer,
    decided_by            text,
    decision              jsonb,
    reason                text,
    result_summary        text,
    result_raw            text,
    result_seq            bigint,
    duration_ms           bigint,
    created_at            timestamptz NOT NULL DEFAULT now(),
    decided_at            timestamptz,
    started_at            timestamptz,
    ended_at              timestamptz,
    PRIMARY KEY (conversation_id, turn, step, call_index)
);

CREATE INDEX calls_waiting ON turnkeeper.tool_calls (conversation_id) WHERE state = 'pending';
CREATE INDEX calls_without_result ON turnkeeper.tool_calls (conversation_id, turn) WHERE result_seq IS NULL;
CREATE INDEX calls_decidable ON turnkeeper.tool_calls (conversation_id, tool_call_id)
    WHERE gated OR kind = 'frontend';

CREATE TABLE turnkeeper.approval_rules (
    rule_id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    account_id      text NOT NULL,
    user_id         text,
    conversation_id uuid REFERENCES turnkeeper.conversations ON DELETE CASCADE,
    scope           text NOT NULL CHECK (scope IN ('conversation', 'user', 'account')),
    tool_name       text NOT NULL,
    prefix          text,
    created_by      text,
    created_at      timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX rules_account ON turnkeeper.approval_rules (account_id);
CREATE INDEX rules_conversation ON turnkeeper.approval_rules (conversation_id);

CREATE TABLE turnkeeper.dead_letters (
    letter_id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    account_id      text,
    conversation_id text,  -- as the job named it, which need not be a uuid
    queue           text,
    job_id          text,
    function        text,
    payload         jsonb,
    code            text NOT NULL,
    description     text NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE turnkeeper.feedback (
    account_id      text NOT NULL,
    request_id      text NOT NULL,
    conversation_id uuid NOT NULL REFERENCES turnkeeper.conversations ON DELETE CASCADE,
    turn            integer NOT NULL,
    rating          text NOT NULL CHECK (rating IN ('up', 'down')),
    category        text,
    comment         text,
    created_at      timestamptz NOT NULL DEFAULT now(),
    updated_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (account_id, request_id)
);

CREATE INDEX feedback_conversation ON turnkeeper.feedback (conversation_id);

CREATE TABLE turnkeeper.artifacts (
    artifact_id     uuid PRIMARY KEY,
    conversation_id uuid NOT NULL REFERENCES turnkeeper.conversations ON DELETE CASCADE,
    name            text NOT NULL,
    media_type      text NOT NULL,
    size_bytes      bigint NOT NULL,
    content         bytea NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX artifacts_conversation ON turnkeeper.artifacts (conversation_id);

-- Snapshots are large and written once a turn. lz4 packs them in the time that writing them takes. A build without it
-- stores them as they are: pglz takes several times as long, for a third less of log and disk.
DO $$
BEGIN
    ALTER TABLE turnkeeper.conversation_events ALTER COLUMN data SET COMPRESSION lz4;
    ALTER TABLE turnkeeper.conversation_turns ALTER COLUMN request SET COMPRESSION lz4;
EXCEPTION WHEN feature_not_supported THEN
    ALTER TABLE turnkeeper.conversation_events ALTER COLUMN data SET STORAGE EXTERNAL;
    ALTER TABLE turnkeeper.conversation_turns ALTER COLUMN request SET STORAGE EXTERNAL;
END
$$;

INSERT INTO turnkeeper.schema_migrations (version, min_compatible, name) VALUES (1, 1, 'tables');
