"""What the loop knows of models and tools: two small Protocols and their values. No library of either is named here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shared.events import Risk
from shared.history import Message

ApprovalPolicy = Literal["always", "never", "by_rule"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and cost (US dollars) of a model call; a failed stream's part counts too."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.cost_usd + other.cost_usd,
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "cost_usd": self.cost_usd,
        }


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model call. ``messages`` are stored messages with the system message first; ``deadline`` is on the loop's
    clock (``loop.time()``). ``images``: artifact reference in the messages to data URL (``wire.load_images``)."""

    model: str
    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    response_format: dict[str, Any] | None = None
    deadline: float | None = None
    images: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelReply:
    """The assistant message as the provider sent it (unknown keys kept, tool-call arguments as received), and what it
    cost. ``finish_reason`` is the provider's word."""

    message: Message
    usage: Usage
    finish_reason: str
    model: str
    provider: str


@dataclass(frozen=True, slots=True)
class Delta:
    """A visible piece of the answer: ``text``, or ``reasoning``."""

    text: str = ""
    reasoning: str = ""


class ChatModel(Protocol):
    """A model behind an API. Retries are its own, and only before the first visible delta."""

    async def complete(self, request: ModelRequest, on_delta: Callable[[Delta], None]) -> ModelReply:
        """One answer. Raises the ``ModelError`` tree; an error carries ``details["usage"]`` (a ``Usage`` dict) if
        something was spent."""
        ...

    async def close(self) -> None: ...


class ArtifactAccess(Protocol):
    """A tool's view of the artifacts of its conversation, and of no other."""

    async def put(self, name: str, media_type: str, content: bytes) -> str:
        """Store bytes; their artifact id."""
        ...

    async def get(self, artifact_id: str) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may know about its call. ``idempotency_key`` is the same whenever this very call runs again;
    ``deadline`` is on the loop's clock."""

    conversation_id: str
    account_id: str
    user_id: str | None
    turn: int
    step: int
    call_index: int
    tool_call_id: str
    idempotency_key: str
    deadline: float
    artifacts: ArtifactAccess | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call came to. ``status``: ``done``; ``failed`` (it said so, or it raised); ``unknown`` (it was cut off by
    its timeout and may have had its effect). ``content`` is what the model reads; ``data`` the object it came from,
    for summaries; ``images`` are artifact references of pictures that belong to it."""

    status: Literal["done", "failed", "unknown"]
    content: str
    data: Any = None
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What is known of a tool before it runs. ``parameters`` is a checked JSON Schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]
    risk: Risk = "side_effect"
    approval: ApprovalPolicy = "always"
    timeout_seconds: float | None = None
    source: str = "python"

    def for_model(self) -> dict[str, Any]:
        """The tool in the form of the chat completions API."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


class Toolbox(Protocol):
    """The tools of a worker."""

    def specs(self) -> Sequence[ToolSpec]: ...

    def get(self, name: str) -> ToolSpec | None: ...

    def invalid(self, name: str, arguments: dict[str, Any]) -> str | None:
        """What is wrong with the arguments, in one line for the model, or None."""
        ...

    def decided_by_policy(self, name: str, arguments: dict[str, Any], rules: Sequence[Mapping[str, Any]]) -> str | None:
        """None: ask a person. Else who decided instead, such as ``policy:read_only`` or ``rule:17``."""
        ...

    async def call(self, name: str, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """Run a tool within its timeout. Raises nothing but cancellation: failures are results."""
        ...

    async def close(self) -> None: ...
