"""Every error that Turnkeeper raises on purpose.

::

    TurnkeeperError
    ├── ConfigurationError        a setting, a tool definition or a file is wrong: nothing was started
    │   ├── SchemaOutdated        the database schema is below what this worker needs
    │   └── ToolDefinitionError   a tool that providers would refuse
    ├── RequestRefused            the sender's request is wrong: nothing was recorded
    │   ├── RequestInvalid        it does not have the documented shape
    │   ├── RequestTooLarge       above ``TURNKEEPER_REQUEST_BYTES``
    │   ├── RequestConflict       the same ``request_id`` with other content
    │   ├── IdentityMismatch      it names another owner than the conversation has
    │   ├── ConversationUnknown   there is no such conversation
    │   ├── ApprovalsOpen         ``supersede=false`` and somebody still has to decide
    │   └── NotRetryable          the last turn did not fail, or may not be tried again
    ├── LeaseLost                 another attempt owns the turn: stop, write nothing
    ├── StoreError
    │   ├── StoreUnavailable      unreachable or out of time: the call may or may not have landed
    │   └── ContentRefused        the database refuses what a batch holds
    ├── QueueUnavailable          Redis is unreachable: what was recorded is rung later
    ├── ModelError                the provider's call failed and will not be tried again in this turn
    │   ├── ModelUnavailable      refused, timed out or broke off
    │   ├── RateLimited           429 with a wait that does not fit
    │   ├── ContextTooLong        the messages do not fit the model's window
    │   ├── ModelRequestRejected  the provider refuses the request's shape
    │   └── EmptyAnswer           twice neither text nor a tool call
    ├── TurnFailed                the turn ended without an answer; what was done is kept
    │   ├── ApprovalStale         the calls that a decision is about are not waiting any more
    │   ├── AccountBudget         the account has spent what it may in a day
    │   ├── StepLimit             ``max_steps`` model calls did not lead to an answer
    │   ├── TurnBudget            the turn has used its tokens or its money
    │   └── TurnTimeout           the turn's or the job's time is over
    └── ToolError                 a tool failed; becomes the call's result

``code`` is stable and is what programs match; ``description`` says what happened and what was not done;
``hint`` says what to do next. Texts may change.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TurnkeeperError(Exception):
    """Base of the tree. ``retryable``: the same thing may succeed later without a change."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, description: str, *, hint: str = "", **details: Any) -> None:
        if description.endswith("..") and not description.endswith("..."):
            description = description[:-1]  # it ends with words of others, which ended a sentence themselves
        super().__init__(description)
        self.description = description
        self.hint = hint
        self.details = details

    def __str__(self) -> str:
        return f"{self.description} {self.hint}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """The shape of ``conversation_turns.error`` and of an ``error`` event's data."""
        out: dict[str, Any] = {"code": self.code, "description": self.description, "retryable": self.retryable}
        if self.hint:
            out["hint"] = self.hint
        if self.details:
            out["details"] = self.details
        return out


class ConfigurationError(TurnkeeperError):
    code = "configuration"


class SchemaOutdated(ConfigurationError):
    code = "schema_outdated"


class ToolDefinitionError(ConfigurationError):
    code = "tool_definition"


class RequestRefused(TurnkeeperError):
    code = "request_refused"


class RequestInvalid(RequestRefused):
    code = "request_invalid"


class RequestTooLarge(RequestRefused):
    code = "request_too_large"


class RequestConflict(RequestRefused):
    code = "request_conflict"


class IdentityMismatch(RequestRefused):
    code = "identity_mismatch"


class ConversationUnknown(RequestRefused):
    code = "conversation_unknown"


class ApprovalsOpen(RequestRefused):
    code = "approvals_open"


class NotRetryable(RequestRefused):
    code = "not_retryable"


class LeaseLost(TurnkeeperError):
    code = "lease_lost"


class StoreError(TurnkeeperError):
    code = "store"


class StoreUnavailable(StoreError):
    code = "store_unavailable"
    retryable = True


class ContentRefused(StoreError):
    code = "content_refused"


class QueueUnavailable(TurnkeeperError):
    code = "queue_unavailable"
    retryable = True


class ModelError(TurnkeeperError):
    code = "model_error"
    retryable = True


class ModelUnavailable(ModelError):
    code = "model_unavailable"


class RateLimited(ModelError):
    """``details["retry_after_seconds"]``: the provider's latest word, or None."""

    code = "rate_limited"


class ContextTooLong(ModelError):
    code = "context_too_long"
    retryable = False


class ModelRequestRejected(ModelError):
    code = "model_request_rejected"
    retryable = False


class EmptyAnswer(ModelError):
    code = "empty_answer"


class TurnFailed(TurnkeeperError):
    code = "turn_failed"


class ApprovalStale(TurnFailed):
    code = "approval_stale"


class AccountBudget(TurnFailed):
    code = "account_budget"
    retryable = True


class StepLimit(TurnFailed):
    code = "step_limit"
    retryable = True


class TurnBudget(TurnFailed):
    code = "turn_budget"
    retryable = True


class TurnTimeout(TurnFailed):
    code = "turn_timeout"
    retryable = True


class ToolError(TurnkeeperError):
    code = "tool_error"


def _tree(root: type[TurnkeeperError]) -> dict[str, type[TurnkeeperError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[TurnkeeperError]] = _tree(TurnkeeperError)
"""Stable code to class, for stores that receive a code over the wire."""


def from_code(code: str, description: str, **details: Any) -> TurnkeeperError:
    """The error of that code; an unknown code becomes a ``StoreError`` that names it."""
    kind = BY_CODE.get(code)
    if kind is None:
        return StoreError(f"{code}: {description}", **details)
    return kind(description, **details)
