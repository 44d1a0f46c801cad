"""The ledger: what is known of the turn's open calls, as rows of ``tool_calls`` kept in step with what is emitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.events import CallState, NewCall, Risk
from shared.history import OpenCall

CallKey = tuple[int, int, int]  # turn, step, call_index


@dataclass(slots=True)
class Call:
    """One row. ``key`` is None for a call that no row knows (an imported history): it can only be closed."""

    key: CallKey | None
    tool_call_id: str
    tool_name: str
    arguments: str
    arguments_digest: str
    risk: Risk
    kind: str
    gated: bool
    state: CallState
    decided_turn: int | None = None
    decided_by: str | None = None
    decision: dict[str, Any] | None = None
    expires_at: str | None = None
    reason: str | None = None

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Call:
        return cls(
            (row["turn"], row["step"], row["call_index"]),
            row["tool_call_id"],
            row["tool_name"],
            row["arguments"],
            row["arguments_digest"],
            row["risk"],
            row["kind"],
            row["gated"],
            row["state"],
            row["decided_turn"],
            row["decided_by"],
            row["decision"],
            row["expires_at"],
            row["reason"],
        )

    @classmethod
    def of_new(cls, turn: int, new: NewCall) -> Call:
        return cls(
            (turn, new["step"], new["call_index"]),
            new["tool_call_id"],
            new["tool_name"],
            new["arguments"],
            new["arguments_digest"],
            new["risk"],
            new["kind"],
            new["gated"],
            new["state"],
            decided_by=new["decided_by"],
            reason=new["reason"],
        )

    @classmethod
    def unrecorded(cls, open_call: OpenCall) -> Call:
        function = open_call.call.get("function") or {}
        return cls(
            None,
            open_call.tool_call_id,
            str(function.get("name", "")),
            str(function.get("arguments", "")),
            "",
            "side_effect",
            "tool",
            False,
            "unknown",
        )

    def waits_in(self, turn: int) -> bool:
        """Nothing to do for it in ``turn``: nobody decided, or only a later turn did."""
        if self.state == "pending":
            return True
        return (self.gated or self.kind == "frontend") and (self.decided_turn or 0) > turn


class Ledger:
    """Rows without a result, found by the open calls of a history."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._calls = [Call.of_row(row) for row in rows]

    def add(self, turn: int, new_calls: Iterable[NewCall]) -> None:
        self._calls.extend(Call.of_new(turn, new) for new in new_calls)

    def closed(self, call: Call) -> None:
        """The call has its result."""
        self._calls.remove(call)

    def decided_in(self, turn: int) -> bool:
        return any(call.decided_turn == turn for call in self._calls)

    def match(self, open_calls: Sequence[OpenCall]) -> list[Call]:
        """The row of each open call. Ids repeat across turns, so the latest call takes the latest row."""
        unused = sorted((c for c in self._calls if c.key is not None), key=lambda c: c.key or (0, 0, 0))
        found: list[Call] = []
        for open_call in reversed(open_calls):
            position = next(
                (
                    index
                    for index in range(len(unused) - 1, -1, -1)
                    if unused[index].tool_call_id == open_call.tool_call_id
                    and (unused[index].key or (0, 0, -1))[2] == open_call.call_index
                ),
                None,
            )
            found.append(Call.unrecorded(open_call) if position is None else unused.pop(position))
        return found[::-1]
