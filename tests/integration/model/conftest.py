"""The product's model, on the real litellm, pointed at the scripted server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from scripts.bench.kit.llm_server import MODEL, LlmServer
from shared.settings import load_settings
from worker.agent.base import Delta, ModelReply, ModelRequest
from worker.agent.model import LitellmModel

TOOL = {
    "type": "function",
    "function": {"name": "logs", "description": "Read logs", "parameters": {"type": "object", "properties": {}}},
}


@dataclass
class Asker:
    """Asks the model, and keeps what was shown."""

    model: LitellmModel
    shown: list[Delta] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.shown)

    async def __call__(
        self,
        *history: dict[str, Any],
        model: str = f"openai/{MODEL}",
        listener: Callable[[Delta], None] | None = None,
        **more: Any,
    ) -> ModelReply:
        messages = history or ({"role": "user", "content": "why is web down?"},)
        request = ModelRequest(model, messages, **{"tools": [TOOL], **more})
        return await self.model.complete(request, listener or self.shown.append)


@pytest.fixture
async def asker(llm: LlmServer) -> AsyncIterator[Callable[..., Asker]]:
    """Makes askers; keyword arguments are settings. Retries do not wait for long in these tests' errors."""
    made: list[LitellmModel] = []

    def make(**settings: Any) -> Asker:
        made.append(LitellmModel(load_settings(**settings)))
        return Asker(made[-1])

    yield make
    for model in made:
        await model.close()


@pytest.fixture
def ask(asker: Callable[..., Asker]) -> Asker:
    return asker()
