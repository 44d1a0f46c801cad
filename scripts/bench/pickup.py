"""Pick-up: from just before a request is enqueued to the first request that reaches the model, on an idle worker."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

from scripts.bench.kit.llm_server import MODEL, LlmServer, Reply
from scripts.bench.kit.parts import (
    WorkerProcess,
    connected,
    ended,
    environment_of,
    measured_settings,
    median,
    percentile,
    show,
)
from shared.settings import Settings


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="turnkeeper bench pickup", description=__doc__)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows = []
    for name, postgres in (("embedded", False), ("postgres", True)):
        with measured_settings(postgres=postgres, model=f"openai/{MODEL}") as settings, LlmServer() as llm:
            environment = environment_of(settings, **llm.environment)
            worker = WorkerProcess("worker", environment)
            try:
                rows.append({"store": name, **asyncio.run(_measure(settings, llm, options.turns))})
            finally:
                worker.stop()
    show("enqueue to first model request", rows, as_json=options.json)
    return 0


async def _measure(settings: Settings, llm: LlmServer, count: int) -> dict[str, Any]:
    arrived: list[float] = []

    def answer(request: Any) -> Reply:
        arrived.append(time.perf_counter())
        return Reply("All is well.")

    llm.script(answer)
    waits: list[float] = []
    async with connected(settings) as client:
        for number in range(count + 3):
            started = time.perf_counter()
            asked = await client.ask(f"How is service {number}?")
            await ended(client, asked.conversation_id, asked.turn)
            waits.append((arrived[-1] - started) * 1000)
            await asyncio.sleep(0.02)  # the worker is idle again
    waits = waits[3:]  # the first ones warm up connections
    return {"turns": count, "median_ms": median(waits), "p95_ms": percentile(waits, 0.95), "worst_ms": max(waits)}
