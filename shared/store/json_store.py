"""What all stores share: typed operations over one ``_call(function, arguments) -> JSON``.

The names and arguments are those of the SQL functions; Postgres and Supabase send them there, SQLite dispatches them
to Python functions of the same name. Refusals arrive as ``TurnkeeperError`` of the right class from ``_call``.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from shared.events import EventDraft, Finish
from shared.requests import Artifact, RequestRecord
from shared.store.base import Appended, Claim, Lease, NotClaimed, Renewed, Ring, Row, Stopped, Submitted


class JsonStore(ABC):
    """Base of the stores: encodes arguments, decodes answers."""

    @abstractmethod
    async def _call(self, function: str, arguments: dict[str, Any]) -> Any:
        """Run one function in one transaction; its JSON answer. Raises the error tree."""

    async def submit(self, record: RequestRecord) -> Submitted:
        return _submitted(await self._call("submit", _request_arguments(record)))

    async def claim(
        self,
        conversation_id: str,
        *,
        worker: str,
        claim_id: str,
        lease_seconds: float,
        max_crashes: int,
        record: RequestRecord | None = None,
        account_turns: int | None = None,
        account_cost_usd: float | None = None,
    ) -> Claim | NotClaimed:
        arguments: dict[str, Any] = {
            "p_conversation_id": conversation_id,
            "p_worker": worker,
            "p_claim_id": claim_id,
            "p_lease_seconds": lease_seconds,
            "p_max_crashes": max_crashes,
            "p_account_turns": account_turns,
            "p_account_cost_usd": account_cost_usd,
        }
        if record is not None:
            arguments.update(_request_arguments(record))
        answer = await self._call("claim", arguments)
        submitted = _submitted(answer["submitted"]) if answer.get("submitted") else None
        if answer["result"] != "lease":
            return NotClaimed(answer["result"], answer["ended"], submitted, answer.get("wait_reason"))
        turn = answer["turn"]
        lease = Lease(turn["conversation_id"], turn["turn"], turn["attempt"], turn["lease_token"], lease_seconds)
        return Claim(
            lease=lease,
            now=datetime.fromisoformat(answer["now"]),
            conversation=answer["conversation"],
            turn=turn,
            snapshot=answer["snapshot"],
            turns=answer["turns"],
            events=answer["events"],
            calls=answer["calls"],
            rules=answer["rules"],
            ended=answer["ended"],
            submitted=submitted,
            taken_over=turn["taken_over"],
        )

    async def append(
        self,
        lease: Lease,
        batch: int,
        events: Sequence[EventDraft],
        finish: Finish | None = None,
        *,
        snapshots_kept: int = 1,
    ) -> Appended:
        answer = await self._call(
            "append",
            {
                "p_token": lease.token,
                "p_batch": batch,
                "p_events": [event.as_dict() for event in events],
                "p_finish": finish.as_dict() if finish else None,
                "p_snapshots_kept": snapshots_kept,
                "p_lease_seconds": lease.seconds,
            },
        )
        return Appended(answer["first_seq"], answer["status"], answer["stop_requested"], answer["next_queue"])

    async def renew(self, tokens: Sequence[str], lease_seconds: float) -> Renewed:
        answer = await self._call("renew", {"p_tokens": list(tokens), "p_lease_seconds": lease_seconds})
        return Renewed(frozenset(answer["lost"]), frozenset(answer["stopped"]), frozenset(answer["skipped"]))

    async def release(self, lease: Lease, delay_seconds: float = 0) -> Ring:
        answer = await self._call("release", {"p_token": lease.token, "p_delay_seconds": delay_seconds})
        return Ring(answer["conversation_id"], answer["queue"])

    async def reap(self, *, limit: int = 100, everything: bool = False) -> list[Ring]:
        rows = await self._call("reap", {"p_limit": limit, "p_everything": everything})
        return [Ring(row["conversation_id"], row["queue"]) for row in rows]

    async def stop(self, conversation_id: str, turn: int | None = None) -> Stopped:
        answer = await self._call("stop", {"p_conversation_id": conversation_id, "p_turn": turn})
        return Stopped(answer["turn"], answer["effect"], answer["queue"])

    async def record_feedback(
        self,
        request_id: str,
        rating: Literal["up", "down"],
        *,
        category: str | None = None,
        comment: str | None = None,
        account_id: str | None = None,
    ) -> Row:
        return await self._row(
            "record_feedback",
            p_request_id=request_id,
            p_rating=rating,
            p_category=category,
            p_comment=comment,
            p_account_id=account_id,
        )

    async def record_dead_letter(self, letter: Row) -> int:
        return int(await self._call("record_dead_letter", {"p_letter": letter}))

    async def take_dead_letter(self, letter_id: int) -> Row | None:
        return await self._maybe_row("take_dead_letter", p_letter_id=letter_id)

    async def put_artifact(self, lease: Lease, artifact: Artifact) -> None:
        await self._call("put_artifact", {"p_token": lease.token, "p_artifact": _artifact_document(artifact)})

    async def get_artifact(self, conversation_id: str, artifact_id: str) -> Artifact | None:
        row = await self._maybe_row("get_artifact", p_conversation_id=conversation_id, p_artifact_id=artifact_id)
        if row is None:
            return None
        return Artifact(row["artifact_id"], row["name"], row["media_type"], base64.b64decode(row["content"]))

    async def rename(self, conversation_id: str, title: str) -> Row:
        return await self._row("rename", p_conversation_id=conversation_id, p_title=title)

    async def delete(self, conversation_id: str) -> bool:
        return bool(await self._call("delete_conversation", {"p_conversation_id": conversation_id}))

    async def conversation(self, conversation_id: str) -> Row | None:
        return await self._maybe_row("get_conversation", p_conversation_id=conversation_id)

    async def conversations(
        self,
        *,
        account_id: str | None = None,
        status: str | None = None,
        limit: int = 50,
        before: str | None = None,
    ) -> list[Row]:
        return await self._rows(
            "list_conversations", p_account_id=account_id, p_status=status, p_limit=limit, p_before=before
        )

    async def turns(self, conversation_id: str) -> list[Row]:
        return await self._rows("list_turns", p_conversation_id=conversation_id)

    async def turn_of(self, request_id: str, account_id: str) -> Row | None:
        return await self._maybe_row("get_turn_of", p_request_id=request_id, p_account_id=account_id)

    async def events(
        self, conversation_id: str, *, after: int = 0, limit: int = 1_000, full: bool = False
    ) -> list[Row]:
        return await self._rows(
            "list_events", p_conversation_id=conversation_id, p_after=after, p_limit=limit, p_full=full
        )

    async def calls(self, conversation_id: str) -> list[Row]:
        return await self._rows("list_calls", p_conversation_id=conversation_id)

    async def approvals(self, *, account_id: str | None = None, conversation_id: str | None = None) -> list[Row]:
        return await self._rows("list_approvals", p_account_id=account_id, p_conversation_id=conversation_id)

    async def dead_letters(self, limit: int = 100) -> list[Row]:
        return await self._rows("list_dead_letters", p_limit=limit)

    async def usage(
        self, *, by: Literal["model", "account", "day"] = "model", account_id: str | None = None
    ) -> list[Row]:
        return await self._rows("usage_by", p_by=by, p_account_id=account_id)

    async def health(self) -> Row:
        return await self._row("health")

    async def _row(self, function: str, **arguments: Any) -> Row:
        row: Row = await self._call(function, arguments)
        return row

    async def _maybe_row(self, function: str, **arguments: Any) -> Row | None:
        row: Row | None = await self._call(function, arguments)
        return row

    async def _rows(self, function: str, **arguments: Any) -> list[Row]:
        rows: list[Row] = await self._call(function, arguments)
        return rows


def _request_arguments(record: RequestRecord) -> dict[str, Any]:
    return {"p_request": record.document, "p_artifacts": [_artifact_document(a) for a in record.artifacts]}


def _artifact_document(artifact: Artifact) -> dict[str, Any]:
    return {
        "artifact_id": artifact.artifact_id,
        "name": artifact.name,
        "media_type": artifact.media_type,
        "content": base64.b64encode(artifact.content).decode(),
    }


def _submitted(answer: dict[str, Any]) -> Submitted:
    return Submitted(
        answer["conversation_id"],
        answer["turn"],
        answer["created"],
        answer["status"],
        answer["queue"],
        answer["decisions"],
    )
