"""Threads for tools that are plain functions.

A thread cannot be interrupted. So each call gets a daemon thread of its own, which never holds up the end of the
process; a call that is given up leaves its thread running, and its place is free again only when the function returns.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from worker.agent.tools.outcome import harmless

_T = TypeVar("_T")


class ToolThreads:
    """At most ``limit`` functions at a time, on threads that are ours alone."""

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)

    @property
    def saturated(self) -> bool:
        return self._free.locked()

    async def start(self, name: str, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Wait for a free place, start, and return the result's future. Context variables are the caller's."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        context = contextvars.copy_context()

        def finish(value: Any, error: Exception | None) -> None:
            self._free.release()
            if future.done():  # given up
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        def work() -> None:
            value: Any = None
            error: Exception | None = None
            try:
                value = context.run(function)
            except BaseException as caught:
                error = harmless(caught)
            with suppress(RuntimeError):  # the loop is closed: the process is on its way out
                loop.call_soon_threadsafe(finish, value, error)

        try:
            threading.Thread(target=work, name=f"tool-{name}", daemon=True).start()
        except RuntimeError:  # the machine has no more threads
            self._free.release()
            raise
        return future
