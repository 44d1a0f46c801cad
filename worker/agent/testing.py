"""A ``ChatModel`` for tests and measurements: in this process, without litellm."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from shared.history import Message
from worker.agent.base import Delta, ModelReply, ModelRequest
from worker.agent.scripted import PROVIDER, Script, ScriptedCall, ScriptedReply, pieces


class ScriptedModel:
    """Answers with the next of its replies, or with what a function makes of the messages.

    A text is a reply of that text; an exception is raised. ``requests`` holds every call; more calls than replies is
    an ``AssertionError``.
    """

    def __init__(self, replies: Iterable[ScriptedReply | str | Exception] | Script) -> None:
        self.requests: list[ModelRequest] = []
        self._script = replies if callable(replies) else None
        self._replies = deque(() if callable(replies) else replies)

    async def complete(self, request: ModelRequest, on_delta: Callable[[Delta], None]) -> ModelReply:
        self.requests.append(request)
        reply = self._next(request)
        if reply.reasoning:
            on_delta(Delta(reasoning=reply.reasoning))
        async for piece in pieces(reply):
            on_delta(Delta(piece))
        return ModelReply(_message(reply), reply.usage, reply.finish_reason, request.model, PROVIDER)

    async def close(self) -> None:
        """Nothing is open."""

    def _next(self, request: ModelRequest) -> ScriptedReply:
        if self._script is not None:
            return self._script(ScriptedCall(request.messages, request.tools))
        if not self._replies:
            raise AssertionError(f"The model was called {len(self.requests)} times, which is more than it has replies.")
        reply = self._replies.popleft()
        if isinstance(reply, Exception):
            raise reply
        return ScriptedReply(reply) if isinstance(reply, str) else reply


def _message(reply: ScriptedReply) -> Message:
    message: Message = {"role": "assistant", "content": reply.text or None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [call.as_dict() for call in reply.tool_calls]
    return message
