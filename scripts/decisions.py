"""From ``turnkeeper decide``'s options to decisions, with the tokens looked up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from scripts.render import counted
from shared.errors import RequestInvalid
from shared.requests import Remember
from worker.agent.tools.rules import unwanted_prefix, wrong_prefix

Row = dict[str, Any]

ALL = "all"
_FORM = "--remember SCOPE:PREFIX, such as --remember 'conversation:kubectl get' (scope: conversation, user or account)"


@dataclass(frozen=True, slots=True)
class Choice:
    """What the person typed. ``feedback``: one for all denials, or one for each in order. ``remember``: a scope, with
    an optional prefix behind a colon."""

    approve: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    feedback: tuple[str, ...] = ()
    file: Path | None = None
    remember: str | None = None

    def decisions(self, pending: Sequence[Row]) -> list[Row]:
        """Decisions on ``pending`` (entries of an approval event). Raises ``RequestInvalid`` if one names another."""
        wanted = self._of_file() if self.file is not None else self._of_options(pending)
        if not wanted:
            raise RequestInvalid(
                "Nothing was decided: name a call with --approve or --deny, or give a --file.",
                hint=_waiting(pending),
            )
        decided: list[Row] = []
        for decision in wanted:
            matching = [p for p in pending if p["tool_call_id"] == decision["tool_call_id"]]
            if not matching:
                raise RequestInvalid(
                    f"No call waits under the id {decision['tool_call_id']!r}; nothing was decided.",
                    hint=_waiting(pending),
                )
            decided.extend({"approval_token": p["approval_token"], **decision} for p in matching)
        return decided

    def _of_options(self, pending: Sequence[Row]) -> list[Row]:
        deny = _named(self.deny, pending)
        if len(self.feedback) not in (0, min(1, len(deny)), len(deny)):
            raise RequestInvalid(
                f"{len(self.feedback)} --feedback for {counted(len(deny), 'denied call')}; nothing was decided.",
                hint="Give one for all of them, or one for each in order.",
            )
        words = self.feedback if len(self.feedback) == len(deny) else self.feedback * len(deny)
        remember = self._remembered()
        chosen = [p for p in pending if p["tool_call_id"] in _named(self.approve, pending)]
        if remember:
            _check_rule(remember["remember"], chosen)
        approved = [{"tool_call_id": i, "approved": True, **remember} for i in _named(self.approve, pending)]
        denied: list[Row] = [{"tool_call_id": i, "approved": False} for i in deny]
        for decision, feedback in zip(denied, words, strict=False):
            decision["feedback"] = feedback
        return [*approved, *denied]

    def _remembered(self) -> Row:
        if self.remember is None:
            return {}
        scope, _, prefix = self.remember.partition(":")
        if scope not in get_args(Remember.model_fields["scope"].annotation):
            raise RequestInvalid(
                f"--remember: {scope!r} is no scope; nothing was decided.", hint=f"The form is {_FORM}."
            )
        return {"remember": {"scope": scope, **({"prefix": prefix} if prefix else {})}}

    def _of_file(self) -> list[Row]:
        assert self.file is not None
        try:
            value = json.loads(self.file.read_text())
        except (ValueError, OSError) as error:
            raise RequestInvalid(f"{self.file} cannot be read as JSON: {error}; nothing was decided.") from None
        entries = value if isinstance(value, list) else [value]
        if not all(isinstance(e, dict) and isinstance(e.get("tool_call_id"), str) for e in entries):
            raise RequestInvalid(f"{self.file} is not a list of decisions with a tool_call_id; nothing was decided.")
        return entries


def _check_rule(remember: Row, approved: Sequence[Row]) -> None:
    """A rule that would never decide anything is not recorded."""
    prefix = remember.get("prefix")
    for call in approved:
        name = call["tool_name"]
        if not call.get("can_remember"):
            raise RequestInvalid(
                f"--remember has no effect on {name}, which asks every time; nothing was decided.",
                hint="Approve it without --remember, or set its approval to by_rule in the tools file.",
            )
        if call.get("remember_needs_prefix"):
            if wrong := wrong_prefix(name, prefix):
                raise RequestInvalid(f"{wrong} Nothing was decided.", hint=f"The form is {_FORM}.")
        elif prefix is not None:
            raise RequestInvalid(f"{unwanted_prefix(name)} Nothing was decided.", hint="Leave out the colon's rest.")


def _named(identifiers: Sequence[str], pending: Sequence[Row]) -> list[str]:
    if ALL in identifiers:
        return list(dict.fromkeys(p["tool_call_id"] for p in pending))
    return list(identifiers)


def _waiting(pending: Sequence[Row]) -> str:
    if not pending:
        return "Nothing waits for a decision in this conversation."
    return "Waiting: " + ", ".join(f"{p['tool_call_id']} ({p['tool_name']})" for p in pending) + "."
