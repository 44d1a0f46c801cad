"""A laboratory with tools that tell what they did, and that wait when a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent import Lab, lab_in
from worker.agent.base import ToolContext
from worker.agent.tools import tool


class Tools:
    """What ran, in order; ``on`` lets a test take part in a call by the tool's name."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.ended: list[str] = []
        self.keys: list[str] = []
        self.on: dict[str, Callable[[str], Awaitable[None]]] = {}

    async def run(self, name: str, argument: str, context: ToolContext) -> str:
        self.ran.append(f"{name} {argument}")
        self.keys.append(context.idempotency_key)
        if name in self.on:
            await self.on[name](argument)
        self.ended.append(f"{name} {argument}")
        return f"{name} {argument}: ok"

    def hold(self, name: str) -> tuple[asyncio.Event, asyncio.Event]:
        """The next call of that tool sets the first event and waits for the second."""
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def wait(_: str) -> None:
            begun.set()
            await go_on.wait()

        self.on[name] = wait
        return begun, go_on

    def functions(self) -> list[Callable[..., Any]]:
        @tool(risk="read_only")
        async def look(pod: str, context: ToolContext) -> str:
            """Look at a pod."""
            return await self.run("look", pod, context)

        @tool(risk="side_effect")
        async def restart(name: str, context: ToolContext) -> str:
            """Restart a deployment; a person decides."""
            return await self.run("restart", name, context)

        @tool(risk="side_effect", approval="never")
        async def notify(text: str, context: ToolContext) -> str:
            """Tell somebody; nobody is asked."""
            return await self.run("notify", text, context)

        @tool(risk="idempotent", approval="never")
        async def label(name: str, context: ToolContext) -> str:
            """Label a pod; twice is once."""
            return await self.run("label", name, context)

        @tool(risk="side_effect", approval="by_rule")
        async def drain(node: str, context: ToolContext) -> str:
            """Drain a node."""
            return await self.run("drain", node, context)

        @tool(risk="read_only")
        async def clusters() -> str:
            """List the clusters."""
            return "one cluster"

        return [look, restart, notify, label, drain, clusters]


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture
async def lab(tmp_path: Path, tools: Tools) -> AsyncIterator[Lab]:
    async with lab_in(tmp_path, tools.functions()) as lab:
        yield lab
