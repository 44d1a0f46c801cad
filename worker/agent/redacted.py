"""Redaction where tools and models speak: what they say is redacted once, before anything keeps, cuts or shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from shared.redaction import Redactor
from worker.agent.base import ArtifactAccess, Delta, ToolResult
from worker.agent.tools.results import SUMMARY_KEYS

_TEXT_TYPES: Final = ("json", "xml", "yaml", "csv", "javascript", "x-sh")


def redacted_result(redactor: Redactor, result: ToolResult, arguments: dict[str, Any]) -> ToolResult:
    """A call's result without secrets; of its ``data`` only what summaries are made of is looked at, and kept."""
    content, data = redactor.quoting(arguments, result.content), result.data
    if isinstance(data, dict):
        kept = redactor.value({key: data[key] for key in SUMMARY_KEYS if key in data})
        data = {key: redactor.quoting(arguments, item) if isinstance(item, str) else item for key, item in kept.items()}
    return ToolResult(result.status, content, data, result.images)


class RedactedArtifacts:
    """A tool's access to its artifacts, where text is stored redacted. What is no text is stored as it is."""

    def __init__(self, artifacts: ArtifactAccess, redactor: Redactor) -> None:
        self._artifacts, self._redactor = artifacts, redactor

    async def put(self, name: str, media_type: str, content: bytes) -> str:
        if media_type.startswith("text/") or any(kind in media_type for kind in _TEXT_TYPES):
            text = content.decode("utf-8", "surrogateescape")
            content = self._redactor.output(text).encode("utf-8", "surrogateescape")
        return await self._artifacts.put(name, media_type, content)

    async def get(self, artifact_id: str) -> bytes | None:
        return await self._artifacts.get(artifact_id)


class RedactedDeltas:
    """A streamed answer on its way to those who watch. ``end`` shows what was held back, ``cut`` what is harmless of
    it where the answer was broken off."""

    def __init__(self, redactor: Redactor, show: Callable[[Delta], None]) -> None:
        self._text, self._reasoning, self._show = redactor.stream(), redactor.stream(), show

    def __call__(self, delta: Delta) -> None:
        text = self._text.feed(delta.text.replace("\0", ""))  # as what is stored has none
        self._put(text, self._reasoning.feed(delta.reasoning.replace("\0", "")))

    def end(self) -> None:
        self._put(self._text.end(), self._reasoning.end())

    def cut(self) -> None:
        self._put(self._text.cut(), self._reasoning.cut())

    def _put(self, text: str, reasoning: str) -> None:
        if text or reasoning:
            self._show(Delta(text, reasoning))
