"""Fixture ``llm``: a scripted, strict, OpenAI-compatible server, and an environment that points at it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.bench.kit.llm_server import Call, Gate, LlmServer, Reply, Request, error

__all__ = ["Call", "Gate", "LlmServer", "Reply", "Request", "error", "llm"]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LlmServer]:
    """A server of the test's own. At the end no request may have broken a rule, unless the test cleared the list
    (``llm.violations.clear()``) after looking at it."""
    with LlmServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
    assert server.violations == []
