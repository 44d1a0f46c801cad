"""What tests of tools share: a call's context, artifacts in memory, and waiting for what another process does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from worker.agent.base import ToolContext


class MemoryArtifacts:
    """The artifacts of one conversation; ids count up from ``a1``. ``media_types`` and ``contents`` go by id."""

    def __init__(self, **contents: bytes) -> None:
        self.contents = dict(contents)
        self.media_types: dict[str, str] = {}

    async def put(self, name: str, media_type: str, content: bytes) -> str:
        artifact_id = f"a{len(self.contents) + 1}"
        self.contents[artifact_id] = content
        self.media_types[artifact_id] = media_type
        return artifact_id

    async def get(self, artifact_id: str) -> bytes | None:
        return self.contents.get(artifact_id)


def tool_context(seconds: float = 30, artifacts: MemoryArtifacts | None = None) -> ToolContext:
    """The context of a call that has ``seconds`` left."""
    deadline = asyncio.get_running_loop().time() + seconds
    return ToolContext("conv", "acc", "user", 1, 2, 3, "id", "conv:1:2:3", deadline, artifacts)


async def until(condition: Callable[[], bool], seconds: float = 15) -> None:
    """Wait for what no event tells: the state of another process."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)
