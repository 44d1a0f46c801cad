"""The database goes away in the middle of turns: nothing is lost, nothing is doubled, nothing with effects begins
meanwhile, and the same workers go on afterwards."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psycopg
import pytest

from scripts.bench.kit.llm_server import Gate
from scripts.bench.kit.nursery import Nursling
from scripts.bench.kit.postgres import own_folder
from shared.client import Client
from tests.acceptance.breakable import BreakableLab, Bumping, Site, answered, breakable_lab
from tests.support.valkey import Valkey

RECOVERY_SECONDS = 15.0  # from the end of an outage to the end of its turns


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="turnkeeper-breakable-") as name, ExitStack() as stack:
        yield Site(own_folder(Path(name)), stack)


@pytest.fixture(params=["postgres", "supabase"])
def lab(request: pytest.FixtureRequest, site: Site, tmp_path: Path, valkey_session: Valkey) -> Iterator[BreakableLab]:
    with breakable_lab(site, request.param, tmp_path, valkey_session.url) as made:
        yield made


def test_a_crash_of_the_servers_shorter_than_the_lease(lab: BreakableLab) -> None:
    script = Bumping()
    lab.llm.script(script)
    lab.worker_ready("interactive", TURNKEEPER_LEASE_SECONDS="10", TURNKEEPER_DATABASE_POOL_SIZE="5")
    for name in "abcd":
        lab.ask(f"bump {name}", on="interactive", heir="interactive")
    lab.until(lambda: len(lab.llm.requests) == 4, "all turns wait for the model")

    lab.site.postgres.crash()
    if lab.kind == "supabase":
        lab.site.stop_rest()
    for gate in script.gates:
        gate.open()  # the model answers: a call with a side effect each
    late = lab.enqueue("interactive", "ask", ask="bump e", queue="interactive")
    time.sleep(1)
    assert not lab.effects, "what could not be stored does not begin"
    if lab.kind == "supabase":
        lab.site.start_rest(ready="[Ll]istening|Starting")  # and answers 503 while it finds no database
        time.sleep(0.5)
    lab.site.postgres.start()

    back_at = time.monotonic()
    lab.until(lambda: lab.all_ended(5), "all turns end", RECOVERY_SECONDS)
    print(f"{lab.kind}: all turns ended {time.monotonic() - back_at:.2f} s after the restart")
    assert [(t["status"], t["attempt"], t["crashes"]) for t in lab.turns()] == [("completed", 1, 0)] * 5
    assert lab.effects == dict.fromkeys("abcde", 1)
    lab.check()
    lab.until(lambda: late.is_finished, "the job that came meanwhile")


def test_an_outage_longer_than_the_lease(lab: BreakableLab) -> None:
    script = Bumping()
    lab.llm.script(script)
    worker = lab.worker_ready("interactive", TURNKEEPER_LEASE_SECONDS="2", TURNKEEPER_DATABASE_POOL_SIZE="5")
    lab.ask("bump a", on="interactive", heir="interactive")
    waiting = lab.command("ask", "bump b")
    lab.until(lambda: len(lab.llm.requests) == 2, "both turns wait for the model")
    script.gates[0].open()
    lab.until(lambda: lab.effects == {"a": 1, "b": 1}, "both have bumped")
    script.gates[0] = Gate()
    late = [lab.ask(f"bump {name}", on="interactive", heir="interactive") for name in "cd"]
    lab.until(lambda: len(lab.llm.requests) == 6, "two stand before their bump, two before their answer")
    following = lab.command("events", late[0], "--follow")
    assert following.stdout is not None
    assert "user_message" in following.stdout.readline()

    lab.wire.refuse()
    script.gates[0].open()
    time.sleep(3)
    lab.wire.silence()
    lab.wire.accept()
    lab.enqueue("interactive", "ask", ask="bump e", queue="interactive")
    lab.until(lambda: sum(e.get("event") == "lease_lost" for e in worker.entries()) == 4, "all turns are let go")
    time.sleep(3)
    assert lab.effects == {"a": 1, "b": 1}, "nothing with effects begins while the store is away"
    requests = len(lab.llm.requests)
    lab.wire.heal()

    back_at = time.monotonic()
    script.gates[1].open()
    lab.until(lambda: lab.all_ended(5), "all turns end", RECOVERY_SECONDS)
    print(f"{lab.kind}: all turns ended {time.monotonic() - back_at:.2f} s after the outage")
    assert worker.ended is None
    assert {t["status"] for t in lab.turns()} == {"completed"}
    assert lab.effects == dict.fromkeys("abcde", 1)
    lab.check()
    assert len(lab.llm.requests) - requests <= 2 + 2 * 3, "what was stored is not asked for again"
    shown = answered(waiting)
    assert (shown[-1]["event"], shown[-1]["data"]["content"]) == ("answer_end", "Bumped b.")
    for line in following.stdout:
        if "answer_end" in line:
            break
    following.send_signal(signal.SIGINT)
    following.communicate()


def test_replies_that_are_lost_after_the_commit(lab: BreakableLab) -> None:
    """A connection that breaks between the server's commit and the client's knowledge of it: at every operation."""
    script = Bumping()
    lab.llm.script(script)
    called = b"/rpc/%s[ ?].*" if lab.kind == "supabase" else rb'"\.%s\(.*'
    lost: dict[bytes, threading.Event] = {}

    def lose(operation: bytes, more: bytes = b"") -> None:
        lost[operation + more] = lab.wire.lose_reply(called % operation + more)

    for operation in (b"submit", b"claim", b"append", b"renew", b"release"):
        lose(operation)
    first = lab.worker_ready("interactive", TURNKEEPER_LEASE_SECONDS="2", TURNKEEPER_DRAIN_SECONDS="0.2")

    async def ask() -> str:
        async with Client.connect(lab.settings.model_copy(update={"redis_url": lab.redis_url})) as client:
            return (await client.ask("bump a", queue="interactive")).conversation_id

    conversation = asyncio.run(ask())
    lab.until(lambda: lab.llm.requests, "the turn is claimed and asks the model")
    script.gates[0].open()
    lab.until(lambda: lab.effects == {"a": 1}, "the tool has run")
    lab.until(lost[b"renew"].is_set, "a renewal was lost")
    heir = lab.worker_ready("interactive", TURNKEEPER_LEASE_SECONDS="2")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    lose(b"append", rb"completed")
    lab.until(lambda: len(lab.llm.requests) >= 3, "another worker asks for the answer")
    script.gates[1].open()
    lab.until(lambda: lab.ended(conversation, 1), "the turn ends")
    lab.until(lambda: all(event.is_set() for event in lost.values()), f"all were lost: {lost}")
    assert heir.ended is None
    assert lab.effects == {"a": 1}
    [turn] = lab.turns()
    assert (turn["status"], turn["attempt"], turn["crashes"]) == ("completed", 2, 0)
    lab.check()
    assert lab.llm.requests[-1].messages[-1]["content"] == "bumped a"


def test_locks_deadlocks_and_statement_timeouts(lab: BreakableLab) -> None:
    script = Bumping()
    lab.llm.script(script)
    lab.worker_ready("interactive", TURNKEEPER_LEASE_SECONDS="5")
    conversation = lab.ask("bump a", on="interactive", heir="interactive")
    lab.until(lambda: lab.llm.requests, "the turn waits for the model")
    at = "WHERE conversation_id = %s"
    seen = len(lab.site.postgres.log)

    def in_log(text: str) -> bool:
        return text in lab.site.postgres.log[seen:]

    with psycopg.connect(lab.site.url) as other:
        other.execute("SET statement_timeout = 0; SET deadlock_timeout = '30s'; SET search_path = turnkeeper")
        other.execute(f"SELECT 1 FROM conversation_turns {at} FOR UPDATE".encode(), [conversation])
        script.gates[0].open()  # the append has the conversation and waits for the turn
        lab.until(lambda: in_log("statement timeout") or _waits(lab), "the append waits")
        other.execute(f"SELECT 1 FROM conversations {at} FOR UPDATE".encode(), [conversation])
        lab.until(lambda: in_log("deadlock detected"), "the append is the victim")
        lab.until(lambda: in_log("canceling statement due to statement timeout"), "and then it is out of time")
        assert not lab.effects
        other.rollback()
    script.gates[1].open()
    lab.until(lambda: lab.ended(conversation, 1), "the turn ends")
    assert lab.effects == {"a": 1}
    lab.check()


def _waits(lab: BreakableLab) -> bool:
    rows = lab.database.rows(
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%append%%'"
    )
    return bool(rows)


@pytest.mark.parametrize("lab", ["supabase"], indirect=True)
def test_a_schema_cache_that_is_behind_a_migration(lab: BreakableLab) -> None:
    script = Bumping()
    lab.llm.script(script)
    worker = lab.worker_ready("interactive", TURNKEEPER_LEASE_SECONDS="5")
    conversation = lab.ask("bump a", on="interactive", heir="interactive")
    lab.until(lambda: lab.llm.requests, "the turn waits for the model")
    lab.site.run("ALTER ROUTINE turnkeeper.append RENAME TO append_later; NOTIFY pgrst, 'reload schema'")
    lab.until(lambda: _rest_lacks(lab, "append"), "PostgREST has noticed")
    script.gates[0].open()
    lab.until(lambda: "PGRST202" in str(worker.said("append_retried")), "the append meets an old cache")
    assert not lab.effects
    lab.site.run("ALTER ROUTINE turnkeeper.append_later RENAME TO append; NOTIFY pgrst, 'reload schema'")
    script.gates[1].open()
    lab.until(lambda: lab.ended(conversation, 1), "the turn ends")
    assert [(t["status"], t["attempt"]) for t in lab.turns()] == [("completed", 1)]
    assert lab.effects == {"a": 1}
    lab.check()


def test_a_plain_job_in_hand_goes_back_to_its_queue(lab: BreakableLab) -> None:
    """A request that is only in the job, a store that is away, and a worker that is told to leave."""
    script = Bumping()
    for gate in script.gates:
        gate.open()
    lab.llm.script(script)
    first = lab.worker_ready("interactive")
    lab.wire.refuse()
    job = lab.enqueue("interactive", "ask", ask="bump a", queue="interactive")
    foreign = lab.enqueue("interactive", "ask", ask=7)
    lab.until(lambda: len(_running(first)) == 2, "both are in its hands")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    assert sorted(_queued(lab)) == sorted([job.id, foreign.id])
    lab.wire.accept()
    lab.worker_ready("interactive")
    lab.until(lambda: lab.all_ended(1) and job.is_finished, "another worker does it")
    assert lab.effects == {"a": 1}
    lab.check()
    lab.until(lambda: foreign.is_finished, "and refuses the other")
    [letter] = lab.database.rows("SELECT * FROM dead_letters")
    assert (letter["job_id"], letter["code"]) == (foreign.id, "request_invalid")


def _running(worker: Nursling) -> list[object]:
    return [e for e in worker.entries() if e.get("event") == "job_started"]


def _queued(lab: BreakableLab) -> list[str]:
    return [job_id.decode() for job_id in lab.redis.lrange("rq:queue:interactive", 0, -1)]


def _rest_lacks(lab: BreakableLab, function: str) -> bool:
    key = lab.settings.supabase_key
    assert key is not None
    answer = httpx.post(
        f"{lab.settings.supabase_url}/rest/v1/rpc/{function}",
        headers={"Authorization": f"Bearer {key.get_secret_value()}"},
        json={"p_token": "", "p_batch": 1, "p_events": [], "p_finish": None, "p_snapshots_kept": 1},
    )
    return answer.json().get("code") == "PGRST202"
