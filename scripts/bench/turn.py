"""One turn with one tool call: from submit to its end as a live reader sees it, beside LangGraph in the same run.

Ours includes the queue, the claim, the loop, the publisher and the finish, in a worker process; LangGraph runs in
process and without a queue. Same Postgres, same script, text that does not repeat. ``pip install turnkeeper[peers]``.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from scripts.bench.kit.parts import WorkerProcess, connected, ended, environment_of, measured_settings, median, show
from scripts.bench.kit.worker import fresh_text
from shared.settings import Settings

WARM_UP = 3  # turns that do not count


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="turnkeeper bench turn", description=__doc__)
    parser.add_argument("--messages", default="0,100,1000", help="lengths of the history")
    parser.add_argument("--turns", type=int, default=30, help="turns per length")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    lengths = [int(length) for length in options.messages.split(",")]
    with measured_settings(postgres=True) as settings:
        worker = WorkerProcess("scripts.bench.kit.worker", environment_of(settings))
        try:
            rows = [asyncio.run(_row(settings, length, options.turns)) for length in lengths]
        finally:
            worker.stop()
    show("one turn with one tool call", rows, as_json=options.json)
    return 0


async def _row(settings: Settings, history: int, count: int) -> dict[str, Any]:
    """Medians in milliseconds; the two sides take turns, so that a busy moment of the machine hits both."""
    assert settings.database_url is not None
    ours: list[float] = []
    theirs: list[float] = []
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connected(settings))
        try:
            from scripts.bench.kit.langgraph_peer import thread

            peer = await stack.enter_async_context(thread(settings.database_url.get_secret_value(), history))
        except ImportError:
            peer = None
        conversation_id = str(uuid.uuid4())
        for number in range(count + WARM_UP):
            if number == 1 and history:
                _lengthen(settings, conversation_id, history)
            question = fresh_text(f"{history}/{number}")
            started = time.perf_counter()
            asked = await client.ask(question, conversation_id=conversation_id)
            if await ended(client, conversation_id, asked.turn) != "answer_end":
                raise RuntimeError(f"turn {asked.turn} did not end with an answer")
            between = time.perf_counter()
            ours.append(between - started)
            if peer is not None:
                await peer(question)
                theirs.append(time.perf_counter() - between)
    row: dict[str, Any] = {"messages": history, "turnkeeper_ms": median(ours[WARM_UP:]) * 1000}
    if not theirs:
        return {**row, "langgraph_ms": "not installed", "ratio": "-"}
    row["langgraph_ms"] = median(theirs[WARM_UP:]) * 1000
    return {**row, "ratio": row["langgraph_ms"] / row["turnkeeper_ms"]}


def _lengthen(settings: Settings, conversation_id: str, history: int) -> None:
    """Put older messages into the latest snapshot, as a long conversation would have them."""
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": fresh_text(f"old {i}")} for i in range(history)
    ]
    assert settings.database_url is not None
    with psycopg.connect(settings.database_url.get_secret_value(), autocommit=True) as connection:
        connection.execute(
            f"UPDATE {settings.schema_name}.conversation_events "  # noqa: S608
            "SET data = jsonb_set(data, '{messages}', %s || (data->'messages')) "
            "WHERE conversation_id = %s AND event = 'answer_end'",
            [Jsonb(messages), conversation_id],
        )
