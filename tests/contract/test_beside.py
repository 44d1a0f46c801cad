"""Beside the turn: feedback, dead letters, artifacts, lists, sums, renaming and deleting."""

from __future__ import annotations

import uuid

import pytest

from shared.errors import ContentRefused, ConversationUnknown, LeaseLost, RequestRefused
from shared.requests import Artifact
from shared.store.base import Store, after_row
from tests.contract.conftest import Meddle
from tests.contract.driver import ANSWERED, PAUSED, Talk, ai, answer, call, pause, record, waits, yes


async def test_feedback_is_one_row_a_request_and_the_last_word_stays(store: Store, talk: Talk) -> None:
    await talk.ask(request_id="r1", account_id="a")
    before = await talk.events()
    await store.record_feedback("r1", "up")
    row = await store.record_feedback("r1", "down", category="wrong", comment="no", account_id="a")
    assert (row["conversation_id"], row["turn"], row["account_id"]) == (talk.id, 1, "a")
    assert (row["rating"], row["category"], row["comment"]) == ("down", "wrong", "no")
    [sums] = await store.usage(by="account")
    assert (sums["thumbs_up"], sums["thumbs_down"]) == (0, 1)
    assert await talk.events() == before


async def test_feedback_on_nothing_is_refused(store: Store, talk: Talk) -> None:
    await talk.ask(request_id="r1", account_id="a")
    with pytest.raises(RequestRefused):
        await store.record_feedback("r2", "up")
    with pytest.raises(RequestRefused):
        await store.record_feedback("r1", "up", account_id="b")


async def test_dead_letters_are_kept_listed_and_taken_once(store: Store) -> None:
    letter = {
        "account_id": None,
        "conversation_id": "not-a-uuid",
        "queue": "interactive",
        "job_id": "j1",
        "function": "worker.jobs.ask",
        "payload": {"args": [], "kwargs": {"ask": 7}},
        "code": "request_invalid",
        "description": "ask: not a string",
    }
    first = await store.record_dead_letter(letter)
    second = await store.record_dead_letter(letter | {"job_id": "j2"})
    assert second > first
    listed = await store.dead_letters()
    assert {row["letter_id"]: row["job_id"] for row in listed} == {first: "j1", second: "j2"}
    assert {name: listed[0][name] for name in letter if name != "job_id"} == {
        name: value for name, value in letter.items() if name != "job_id"
    }
    assert len(await store.dead_letters(limit=1)) == 1
    taken = await store.take_dead_letter(first)
    assert taken is not None
    assert taken["payload"] == letter["payload"]
    assert await store.take_dead_letter(first) is None
    assert [row["letter_id"] for row in await store.dead_letters()] == [second]


async def test_artifacts_are_stored_once_and_read_in_their_conversation_only(store: Store, talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    artifact = Artifact.of(talk.id, "log.txt", "text/plain", bytes(range(256)) * 40)
    await store.put_artifact(lease, artifact)
    await store.put_artifact(lease, artifact)
    assert await store.get_artifact(talk.id, artifact.artifact_id) == artifact
    assert await store.get_artifact(str(uuid.uuid4()), artifact.artifact_id) is None
    assert await store.get_artifact(talk.id, str(uuid.uuid4())) is None


async def test_artifacts_need_the_lease(store: Store, talk: Talk) -> None:
    await talk.ask()
    dead = (await talk.claim_expired()).lease
    await talk.claim()
    with pytest.raises(LeaseLost):
        await store.put_artifact(dead, Artifact.of(talk.id, "x", "text/plain", b"x"))


async def test_a_title_is_the_first_question_until_it_is_renamed(store: Store, talk: Talk) -> None:
    await talk.ask("first question")
    await talk.ask("second question")
    assert (await talk.row())["title"] == "first question"
    assert (await store.rename(talk.id, "The outage"))["title"] == "The outage"
    await talk.ask("third")
    assert (await talk.row())["title"] == "The outage"
    with pytest.raises(ConversationUnknown):
        await store.rename(str(uuid.uuid4()), "x")


async def test_deleting_leaves_nothing(store: Store, talk: Talk) -> None:
    other = Talk(store)
    await other.answered()
    await talk.ask("look", images=[{"data": "aGVsbG8="}], request_id="r1")
    [event] = await talk.events()
    artifact_id = event["data"]["images"][0]["artifact_id"]
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, ai(1, call(1)), pause([], waits(1, 1)), finish=PAUSED)
    await talk.decide(yes(remember={"scope": "conversation"}))
    await store.record_feedback("r1", "up")
    running = (await talk.claim()).lease
    assert await store.delete(talk.id)
    assert await store.conversation(talk.id) is None
    assert await store.turns(talk.id) == []
    assert await store.events(talk.id) == []
    assert await store.calls(talk.id) == []
    assert await store.get_artifact(talk.id, artifact_id) is None
    assert await store.turn_of("r1", "default") is None
    await store.reap(everything=True)
    assert await store.reap() == []
    assert [row["thumbs_up"] for row in await store.usage(by="account")] == [0]
    with pytest.raises(LeaseLost):
        await talk.append(running, 1, ai(1))
    assert not await store.delete(talk.id)
    assert (await other.row())["status"] == "completed"
    assert (await talk.ask("anew", request_id="r1")).created
    assert (await talk.claim()).rules == []


async def test_conversations_are_listed_by_activity(store: Store) -> None:
    talks = [Talk(store) for _ in range(4)]
    for talk in talks:
        await talk.ask(account_id="a")
    await talks[0].ask("again")
    await Talk(store).ask(account_id="b")
    rows = await store.conversations(account_id="a")
    assert [r["conversation_id"] for r in rows] == [talks[i].id for i in (0, 3, 2, 1)]
    page = await store.conversations(account_id="a", limit=2)
    rest = await store.conversations(account_id="a", before=page[-1]["updated_at"])
    assert [r["conversation_id"] for r in page + rest] == [r["conversation_id"] for r in rows]
    assert len(await store.conversations()) == 5


async def test_pages_of_conversations_neither_skip_nor_repeat_ties(store: Store, meddle: Meddle) -> None:
    talks = [Talk(store) for _ in range(7)]
    for talk in talks:
        await talk.ask()
    first = (await talks[0].row())["updated_at"]
    meddle(f"UPDATE conversations SET updated_at = '{first}'")
    found: list[str] = []
    before = None
    while page := await store.conversations(limit=3, before=before):
        found += [row["conversation_id"] for row in page]
        before = after_row(page[-1])
    assert found == sorted(talk.id for talk in talks)
    assert await store.conversations(before=first) == [], "a time alone: what is older"
    for nonsense in ("a while ago", f"{first},someone"):
        with pytest.raises(ContentRefused):
            await store.conversations(before=nonsense)


async def test_an_artifact_under_a_name_that_no_artifact_has(store: Store, talk: Talk) -> None:
    artifact = Artifact.of(talk.id, "log", "text/plain", b"x")
    await talk.ask()
    await store.put_artifact((await talk.claim()).lease, artifact)
    assert await store.get_artifact(talk.id, artifact.artifact_id.upper()) == artifact
    for name in ("log", "", "' OR 1=1", str(uuid.uuid4())):
        assert await store.get_artifact(talk.id, name) is None


async def test_conversations_are_found_by_status(store: Store) -> None:
    waiting, done, fresh = Talk(store), Talk(store), Talk(store)
    await waiting.paused()
    await done.answered()
    await fresh.ask()
    for status, talk in (("awaiting_approval", waiting), ("completed", done), ("pending", fresh)):
        assert [r["conversation_id"] for r in await store.conversations(status=status)] == [talk.id]


async def test_events_are_read_from_where_a_reader_stopped(store: Store, talk: Talk) -> None:
    await talk.answered("one")
    await talk.answered("two")
    everything = await store.events(talk.id, full=True)
    first = await store.events(talk.id, limit=4, full=True)
    assert first + await store.events(talk.id, after=first[-1]["seq"], full=True) == everything
    assert await store.events(talk.id, after=everything[-1]["seq"]) == []
    assert set(everything[0]) == {"conversation_id", "seq", "turn", "attempt", "event", "data", "created_at"}


async def test_approvals_wait_over_all_conversations_and_show_no_token(store: Store) -> None:
    first, second = Talk(store), Talk(store)
    await first.ask("restart web", user_id="u", account_id="a")
    claim = await first.claim()
    made = [call(1, 0, "c1"), call(1, 1, "c2"), call(1, 2, "f", kind="frontend")]
    await first.append(
        claim.lease, 1, ai(1, *made), pause([], waits(1, 1, 0, token="x"), waits(1, 1, 1)), finish=PAUSED
    )
    await second.paused("c9")
    rows = await store.approvals()
    assert [(r["conversation_id"], r["tool_call_id"]) for r in rows] == [
        (first.id, "c1"),
        (first.id, "c2"),
        (second.id, "c9"),
    ]
    assert (rows[0]["title"], rows[0]["user_id"], rows[0]["tool_name"]) == ("restart web", "u", "shell")
    assert rows[0]["arguments"] == '{"command": "ls"}'
    assert not any("token" in key for key in rows[0])
    assert [r["tool_call_id"] for r in await store.approvals(account_id="a")] == ["c1", "c2"]
    assert [r["tool_call_id"] for r in await store.approvals(conversation_id=second.id)] == ["c9"]
    await second.decide(yes("c9", "t1"))
    assert await store.approvals(conversation_id=second.id) == []


async def test_usage_by_model_account_and_day(store: Store) -> None:
    for account, tokens in (("a", 10), ("a", 20), ("b", 5)):
        talk = Talk(store)
        await talk.ask(account_id=account)
        lease = (await talk.claim()).lease
        await talk.append(lease, 1, ai(1, usage={"prompt_tokens": tokens, "cost_usd": 0.5}), answer(), finish=ANSWERED)
    await Talk(store).ask(account_id="b")
    by_account = {
        r["account"]: (r["turns"], r["rounds"], r["prompt_tokens"], r["cost_usd"])
        for r in await store.usage(by="account")
    }
    assert by_account == {"a": (2, 2, 30, 1.0), "b": (2, 1, 5, 0.5)}
    by_model = {r["model"]: r["turns"] for r in await store.usage(by="model")}
    assert by_model == {"scripted/one": 3, "": 1}
    [of_a] = await store.usage(by="model", account_id="a")
    assert of_a["turns"] == 2
    days = await store.usage(by="day")
    assert sum(r["turns"] for r in days) == 4
    assert all(len(r["day"]) == 10 for r in days)


async def test_health_counts_what_is_to_be_done(store: Store, talk: Talk) -> None:
    await talk.ask()
    await Talk(store).ask()
    await talk.claim()
    health = await store.health()
    assert (health["pending"], health["running"]) == (1, 1)
    assert health["schema_version"] >= health["min_compatible"] >= 1
    assert health["kind"] in ("sqlite", "postgres", "supabase")
    assert health["now"] >= (await talk.turn(1))["started_at"]


async def test_a_record_is_clean_before_it_is_stored(store: Store, talk: Talk) -> None:
    dirty = record("ask", ask="a\x00b \ud83d", metadata={"k\x00": float("nan")}, conversation_id=talk.id)
    await store.submit(dirty)
    [event] = await talk.events()
    assert (event["data"]["ask"], event["data"]["metadata"]) == ("ab \ufffd", {"k": None})
