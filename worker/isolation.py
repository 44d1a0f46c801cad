"""Isolation: a turn that has crashed its worker before runs alone, in a process of its own.

From ``CRASHES`` crashes on nobody shares a process with it: ``python -m worker --once CONVERSATION --claim-id ID``
takes over our lease (the same claim id gets the same lease), says so, runs the turn, prints how it ended, and exits.
If that process dies too, the lease expires and only this turn is one crash nearer to its end. A few run at once. When
many are under suspicion (somebody kills whole workers), the rest run as any other: waiting would hold them up for the
sake of a guilty one, and each further death of the worker would count against them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final

import orjson
import structlog

from shared.errors import LeaseLost, StoreUnavailable
from shared.settings import Settings
from shared.store.base import Claim
from worker.turn import TurnReport, TurnRunner

CRASHES: Final = 2
AT_ONCE: Final = 2  # processes of one worker
CLAIMED: Final = "claimed"  # the first line of a process that has the lease
LINE_BYTES: Final = 1_000_000

log = structlog.get_logger(__name__)


class Isolation:
    """Runs suspicious turns apart. ``command``: what runs one, without its conversation."""

    def __init__(self, settings: Settings, turns: TurnRunner, command: Sequence[str] | None = None) -> None:
        self._turns = turns
        self._command = tuple(command or (sys.executable, "-m", "worker"))
        self._environment = {
            **os.environ,
            "REDIS_URL": settings.effective_redis_url,
            "TURNKEEPER_HOME": str(settings.home),
        }
        self._processes: set[asyncio.subprocess.Process] = set()
        self._taken = 0
        self._leaving = False

    def takes(self, claim: Claim) -> bool:
        return int(claim.turn["crashes"]) >= CRASHES and self._taken < AT_ONCE

    async def run(self, claim: Claim, sent_at: float) -> TurnReport:
        """Have a process of its own run the turn, and wait for its end."""
        self._taken += 1
        try:
            return await self._apart(claim, sent_at)
        finally:
            self._taken -= 1

    async def _apart(self, claim: Claim, sent_at: float) -> TurnReport:
        lease = claim.lease
        gone = TurnReport(lease.conversation_id, lease.turn, lease.attempt, "lost", LeaseLost.code)
        if self._leaving:
            return await self._hand_back(claim)
        crashes = claim.turn["crashes"]
        log.warning("turn_isolated", conversation=lease.conversation_id, turn=lease.turn, crashes=crashes)
        with self._turns.holding(lease, sent_at) as held:
            process = await self._start(claim)
            try:
                assert process.stdout is not None
                if (await process.stdout.readline()).decode().strip() == CLAIMED:
                    held.drop()  # it renews by itself: were it to hang, the lease has to expire
                output, _ = await process.communicate()
            finally:
                self._processes.discard(process)
        if process.returncode != 0:
            log.warning("isolated_turn_died", conversation=lease.conversation_id, exit_status=process.returncode)
            return gone
        answer: dict[str, Any] = orjson.loads(output or b"{}")
        return TurnReport(**answer) if answer else gone

    async def leave(self) -> None:
        """Have every process hand its turn back."""
        self._leaving = True
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(process.wait() for process in self._processes))

    async def _start(self, claim: Claim) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            "--once",
            claim.lease.conversation_id,
            "--claim-id",
            claim.turn["claim_id"],
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            start_new_session=True,  # Ctrl+C is for us to pass on
        )
        self._processes.add(process)
        return process

    async def _hand_back(self, claim: Claim) -> TurnReport:
        lease = claim.lease
        try:
            ring = await self._turns.release(lease)
        except (LeaseLost, StoreUnavailable) as error:
            return TurnReport(lease.conversation_id, lease.turn, lease.attempt, "lost", error.code)
        return TurnReport(lease.conversation_id, lease.turn, lease.attempt, "pending", "handed_back", None, ring.queue)
