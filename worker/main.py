"""The worker process: parse, wire Redis, work. ``turnkeeper worker`` and ``python -m worker`` end up here."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

from shared.log import configure_logging, exit_on_error
from shared.redaction import Redactor
from shared.settings import Settings, load_settings

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # before anybody imports litellm: saves a download


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker from command line arguments; its exit status."""
    options = _parser().parse_args(argv)
    overrides: dict[str, Any] = {"slots": ",".join(options.queue)} if options.queue else {}
    with exit_on_error():
        settings = load_settings(**overrides)
        if options.once is not None:
            run_once(settings, options.once, options.claim_id)
            return 0
        run_worker(settings, burst=options.burst, max_jobs=options.max_jobs, name=options.name)
    return 0


def run_worker(
    settings: Settings, *, burst: bool = False, max_jobs: int | None = None, name: str | None = None
) -> None:
    """Work on the queues of ``settings.slots`` until a signal. Starts the embedded Redis if that is configured.

    Raises ``ConfigurationError``, ``QueueUnavailable``; ``SystemExit`` with 2 or 3 for what goes wrong later.
    """
    configure_logging(settings.log_level, redactor=Redactor.from_settings(settings))
    if not settings.embedded_redis:
        _work(settings, burst, max_jobs, name)
        return
    from shared.embedded import EmbeddedRedis

    redis = EmbeddedRedis.start(settings)
    try:
        _work(settings, burst, max_jobs, name)
    finally:
        redis.stop()


def _work(settings: Settings, burst: bool, max_jobs: int | None, name: str | None) -> None:
    from shared.queues import connect, redis_errors
    from worker.rq_worker import ConversationWorker

    with connect(settings.effective_redis_url) as connection:
        with redis_errors("connecting"):
            worker = ConversationWorker(list(settings.slots), name=name, connection=connection, settings=settings)
        worker.work(burst=burst, max_jobs=max_jobs)


def run_once(settings: Settings, conversation_id: str, claim_id: str | None = None) -> None:
    """Run one turn of a conversation in this process. Prints ``claimed`` once it has its lease (that of ``claim_id``
    where given), and in the end how it ended, as JSON. SIGTERM hands it back."""
    from worker.bootstrap import build_runtime
    from worker.isolation import CLAIMED

    configure_logging(settings.log_level, redactor=Redactor.from_settings(settings))

    async def run() -> dict[str, Any]:
        runtime = build_runtime(settings)
        draining: list[asyncio.Future[None]] = []
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, lambda: draining.append(asyncio.ensure_future(runtime.drain()))
        )
        try:
            await runtime.start(f"once.{os.getpid()}", alone=True)
            return await runtime.run_once(conversation_id, claim_id, lambda: print(CLAIMED, flush=True))
        finally:
            await asyncio.gather(*draining)
            await runtime.close()

    print(json.dumps(asyncio.run(run())), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker", description="Run conversations from the queues.")
    parser.add_argument(
        "--queue", action="append", metavar="NAME=SLOTS", help="a queue and its turns at once, for TURNKEEPER_SLOTS"
    )
    parser.add_argument("--burst", action="store_true", help="end when nothing waits and nothing runs")
    parser.add_argument("--max-jobs", type=int, metavar="N", help="end after N jobs")
    parser.add_argument("--once", metavar="CONVERSATION", help="run one turn of it, alone, print how it ended, and end")
    parser.add_argument("--claim-id", help="with --once: the claim whose lease to go on with")
    parser.add_argument("--name", help="the worker's name in RQ; random by default")
    return parser
