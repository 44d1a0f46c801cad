"""Many turns at once in one worker process, each waiting for a model behind HTTP."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from scripts.bench.kit.llm_server import MODEL, LlmServer, Reply
from scripts.bench.kit.parts import WorkerProcess, connected, ended, environment_of, measured_settings, show
from shared.settings import Settings


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="turnkeeper bench concurrency", description=__doc__)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--model-seconds", type=float, default=2.0)
    parser.add_argument("--postgres", action="store_true", help="on Postgres instead of the embedded store")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with measured_settings(postgres=options.postgres, model=f"openai/{MODEL}") as settings, LlmServer() as llm:
        llm.script(lambda request: Reply("All is well.", delay_seconds=options.model_seconds))
        slots = max(64, options.turns)
        environment = environment_of(settings, TURNKEEPER_SLOTS=f"interactive={slots}", **llm.environment)
        worker = WorkerProcess("worker", environment)
        try:
            seconds = asyncio.run(_all(settings, options.turns))
            resident = worker.resident_megabytes()
        finally:
            worker.stop()
    row = {
        "turns": options.turns,
        "model_seconds": options.model_seconds,
        "all_done_seconds": seconds,
        "resident_mb": resident,
        "worker_ready_seconds": worker.seconds_to_ready,
    }
    show("turns at once in one process", [row], as_json=options.json)
    return 0


async def _all(settings: Settings, count: int) -> float:
    async with connected(settings) as client:
        started = time.perf_counter()
        asked = await asyncio.gather(*(client.ask(f"How is service {n}?") for n in range(count)))
        names = await asyncio.gather(*(ended(client, a.conversation_id, a.turn) for a in asked))
        seconds = time.perf_counter() - started
    if set(names) != {"answer_end"}:
        raise RuntimeError(f"turns ended with {sorted(set(names))}")
    return seconds
