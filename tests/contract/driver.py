"""What a worker and its clients say to a store, in few words: one conversation, and the events of a turn."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from shared.events import (
    AI_MESSAGE,
    ANSWER_END,
    APPROVAL_REQUIRED,
    HISTORY_COMPACTED,
    TOOL_CALL_RESULT,
    TOOL_CALL_STARTED,
    CallAwait,
    CallState,
    EventDraft,
    Finish,
    NewCall,
    Risk,
)
from shared.history import Message, fold
from shared.requests import RequestRecord, parse_request, record_of, token_sha256
from shared.store.base import Appended, Claim, Lease, NotClaimed, Row, Store, Submitted

ANSWERED = Finish("completed", "answer", None, "scripted", "scripted/one")
PAUSED = Finish("awaiting_approval", "approval_required")


def failed(code: str = "model_unavailable", *, retryable: bool = True) -> Finish:
    return Finish("failed", code, {"code": code, "description": "It failed.", "retryable": retryable})


def record(kind: str, *, accept_call_keys: bool = False, **arguments: Any) -> RequestRecord:
    return record_of(parse_request(kind, arguments), accept_call_keys=accept_call_keys)


def call(
    step: int,
    index: int = 0,
    call_id: str = "c1",
    *,
    gated: bool = True,
    risk: Risk = "side_effect",
    kind: Literal["tool", "frontend"] = "tool",
    name: str = "shell",
) -> NewCall:
    waits = gated or kind == "frontend"
    return {
        "op": "new",
        "step": step,
        "call_index": index,
        "tool_call_id": call_id,
        "tool_name": name,
        "arguments": '{"command": "ls"}',
        "arguments_digest": "d1",
        "risk": risk,
        "kind": kind,
        "gated": gated and kind == "tool",
        "state": "pending" if waits else "approved",
        "decided_by": None if waits else "policy:never",
        "reason": None,
    }


def ai(step: int, *calls: NewCall, content: str | None = None, usage: Row | None = None) -> EventDraft:
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": c["tool_call_id"],
                "type": "function",
                "function": {"name": c["tool_name"], "arguments": c["arguments"]},
            }
            for c in calls
        ]
    data: Row = {"step": step, "message": message}
    return EventDraft(AI_MESSAGE, data | {"usage": usage} if usage else data, calls)


def start(turn: int, step: int, index: int = 0) -> EventDraft:
    return EventDraft(TOOL_CALL_STARTED, {}, ({"op": "start", "turn": turn, "step": step, "call_index": index},))


def result(
    turn: int, step: int, index: int = 0, call_id: str = "c1", *, state: CallState = "done", content: str = "ok"
) -> EventDraft:
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    return EventDraft(
        TOOL_CALL_RESULT,
        {"message": message, "status": state},
        (
            {
                "op": "result",
                "turn": turn,
                "step": step,
                "call_index": index,
                "state": state,
                "result_summary": content,
                "result_raw": None,
                "duration_ms": 5,
            },
        ),
    )


def waits(turn: int, step: int, index: int = 0, *, token: str = "t1", seconds: float = 600) -> CallAwait:
    expires_at = datetime.now(UTC) + timedelta(seconds=seconds)
    return {
        "op": "await",
        "turn": turn,
        "step": step,
        "call_index": index,
        "approval_token_sha256": token_sha256(token),
        "expires_at": expires_at.isoformat(),
    }


def pause(messages: Sequence[Message] = (), *awaits: CallAwait) -> EventDraft:
    return EventDraft(APPROVAL_REQUIRED, {"messages": list(messages), "pending_approvals": []}, awaits)


def answer(messages: Sequence[Message] = (), content: str = "done") -> EventDraft:
    return EventDraft(ANSWER_END, {"messages": list(messages), "content": content})


def compacted(messages: Sequence[Message]) -> EventDraft:
    return EventDraft(HISTORY_COMPACTED, {"messages": list(messages)})


def yes(call_id: str = "c1", token: str | None = "t1", **fields: Any) -> dict[str, Any]:
    return {"tool_call_id": call_id, "approved": True, **({"approval_token": token} if token else {}), **fields}


def no(call_id: str = "c1", token: str | None = "t1", **fields: Any) -> dict[str, Any]:
    return yes(call_id, token, **fields) | {"approved": False}


def history(claim: Claim) -> list[Message]:
    """The messages that a worker would go on from."""
    return fold(claim.snapshot, claim.turns, claim.events)


class Talk:
    """One conversation on a store."""

    def __init__(self, store: Store, conversation_id: str | None = None) -> None:
        self.store = store
        self.id = conversation_id or str(uuid.uuid4())

    async def ask(self, text: str = "hello", **fields: Any) -> Submitted:
        return await self.store.submit(record("ask", ask=text, conversation_id=self.id, **fields))

    async def decide(self, *decisions: dict[str, Any], keys: bool = False, **fields: Any) -> Submitted:
        return await self.store.submit(
            record(
                "tool_decisions",
                accept_call_keys=keys,
                conversation_id=self.id,
                tool_decisions=list(decisions),
                **fields,
            )
        )

    async def retry(self, **fields: Any) -> Submitted:
        return await self.store.submit(record("retry", conversation_id=self.id, **fields))

    async def try_claim(
        self,
        *,
        claim_id: str | None = None,
        lease_seconds: float = 60,
        max_crashes: int = 4,
        record: RequestRecord | None = None,
        account_turns: int | None = None,
        account_cost_usd: float | None = None,
    ) -> Claim | NotClaimed:
        return await self.store.claim(
            self.id,
            worker="w1",
            claim_id=claim_id or str(uuid.uuid4()),
            lease_seconds=lease_seconds,
            max_crashes=max_crashes,
            record=record,
            account_turns=account_turns,
            account_cost_usd=account_cost_usd,
        )

    async def claim(self, **arguments: Any) -> Claim:
        claim = await self.try_claim(**arguments)
        assert isinstance(claim, Claim), claim
        return claim

    async def claim_expired(self, **arguments: Any) -> Claim:
        """A claim whose lease has ended by the time that anybody looks: its worker is taken for dead."""
        return await self.claim(lease_seconds=0, **arguments)

    async def append(
        self, lease: Lease, batch: int, *events: EventDraft, finish: Finish | None = None, kept: int = 1
    ) -> Appended:
        return await self.store.append(lease, batch, events, finish, snapshots_kept=kept)

    async def answered(self, text: str = "hello") -> None:
        """A whole turn: asked, claimed, answered."""
        await self.ask(text)
        claim = await self.claim()
        said = ai(1, content=f"re: {text}")
        messages = [*history(claim), said.data["message"]]
        await self.append(claim.lease, 1, said, answer(messages), finish=ANSWERED)

    async def paused(self, *ids: str, seconds: float = 600) -> Claim:
        """A turn that waits for a decision on each of the calls; their tokens are ``t1``, ``t2`` … in call order."""
        await self.ask("restart web")
        claim = await self.claim()
        turn, names = claim.lease.turn, ids or ("c1",)
        said = ai(1, *(call(1, i, name) for i, name in enumerate(names)))
        awaits = [waits(turn, 1, i, token=f"t{i + 1}", seconds=seconds) for i in range(len(names))]
        paused = pause([*history(claim), said.data["message"]], *awaits)
        await self.append(claim.lease, 1, said, paused, finish=PAUSED)
        return claim

    async def events(self, *, full: bool = True) -> list[Row]:
        return await self.store.events(self.id, full=full)

    async def event_names(self) -> list[str]:
        return [event["event"] for event in await self.events()]

    async def calls(self) -> dict[str, Row]:
        return {row["tool_call_id"]: row for row in await self.store.calls(self.id)}

    async def states(self) -> dict[str, str]:
        return {name: row["state"] for name, row in (await self.calls()).items()}

    async def turn(self, number: int) -> Row:
        return (await self.store.turns(self.id))[number - 1]

    async def statuses(self) -> list[str]:
        return [row["status"] for row in await self.store.turns(self.id)]

    async def row(self) -> Row:
        row = await self.store.conversation(self.id)
        assert row is not None
        return row
