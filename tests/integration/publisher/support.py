"""A real SQLite store with a claimed turn, and its events published."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shared.events import EventDraft, Finish
from shared.requests import parse_request, record_of
from shared.settings import load_settings
from shared.store.base import Claim, Lease, Store
from shared.store.sqlite import SqliteStore

DONE = Finish("completed", "stop")
ANSWER = EventDraft("answer_end", {"content": "done", "messages": [{"role": "user", "content": "why?"}]})


@asynccontextmanager
async def opened(home: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(load_settings(home=home))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def ask(store: Store, conversation_id: str | None = None, text: str = "why?") -> str:
    fields: dict[str, Any] = {"ask": text}
    if conversation_id is not None:
        fields["conversation_id"] = conversation_id
    return (await store.submit(record_of(parse_request("ask", fields)))).conversation_id


async def claim(store: Store, conversation_id: str, *, lease_seconds: float = 10) -> Lease:
    claimed = await store.claim(
        conversation_id, worker="w", claim_id=uuid.uuid4().hex, lease_seconds=lease_seconds, max_crashes=4
    )
    assert isinstance(claimed, Claim)
    return claimed.lease


def started(n: int, **data: Any) -> EventDraft:
    return EventDraft("tool_call_started", {"n": n, **data})


def spoken(step: int, text: str) -> EventDraft:
    return EventDraft("ai_message", {"step": step, "message": {"role": "assistant", "content": text}})
