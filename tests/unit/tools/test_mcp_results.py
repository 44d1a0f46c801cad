"""Names, risks and answers of MCP tools."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
    ToolAnnotations,
)

from shared.errors import StoreUnavailable, ToolDefinitionError
from tests.support.tools import MemoryArtifacts
from worker.agent.base import ToolResult
from worker.agent.tools.config import McpServerOptions
from worker.agent.tools.mcp_results import public_name, result_of_answer, risk_of, spec_of

OPTIONS = McpServerOptions(command="x")


def test_plain_names_are_joined() -> None:
    assert public_name("kube", "get_pods") == "kube__get_pods"


@given(st.text(max_size=200), st.text(max_size=200))
def test_names_are_what_providers_take_and_stay_apart(first: str, second: str) -> None:
    names = [public_name("srv", tool) for tool in (first, second)]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in names)
    assert (names[0] == names[1]) == (first == second)


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        (None, ("side_effect", "always")),
        ({}, ("side_effect", "always")),
        ({"read_only_hint": False}, ("side_effect", "always")),
        ({"read_only_hint": True, "destructive_hint": True}, ("read_only", "never")),
        ({"idempotent_hint": True}, ("idempotent", "always")),
        ({"idempotent_hint": True, "destructive_hint": True}, ("idempotent", "always")),
        ({"idempotent_hint": True, "destructive_hint": False}, ("idempotent", "never")),
        ({"destructive_hint": False}, ("side_effect", "always")),
    ],
)
def test_annotations(hints: dict[str, bool] | None, expected: tuple[str, str]) -> None:
    annotations = ToolAnnotations(**hints) if hints is not None else None
    assert risk_of(Tool(name="t", input_schema={"type": "object"}, annotations=annotations)) == expected


def test_a_bad_definition_names_the_tool() -> None:
    tool = Tool(name="t", input_schema={"type": "object", "anyOf": [{}]})
    with pytest.raises(ToolDefinitionError, match="srv__t"):
        spec_of("srv", tool, OPTIONS)


async def test_every_kind_of_content_is_told_of() -> None:
    answer = CallToolResult(
        content=[
            TextContent(text="hello"),
            EmbeddedResource(resource=TextResourceContents(uri="file:///a", text="inner")),
            EmbeddedResource(resource=BlobResourceContents(uri="file:///b", blob="AAAA")),
            ResourceLink(uri="file:///c", name="c"),
            AudioContent(data="AAAA", mime_type="audio/wav"),
            ImageContent(data="not base64!", mime_type="image/png"),
        ]
    )
    result = await result_of_answer(answer, MemoryArtifacts())
    assert result.content.split("\n") == [
        "hello",
        "inner",
        "[a binary resource: file:///b]",
        "[a resource: file:///c]",
        "[a sound (audio/wav) that was left out]",
        "[an image (image/png) that is not valid base64]",
    ]


async def test_structured_content_is_data_and_text_where_there_is_none() -> None:
    answer = CallToolResult(content=[], structured_content={"count": 2}, is_error=True)
    assert await result_of_answer(answer, None) == ToolResult("failed", '{"count":2}', {"count": 2})
    nothing = await result_of_answer(CallToolResult(content=[]), None)
    assert (nothing.status, nothing.content) == ("done", "Done; the tool returned nothing.")


async def test_a_picture_that_cannot_be_stored_does_not_undo_the_call() -> None:
    class Down(MemoryArtifacts):
        async def put(self, name: str, media_type: str, content: bytes) -> str:
            raise StoreUnavailable("The store is down.")

    answer = CallToolResult(content=[ImageContent(data="AAAA", mime_type="image/png")])
    result = await result_of_answer(answer, Down())
    assert result.status == "done"
    assert "store_unavailable" in result.content
