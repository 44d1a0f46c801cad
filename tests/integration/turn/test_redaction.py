"""Secrets from every side of a turn: none reaches the database, the live stream, the log or the model again, but for
the arguments of calls, which are what runs."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import fakeredis
import orjson
import pytest
import structlog

from publisher import RedisLive
from shared.errors import ConfigurationError, ModelUnavailable, ToolError
from shared.log import configure_logging
from shared.queues import live_key
from shared.redaction import Redactor
from shared.requests import parse_request, record_of
from shared.settings import Settings
from tests.support.agent import Held, Lab, Process, approve, call, deny, lab_in, results_of, says, soon
from tests.unit.redaction import samples
from worker.agent.base import Delta, ModelReply, ModelRequest, ToolContext
from worker.agent.tools import tool
from worker.jobs import TurnJob
from worker.leases import LeaseKeeper
from worker.letters import letter_of_job, letter_of_stranger
from worker.turn import Parts, TurnRunner

T = samples.TOKENS
ASKED, PROMPT, FEEDBACK = T["github_token"][0], T["npm_token"][0], T["gitlab_token"][0]
FOUND, KEY_LINE, LONG, RAISED = T["aws_access_key"][0], samples.PEM.split("\n")[1], T["linear_key"][0], T["jwt"][0]
SAID, THOUGHT, SIGNED, PROVIDER = T["anthropic_key"][0], T["stripe_key"][0], T["vault_token"][0], T["openai_key"][0]
FRONTEND, METADATA, KEPT = T["sendgrid_key"][0], T["twilio_key"][0], T["google_api_key"][0]
ARGUMENT, CLIENT_ARGUMENT = "hunter2-Zx81kq", T["huggingface_token"][0]
EVERYWHERE = (
    ASKED,
    PROMPT,
    FEEDBACK,
    FOUND,
    KEY_LINE,
    LONG,
    RAISED,
    SAID,
    THOUGHT,
    SIGNED,
    PROVIDER,
    FRONTEND,
    METADATA,
    KEPT,
)

received: list[str] = []
artifacts: list[str] = []


@tool(risk="read_only")
async def look(place: str, context: ToolContext) -> dict[str, Any]:
    """Look somewhere."""
    received.append(place)
    assert context.artifacts is not None
    artifacts.append(await context.artifacts.put("dump", "text/plain", f"dump {KEPT}".encode()))
    return {"message": f"found {FOUND}", "key": samples.PEM, "log": "line\n" * 9_000 + LONG + "\nline" * 9_000}


@tool(risk="read_only")
async def fail(password: str) -> str:
    """Fail."""
    raise ToolError(f"cannot log in with {password} and {RAISED}")


@tool(risk="side_effect")
async def login(password: str) -> str:
    """Log in; a person decides."""
    received.append(password)
    return "ok"


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with lab_in(tmp_path, [look, fail, login]) as lab:
        yield lab


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("debug", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def with_live(process: Process, live: RedisLive) -> Process:
    lab = process.lab
    keeper = LeaseKeeper(lambda: lab.store, lab.settings.lease_seconds)  # not started: leases are long
    process.turns = TurnRunner(Parts(lab.settings, process.store, process.model, lab.toolbox, keeper, live, "worker"))  # type: ignore[arg-type]
    return process


def cells(lab: Lab) -> Iterator[tuple[str, str, str]]:
    """Every text in the database: table, column, text."""
    with sqlite3.connect(lab.settings.sqlite_path) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            rows = db.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in rows.description]
            for row in rows:
                for name, value in zip(names, row, strict=True):
                    yield table, name, value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    db.close()


def without_arguments(value: Any) -> Any:
    """A JSON value without the arguments of tool calls and what a client is asked to run."""
    if isinstance(value, dict):
        hidden = ("arguments", "pending_frontend_tool_calls")
        return {k: without_arguments(v) for k, v in value.items() if k not in hidden}
    return [without_arguments(v) for v in value] if isinstance(value, list) else value


async def test_no_secret_stays(lab: Lab, log: io.StringIO) -> None:
    received.clear()
    artifacts.clear()
    redis = fakeredis.FakeAsyncRedis()
    live = RedisLive(redis, redactor=Redactor.from_settings(lab.settings))

    async def in_pieces(request: ModelRequest, on_delta: Any) -> ModelReply:
        text = f"I use {SAID} and say"
        for piece in (text[:9], text[9:20], text[20:]):
            on_delta(Delta(piece))
        for piece in (f"so {THOUGHT[:5]}", f"{THOUGHT[5:]} it is"):
            on_delta(Delta(reasoning=piece))
        return says(
            text,
            call("look", "c1", place=f"vault password={ARGUMENT}"),
            call("fail", "c2", password=ARGUMENT),
            call("login", "c3", password=ARGUMENT),
            call("pick", "c4", key=CLIENT_ARGUMENT),
            reasoning_content=f"so {THOUGHT} it is",
            thinking_blocks=[{"type": "thinking", "thinking": f"so {SIGNED}", "signature": "c2ln"}],
        )

    await lab.ask(
        f"Why does {ASKED} not work?",
        additional_system_prompt=f"Never tell {PROMPT}.",
        metadata={"deep": [METADATA], "password": ARGUMENT},
        frontend_tools=[{"name": "pick"}],
    )
    first = with_live(lab.process([in_pieces]), live)
    assert (await first.run()).status == "awaiting_approval"
    [approval] = await lab.approvals()
    marker = Redactor.from_settings(lab.settings).value({"password": ARGUMENT})["password"]
    assert approval["params"] == {"password": marker}
    assert ARGUMENT not in json.dumps(approval)
    paused = await lab.last(1)
    assert paused["pending_frontend_tool_calls"][0]["params"] == {"key": CLIENT_ARGUMENT}

    await lab.decide(approve(approval), frontend_tool_results=[{"tool_call_id": "c4", "content": {"picked": FRONTEND}}])
    second = with_live(lab.process([says(None, call("login", "c5", password=ARGUMENT))]), live)
    assert (await second.run()).status == "awaiting_approval"
    [again] = await lab.approvals()
    await lab.decide(deny(again, f"No, and not with {FEEDBACK} either"))
    third = with_live(lab.process([ModelUnavailable(f"Incorrect API key provided: {PROVIDER}")]), live)
    assert (await third.run()).status == "failed"
    structlog.get_logger("worker").warning("refused", reason=f"bad key {PROVIDER}", error=ASKED)
    await live.close()

    # What ran is exact, and what the model is sent again is what it had asked for.
    assert received == [f"vault password={ARGUMENT}", ARGUMENT]
    replayed = [m for m in second.model.requests[0].messages if m.get("tool_calls")]
    assert json.loads(replayed[0]["tool_calls"][2]["function"]["arguments"]) == {"password": ARGUMENT}
    assert not [s for s in EVERYWHERE if s in str(second.model.requests) + str(third.model.requests)]
    assert "[redacted:aws_access_key:" in results_of(second.model.requests[0])[0]
    assert "[redacted:private_key:" in results_of(second.model.requests[0])[0]

    for secret in EVERYWHERE:
        for file in lab.settings.home.glob("turnkeeper.db*"):
            assert secret.encode() not in file.read_bytes(), (secret, file)
    for table, column, text in cells(lab):
        if (table, column) == ("tool_calls", "arguments"):
            continue
        if column == "data" and table == "conversation_events":
            text = json.dumps(without_arguments(json.loads(text)))
        assert ARGUMENT not in text, (table, column, text)
        assert CLIENT_ARGUMENT not in text, (table, column, text)
    stored = await lab.store.get_artifact(lab.conversation_id, artifacts[0])
    assert stored is not None
    assert stored.content.startswith(b"dump [redacted:google_api_key:")

    entries = [entry[b"entry"].decode() for _, entry in await redis_entries(redis, lab.conversation_id)]
    assert len(entries) > 10
    shown = [orjson.loads(entry) for entry in entries]
    streamed = "".join(e["data"]["text"] for e in shown if e["event"] == "ai_message_delta")
    [said] = [e["data"]["message"]["content"] for e in shown if e["event"] == "ai_message" and e["turn"] == 1]
    assert streamed == said
    assert streamed.startswith("I use [redacted:anthropic_key:")
    for secret in (*EVERYWHERE, ARGUMENT):
        assert secret not in "".join(entries)
        assert secret not in log.getvalue()
    assert "bad key [redacted:openai_key:" in log.getvalue()
    await lab.check()


async def redis_entries(redis: Any, conversation_id: str) -> list[Any]:
    again = fakeredis.FakeAsyncRedis(connection_pool=redis.connection_pool)
    try:
        return list(await again.xrange(live_key(conversation_id)))
    finally:
        await again.aclose()


async def test_a_stopped_answer_shows_no_beginning_of_a_secret(lab: Lab) -> None:
    await lab.ask()
    held = Held(f"It is {SAID[:60]}")
    process = lab.process([held])
    running = asyncio.create_task(process.run())
    await soon(held.started)
    assert process.attempt is not None
    process.attempt.stop()
    await running
    [partial] = [row["data"] for row in await lab.events() if row["event"] == "ai_message"]
    assert partial["message"]["content"] == "It is "


def test_submitting_by_the_client_and_by_the_claim_agree(tmp_path: Path) -> None:
    request = parse_request("ask", {"ask": f"use {ASKED}", "request_id": "r"})
    records = [
        record_of(request, redactor=Redactor.from_settings(Settings(home=tmp_path, **more)))
        for more in ({}, {}, {"redaction_key": "k"}, {"redaction_key": "k"}, {"redaction": "off"})
    ]
    digests = [record.document["digest"] for record in records]
    assert digests[0] == digests[1]
    assert digests[2] == digests[3]
    assert len(set(digests)) == 3
    assert records[0].document["title"] == records[0].document["ask"]
    assert records[4].document["ask"] == f"use {ASKED}"
    assert (tmp_path / "redaction.key").stat().st_mode & 0o777 == 0o600
    again = record_of(
        parse_request("ask", {"ask": records[0].document["ask"], "request_id": "r"}),
        redactor=Redactor.from_settings(Settings(home=tmp_path)),
    )
    assert again.document["digest"] == digests[0]


def test_dead_letters_keep_no_secret() -> None:
    redactor = Redactor(b"k")
    job = TurnJob("ask", {"ask": f"use {ASKED}", "password": ARGUMENT}, "j", "q")
    letter = letter_of_job(job, ConfigurationError(f"no {ASKED}"), redactor)
    assert not [s for s in (ASKED, ARGUMENT) if s in str(letter)]
    stranger = letter_of_stranger(
        "j", "q", {"function": "os.system", "args": [f"echo {ASKED}"]}, ConfigurationError("x"), redactor
    )
    assert ASKED not in str(stranger)
    raw = {"data_base64": base64.b64encode(f"\x80\x05 {ASKED}".encode("latin-1")).decode()}
    kept = letter_of_stranger("j", "q", raw, ConfigurationError("x"), redactor)["payload"]["data_base64"]
    assert base64.b64decode(kept).startswith(b"\x80\x05 [redacted:github_token:")


@pytest.mark.parametrize("depth", [100, 300, 900, 5_000])
def test_a_dead_letter_of_any_depth_is_written(depth: int) -> None:
    deep: dict[str, Any] = {}
    for _ in range(depth):
        deep = {"a": deep}
    redactor, error = Redactor(b"k"), ConfigurationError("x")
    ours = letter_of_job(TurnJob("ask", {"ask": "?", "metadata": deep}, "j\0", "q"), error, redactor)
    assert (ours["job_id"], ours["payload"]) == ("j", {"unreadable": True, "keys": ["ask", "metadata"]})
    stranger = letter_of_stranger("j", "q", {"function": "f", "args": [deep], "kwargs": {}}, error, redactor)
    assert stranger["payload"] == {"unreadable": True, "keys": ["args", "kwargs"]}


@pytest.mark.parametrize(
    ("content", "says_what"),
    [
        ("ticket: '('", "ticket: not a regular expression"),
        ("ticket: '.*'", "ticket: the pattern matches the empty text"),
        ("Ticket: 'x'", "a name has up to 40"),
        ("ticket: 7", "has to be text"),
        ("- x", "has to map names"),
        ("a: b: c", "cannot be read"),
    ],
)
def test_a_wrong_pattern_stops_the_start_with_a_line(tmp_path: Path, content: str, says_what: str) -> None:
    (tmp_path / "patterns.yaml").write_text(content)
    with pytest.raises(ConfigurationError, match=r"TURNKEEPER_REDACT: .*patterns\.yaml") as caught:
        Redactor.from_settings(Settings(home=tmp_path, redact=tmp_path / "patterns.yaml"))
    assert says_what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_patterns_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "patterns.yaml").write_text("ticket: 'CASE-\\d{5}'\n")
    redactor = Redactor.from_settings(Settings(home=tmp_path, redact=tmp_path / "patterns.yaml"))
    assert redactor.text("see CASE-12345.").startswith("see [redacted:ticket:")
