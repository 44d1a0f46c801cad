"""Imported by the process that workers are forked from: litellm, with what it imports at its first call only."""

import asyncio

from worker.agent.model import import_litellm


async def _first_call() -> None:
    """Answered by litellm itself: no connection, no thread."""
    message = {"role": "user", "content": "Hello"}
    answer = await import_litellm().acompletion(
        model="openai/any", messages=[message], mock_response="Hello", stream=True, max_retries=0
    )
    async for _ in answer:
        pass


asyncio.run(_first_call())
