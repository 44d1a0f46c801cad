"""The people of the chaos run, in a process of their own: they ask, follow, decide and stop, as the plan says.

``python -m scripts.bench.kit.chaos.people PLAN JOURNAL DEADLINE_SECONDS``. They use the client as any program would;
while the store is away they try again, under the same request id. What they were promised and what they saw is in
their journal: ``accepted`` (a receipt), ``enqueued`` (plain RQ), ``unrecorded`` (a plain RQ job that Redis forgot),
``nothing_to_decide``, ``stopped``, ``seen`` (all events that were shown), ``error`` (what nobody should have met).
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from scripts.bench.kit.chaos.journal import Journal
from scripts.bench.kit.chaos.plan import Act, Plan, Planned
from shared.client import Client, Receipt
from shared.errors import QueueUnavailable, StoreUnavailable
from shared.queues import Ringer, connect_async
from shared.settings import Settings, load_settings
from shared.store import open_store

AGAIN_SECONDS = 0.5  # between tries while the store is away
LOOK_SECONDS = 0.2  # between looks for the turn of a plain RQ job
COPIES_OF_A_DECISION = 2
CONNECTIONS_TO_SPARE = 16  # to Redis, beyond one a follower

Answer = TypeVar("Answer")


class Person:
    """One person in one conversation."""

    def __init__(self, planned: Planned, client: Client, queue: Queue, journal: Journal) -> None:
        self._planned, self._id = planned, planned.conversation_id
        self._client, self._queue, self._journal = client, queue, journal
        self._chance = random.Random(planned.conversation_id)  # noqa: S311  (reproducible, not secret)
        self._turn = 0
        self._seen: list[tuple[int, int, str]] = []

    async def live(self) -> None:
        """All acts in order; whatever goes wrong is in the journal."""
        try:
            await asyncio.sleep(self._planned.start)
            for act in self._planned.acts:
                await getattr(self, f"_{act['do']}")(act)
        except asyncio.CancelledError:
            self._note("error", what="gave up waiting", turn=self._turn)
            raise
        except Exception as error:
            self._note("error", what=repr(error), turn=self._turn)
        finally:
            self._note("seen", events=self._seen)

    async def _ask(self, act: Act) -> None:
        fields = {"conversation_id": self._id, "request_id": act["request_id"], "user_id": "person"}
        self._accepted(await _patiently(lambda: self._client.ask(act["text"], **fields)))

    async def _rq(self, act: Act) -> None:
        fields = {"conversation_id": self._id, "request_id": act["request_id"], "user_id": "person", "ask": act["text"]}
        jobs = await self._enqueue("worker.jobs.ask", fields, act["copies"])
        while (turn := await self._recorded(act["request_id"])) is None:
            if not await asyncio.to_thread(self._any_exists, jobs) and await self._recorded(act["request_id"]) is None:
                self._note("unrecorded", request_id=act["request_id"])
                return
            await asyncio.sleep(LOOK_SECONDS)
        self._turn = turn
        self._note("accepted", request_id=act["request_id"], turn=turn)

    async def _wait(self, _act: Act) -> None:
        """Follow until the last accepted turn has ended; go on from the last event seen when it breaks off."""
        while self._turn:
            try:
                after = self._seen[-1][0] if self._seen else 0
                async for row in self._client.follow(self._id, after=after, until=self._turn):
                    if row["seq"] is not None:
                        self._seen.append((row["seq"], row["turn"], row["event"]))
                return
            except (StoreUnavailable, QueueUnavailable):
                await asyncio.sleep(AGAIN_SECONDS)

    async def _think(self, act: Act) -> None:
        await asyncio.sleep(act["seconds"])

    async def _decide(self, act: Act) -> None:
        pending = await _patiently(lambda: self._client.approvals(self._id))
        decisions = [
            {
                "tool_call_id": entry["tool_call_id"],
                "approval_token": entry["approval_token"],
                "approved": self._chance.random() * 100 < act["approve"],
            }
            for entry in (pending[:1] if act["first"] else pending)
        ]
        if not decisions:
            self._note("nothing_to_decide", turn=self._turn)
            return
        fields = {"request_id": act["request_id"], "user_id": "person"}
        self._accepted(await _patiently(lambda: self._client.decide(self._id, decisions, **fields)))
        if act["again"]:
            fields |= {"conversation_id": self._id, "tool_decisions": decisions}
            await self._enqueue("worker.jobs.tool_decisions", fields, COPIES_OF_A_DECISION)

    async def _stop(self, _act: Act) -> None:
        stopped = await _patiently(lambda: self._client.stop(self._id, self._turn))
        self._note("stopped", turn=self._turn, effect=stopped.effect)

    # Their means

    def _accepted(self, receipt: Receipt) -> None:
        self._turn = receipt.turn
        self._note("accepted", request_id=receipt.request_id, turn=receipt.turn, verdicts=receipt.decisions)

    async def _recorded(self, request_id: str) -> int | None:
        turns = await _patiently(lambda: self._client.store.turns(self._id))
        return next((row["turn"] for row in turns if row["request_id"] == request_id), None)

    async def _enqueue(self, function: str, fields: dict[str, Any], copies: int) -> list[str]:
        def enqueue() -> list[str]:
            return [self._queue.enqueue(function, kwargs=fields).id for _ in range(copies)]

        jobs = await asyncio.to_thread(enqueue)
        self._note("enqueued", request_id=fields["request_id"], jobs=jobs)
        return jobs

    def _any_exists(self, jobs: list[str]) -> bool:
        return any(Job.exists(job, connection=self._queue.connection) for job in jobs)

    def _note(self, kind: str, **fields: Any) -> None:
        self._journal.append(kind, conversation=self._id, **fields)


async def _patiently(call: Callable[[], Awaitable[Answer]]) -> Answer:
    while True:
        try:
            return await call()
        except StoreUnavailable:
            await asyncio.sleep(AGAIN_SECONDS)


async def _live(settings: Settings, plan: Plan, journal: Journal, deadline_seconds: float) -> None:
    count = len(plan.conversations)
    redis = connect_async(settings.effective_redis_url, max_connections=count + CONNECTIONS_TO_SPARE)
    store = await open_store(settings).open()
    with Redis.from_url(settings.effective_redis_url) as connection:
        client = Client(settings, store, Ringer(redis), redis)
        queue = Queue("interactive", connection=connection, serializer=JSONSerializer)
        people = [Person(planned, client, queue, journal) for planned in plan.conversations]
        tasks = [asyncio.create_task(person.live()) for person in people]
        _, late = await asyncio.wait(tasks, timeout=deadline_seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    await store.close()
    await redis.aclose()


def main(arguments: list[str]) -> int:
    plan, journal, deadline_seconds = arguments
    asyncio.run(_live(load_settings(), Plan.read(Path(plan)), Journal(Path(journal)), float(deadline_seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
