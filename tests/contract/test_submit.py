"""Recording requests: once each, by their owner, in order."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from shared.errors import ConversationUnknown, IdentityMismatch, NotRetryable, RequestConflict
from shared.store.base import Store
from tests.contract.driver import ANSWERED, Talk, answer, failed, record, yes


async def test_an_ask_creates_its_conversation(store: Store, talk: Talk) -> None:
    target = {"mode": "kubernetes", "cluster_id": "k1", "namespace": "shop"}
    submitted = await talk.ask(
        "why is\n web down?", account_id="a", user_id="u", team_id="t", model="m/1", target=target, metadata={"x": 1}
    )
    assert (submitted.conversation_id, submitted.turn, submitted.created) == (talk.id, 1, True)
    assert (submitted.status, submitted.queue, submitted.decisions) == ("pending", "interactive", {})
    row = await talk.row()
    assert {k: row[k] for k in ("account_id", "user_id", "team_id", "model", "metadata", "title", "status")} == {
        "account_id": "a",
        "user_id": "u",
        "team_id": "t",
        "model": "m/1",
        "metadata": {"x": 1},
        "title": "why is web down?",
        "status": "pending",
    }
    assert (row["target"], row["target_id"]) == (target, "kubernetes/k1/shop")
    assert (row["last_turn"], row["last_seq"]) == (1, 1)
    [event] = await talk.events()
    assert (event["seq"], event["turn"], event["attempt"], event["event"]) == (1, 1, 0, "user_message")
    assert event["data"]["ask"] == "why is\n web down?"
    assert event["data"]["kind"] == "ask"
    assert event["data"]["metadata"] == {"x": 1}
    assert "tool_decisions" not in event["data"]


async def test_the_default_account_owns_what_names_none(talk: Talk) -> None:
    await talk.ask()
    assert (await talk.row())["account_id"] == "default"


async def test_the_same_request_twice_is_one_turn(talk: Talk) -> None:
    first = await talk.ask(request_id="r1")
    again = await talk.ask(request_id="r1")
    assert (again.turn, again.created, first.created) == (first.turn, False, True)
    assert await talk.event_names() == ["user_message"]


async def test_a_repeated_request_gets_the_stored_verdicts(talk: Talk) -> None:
    await talk.paused()
    first = await talk.decide(yes(), request_id="d1")
    again = await talk.decide(yes(), request_id="d1")
    assert first.decisions == again.decisions == {"c1": "approved"}


async def test_an_id_of_other_content_is_a_conflict(talk: Talk) -> None:
    await talk.ask("one", request_id="r1")
    with pytest.raises(RequestConflict) as caught:
        await talk.ask("two", request_id="r1")
    assert caught.value.code == "request_conflict"
    assert await talk.event_names() == ["user_message"]


async def test_an_id_of_another_conversation_is_a_conflict(store: Store, talk: Talk) -> None:
    await talk.ask("one", request_id="r1")
    with pytest.raises(RequestConflict):
        await Talk(store).ask("one", request_id="r1")


async def test_a_refused_first_ask_leaves_no_conversation(store: Store, talk: Talk) -> None:
    await talk.ask("one", request_id="r1")
    other = Talk(store)
    with pytest.raises(RequestConflict):
        await other.ask("one", request_id="r1")
    assert await store.conversation(other.id) is None


async def test_accounts_share_request_ids_without_harm(store: Store, talk: Talk) -> None:
    await talk.ask("one", request_id="r1", account_id="a")
    assert (await Talk(store).ask("two", request_id="r1", account_id="b")).created


@pytest.mark.parametrize("wrong", [{"account_id": "x"}, {"user_id": "x"}, {"team_id": "x"}])
async def test_another_owner_is_refused(talk: Talk, wrong: dict[str, str]) -> None:
    await talk.ask(account_id="a", user_id="u", team_id="t")
    with pytest.raises(IdentityMismatch):
        await talk.ask("again", **wrong)
    assert (await talk.row())["last_turn"] == 1


async def test_the_owner_need_not_be_named_again_and_open_fields_stay_open(talk: Talk) -> None:
    await talk.ask(account_id="a")
    await talk.ask("again")
    await talk.ask("a third time", user_id="somebody")
    row = await talk.row()
    assert (row["last_turn"], row["user_id"], row["account_id"]) == (3, None, "a")


async def test_somebody_else_may_decide_but_not_in_another_account(talk: Talk) -> None:
    await talk.ask(account_id="a", user_id="u")
    claim = await talk.claim()
    await talk.append(claim.lease, 1, answer(), finish=ANSWERED)
    await talk.decide(yes(), user_id="boss")
    with pytest.raises(IdentityMismatch):
        await talk.decide(yes(), account_id="b")


async def test_decisions_and_retries_need_a_conversation(talk: Talk) -> None:
    with pytest.raises(ConversationUnknown):
        await talk.decide(yes())
    with pytest.raises(ConversationUnknown):
        await talk.retry()


async def test_only_a_failed_retryable_last_turn_can_be_retried(talk: Talk) -> None:
    await talk.ask("why?")
    with pytest.raises(NotRetryable):
        await talk.retry()
    claim = await talk.claim()
    await talk.append(claim.lease, 1, finish=failed(retryable=False))
    with pytest.raises(NotRetryable):
        await talk.retry()
    await talk.ask("why then?")
    claim = await talk.claim()
    await talk.append(claim.lease, 1, finish=failed(retryable=True))
    assert (await talk.turn(2))["retryable"] is True
    submitted = await talk.retry()
    assert (await talk.turn(submitted.turn))["kind"] == "retry"
    with pytest.raises(NotRetryable):
        await talk.retry()


async def test_a_new_conversation_has_an_id_of_its_request(store: Store) -> None:
    first = record("ask", ask="hello", request_id="r1")
    again = record("ask", ask="hello", request_id="r1")
    assert (await store.submit(first)).created
    assert not (await store.submit(again)).created
    assert len(await store.conversations()) == 1


async def test_images_become_artifacts_in_the_same_transaction(store: Store, talk: Talk) -> None:
    await talk.ask("what is this?", images=[{"data": "aGVsbG8="}, {"url": "https://example.org/x.png"}])
    [event] = await talk.events()
    stored, linked = event["data"]["images"]
    artifact = await store.get_artifact(talk.id, stored["artifact_id"])
    assert artifact is not None
    assert (artifact.content, artifact.media_type) == (b"hello", "image/png")
    assert linked == {"url": "https://example.org/x.png"}


async def test_parallel_submits_get_every_turn_once(talk: Talk) -> None:
    submitted = await asyncio.gather(*(talk.ask(f"question {i}") for i in range(20)))
    assert sorted(s.turn for s in submitted) == list(range(1, 21))
    events = await talk.events()
    assert [e["seq"] for e in events] == list(range(1, 21))


async def test_the_same_request_from_two_sides_at_once_is_one_turn(
    store: Store, other_store: Store, talk: Talk
) -> None:
    same = [record("ask", ask="hello", conversation_id=talk.id, request_id="r1") for _ in range(8)]
    submitted = await asyncio.gather(*(side.submit(r) for r, side in zip(same, [store, other_store] * 4, strict=True)))
    assert sorted(s.created for s in submitted) == [False] * 7 + [True]
    assert {s.turn for s in submitted} == {1}


async def test_a_submit_makes_the_conversation_due(store: Store, talk: Talk) -> None:
    await talk.ask(queue="background")
    [ring] = await store.reap()
    assert (ring.conversation_id, ring.queue) == (talk.id, "background")


async def test_turn_of_finds_a_request_of_its_account_only(store: Store, talk: Talk) -> None:
    await talk.ask(request_id="r1", account_id="a")
    row = await store.turn_of("r1", "a")
    assert row is not None
    assert (row["conversation_id"], row["turn"], row["request"]["ask"]) == (talk.id, 1, "hello")
    assert await store.turn_of("r1", "b") is None


async def test_unknown_conversations(store: Store) -> None:
    unknown = str(uuid.uuid4())
    assert await store.conversation(unknown) is None
    assert await store.turns(unknown) == []
    assert await store.events(unknown) == []
    with pytest.raises(ConversationUnknown):
        await Talk(store, unknown).try_claim()
