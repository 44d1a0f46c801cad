"""Redis forgets, goes away, fills up or evicts: every recorded turn ends, and the same worker goes on."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError
from rq import Worker
from rq.command import send_stop_job_command
from rq.serializers import JSONSerializer

from scripts.bench.kit.llm_server import Gate, LlmServer
from shared.client import Client, Receipt
from shared.settings import Settings
from shared.store.migrate import migrate
from tests.acceptance.breakable import Bumping
from tests.acceptance.invariants import Database
from tests.acceptance.lab import Lab
from tests.support.proxy import FaultyProxy
from tests.support.valkey import Valkey

OUTAGE_SECONDS = 2.5
RECOVERY_SECONDS = 15.0
SLOTS = 2


class QueueLab(Lab):
    """A lab whose Redis breaks: the workers reach it over a wire, the test directly."""

    def __init__(self, folder: Path, valkey: Valkey, llm: LlmServer) -> None:
        self.valkey = valkey
        self.wire = FaultyProxy(str(valkey.socket))
        settings = Settings(home=folder / "home")
        migrate(settings)
        url = f"redis://127.0.0.1:{self.wire.port}/0"
        super().__init__(folder, settings, Database(settings.sqlite_path), url, llm)
        self.redis.close()
        self.redis = Redis.from_url(valkey.url)

    def submit(self, *texts: str) -> list[Receipt]:
        """Record and ring, as our client does."""

        async def work() -> list[Receipt]:
            async with Client.connect(self.settings.model_copy(update={"redis_url": self.redis_url})) as client:
                return [await client.ask(text) for text in texts]

        return asyncio.run(work())

    def ends(self) -> dict[str, str]:
        rows = self.database.rows("SELECT conversation_id, status FROM conversation_turns")
        return {str(row["conversation_id"]): row["status"] for row in rows}

    def close(self) -> None:
        super().close()
        self.wire.stop()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[QueueLab]:
    with tempfile.TemporaryDirectory(prefix="tk-valkey-") as folder, LlmServer() as llm:
        valkey = Valkey(Path(folder), persist=False)
        valkey.start()
        made = QueueLab(tmp_path, valkey, llm)
        yield made
        made.close()
        valkey.stop()
    assert llm.violations == []


Fault = Callable[[QueueLab], Any]


def _restart(lab: QueueLab) -> None:
    lab.valkey.stop()
    time.sleep(OUTAGE_SECONDS)
    lab.valkey.start()


def _fill(lab: QueueLab) -> None:
    lab.redis.config_set("maxmemory", 1)


def _evict(lab: QueueLab) -> None:
    """Until nothing of the queue is left, whatever the workers write meanwhile."""
    used = lab.redis.info("memory")["used_memory"]
    lab.redis.config_set("maxmemory-policy", "allkeys-random")
    lab.redis.config_set("maxmemory", used + 300_000)
    for number in range(100_000):
        lab.redis.set(f"junk:{number}", "x" * 10_000)
        if not any(lab.redis.scan_iter("rq:*", count=1_000)):
            return
    raise AssertionError("nothing was evicted")


FAULTS: dict[str, tuple[Fault, Fault]] = {
    "flushed": (lambda lab: lab.redis.flushall(), lambda lab: None),
    "restarted empty": (_restart, lambda lab: None),
    "away": (lambda lab: lab.wire.refuse(), lambda lab: lab.wire.accept()),
    "silent": (lambda lab: lab.wire.silence(), lambda lab: lab.wire.heal()),
    "full": (_fill, lambda lab: lab.redis.config_set("maxmemory", 0)),
    "evicting": (_evict, lambda lab: lab.redis.config_set("maxmemory", 0)),
}
FORGETFUL = {"flushed", "restarted empty", "evicting"}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_recorded_turn_ends_and_the_worker_goes_on(lab: QueueLab, fault: str) -> None:
    begin, end = FAULTS[fault]
    script = Bumping()
    lab.llm.script(script)
    worker = lab.worker("interactive", slots=SLOTS, TURNKEEPER_LEASE_SECONDS="2")
    worker.wait_for("worker_ready")
    plain = lab.enqueue("interactive", "ask", ask="bump a", queue="interactive")
    lab.submit("bump b")
    lab.until(lambda: len(lab.llm.requests) == SLOTS, "two turns run")
    lab.submit("bump c", "bump d", "bump e")

    begin(lab)
    [meanwhile] = lab.submit("bump f")
    for gate in script.gates:
        gate.open()
    lab.until(lambda: list(lab.ends().values()).count("completed") >= SLOTS, "turns that run need no Redis")
    if fault not in FORGETFUL:
        assert not meanwhile.rung
        time.sleep(OUTAGE_SECONDS)
    end(lab)

    back_at = time.monotonic()
    lab.until(lambda: list(lab.ends().values()) == ["completed"] * 6, "every recorded turn ends", RECOVERY_SECONDS)
    print(f"{fault}: every turn had ended {time.monotonic() - back_at:.2f} s later")
    assert lab.effects == dict.fromkeys("abcdef", 1)
    assert [line for conversation in lab.ends() for line in lab.broken(conversation)] == []
    if fault not in FORGETFUL:
        lab.until(lambda: plain.is_finished, "RQ hears of the end, late")
        assert plain.return_value()["status"] == "completed"

    lab.until(lambda: len(Worker.all(connection=lab.redis)) == 1, "`rq info` shows the worker again")
    print(f"{fault}: registered again {time.monotonic() - back_at:.2f} s later")
    [seen] = Worker.all(connection=lab.redis)
    assert seen.queue_names() == ["interactive"]
    assert worker.ended is None
    script.gates[0] = Gate()
    held = lab.enqueue("interactive", "ask", ask="bump z", queue="interactive")
    lab.until(lambda: held.is_started, "a job runs")
    lab.until(lambda: lab.redis.pubsub_numsub(f"rq:pubsub:{seen.name}")[0][1], "the channel of commands is open")
    send_stop_job_command(lab.redis, held.id, serializer=JSONSerializer)
    lab.until(lambda: held.is_stopped, "RQ's stop command arrives")
    assert "z" not in lab.effects


def test_a_ring_whose_job_was_evicted_is_rung_again(lab: QueueLab) -> None:
    script = Bumping()
    for gate in script.gates:
        gate.open()
    lab.llm.script(script)
    [receipt] = lab.submit("bump a")
    for key in lab.redis.scan_iter("rq:job:*"):
        lab.redis.delete(key)
    assert lab.redis.llen("rq:queue:interactive") == 1
    worker = lab.worker("interactive")
    worker.wait_for("worker_ready")
    lab.until(lambda: lab.ends() == {receipt.conversation_id: "completed"}, "the reaper rings")
    lab.until(lambda: not lab.redis.exists("rq:queue:interactive:intermediate"), "and nothing is left over")


def test_a_job_that_a_full_redis_could_not_put_back_is_not_lost(lab: QueueLab) -> None:
    """A worker died with a job in hand; the one that finds it is refused every write that grows."""
    from rq import Queue

    from worker import rq_records

    queue = Queue("interactive", connection=lab.redis, serializer=JSONSerializer)
    job = queue.enqueue("worker.jobs.ask", ask="bump a")
    lab.redis.lmove(queue.key, queue.intermediate_queue_key)
    put_back = lab.redis.register_script(rq_records.PUT_BACK)
    _fill(lab)
    with pytest.raises(ResponseError, match="maxmemory"):
        put_back(keys=rq_records.put_back_keys(queue, job.id), args=[job.id, 0])
    assert lab.redis.lrange(queue.intermediate_queue_key, 0, -1) == [job.id.encode()]
    lab.redis.config_set("maxmemory", 0)
    assert put_back(keys=rq_records.put_back_keys(queue, job.id), args=[job.id, 0]) == 1
    assert queue.job_ids == [job.id]
    assert lab.redis.llen(queue.intermediate_queue_key) == 0
    assert put_back(keys=rq_records.put_back_keys(queue, job.id), args=[job.id, 0]) == 0
