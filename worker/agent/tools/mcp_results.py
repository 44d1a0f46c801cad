"""What an MCP server says about its tools and answers to calls, in our terms. No connection is held here."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Any, Final

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
)

from shared.errors import StoreError
from shared.events import Risk
from worker.agent.base import ApprovalPolicy, ArtifactAccess, ToolResult, ToolSpec
from worker.agent.tools.config import McpServerOptions, ToolOptions
from worker.agent.tools.declare import default_approval
from worker.agent.tools.results import encode
from worker.agent.tools.schema import checked_parameters

_NAME_CHARACTERS: Final = 64
_HASH_CHARACTERS: Final = 8


def public_name(server: str, tool: str) -> str:
    """``server__tool``. Where that is too long or has odd characters it is shortened or rewritten, and a hash of the
    original keeps it apart from others; the same server and tool always get the same name."""
    whole = f"{server}__{tool}"
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", whole)
    if plain == whole and len(plain) <= _NAME_CHARACTERS:
        return plain
    digest = hashlib.sha256(whole.encode()).hexdigest()[:_HASH_CHARACTERS]
    return f"{plain[: _NAME_CHARACTERS - _HASH_CHARACTERS - 1]}_{digest}"


def spec_of(server: str, tool: Tool, options: McpServerOptions) -> ToolSpec:
    """A checked definition. Raises ``ToolDefinitionError``."""
    name = public_name(server, tool.name)
    chosen = options.tools.get(tool.name, ToolOptions())
    hinted, hinted_approval = risk_of(tool) if options.trust_annotations else ("side_effect", "always")
    risk: Risk = chosen.risk or hinted
    approval: ApprovalPolicy = chosen.approval or (default_approval(chosen.risk) if chosen.risk else hinted_approval)
    return ToolSpec(
        name=name,
        description=(tool.description or tool.title or tool.name).strip(),
        parameters=checked_parameters(name, tool.input_schema),
        risk=risk,
        approval=approval,
        timeout_seconds=chosen.timeout_seconds or options.timeout_seconds,
        source=f"mcp:{server}",
    )


def risk_of(tool: Tool) -> tuple[Risk, ApprovalPolicy]:
    """Risk and default approval from the annotations; what is not said is taken at the specification's default, which
    is the worst. An idempotent tool that may destroy is safe to repeat but not to begin: it needs an approval."""
    hints = tool.annotations
    if hints is None:
        return "side_effect", "always"
    if hints.read_only_hint:
        return "read_only", "never"
    if hints.idempotent_hint:
        return "idempotent", "never" if hints.destructive_hint is False else "always"
    return "side_effect", "always"


async def result_of_answer(answer: CallToolResult, artifacts: ArtifactAccess | None) -> ToolResult:
    """Text blocks joined, structured content as data, pictures as artifacts."""
    texts: list[str] = []
    images: list[str] = []
    for block in answer.content:
        if isinstance(block, ImageContent):
            note, reference = await _image(block, artifacts)
            texts.append(note)
            images += [reference] if reference else []
        else:
            texts.append(_text(block))
    data = answer.structured_content
    content = "\n".join(texts) or (encode(data) if data is not None else "Done; the tool returned nothing.")
    return ToolResult("failed" if answer.is_error else "done", content, data, tuple(images))


async def _image(block: ImageContent, artifacts: ArtifactAccess | None) -> tuple[str, str | None]:
    try:
        content = base64.b64decode(block.data, validate=True)
    except binascii.Error:
        return f"[an image ({block.mime_type}) that is not valid base64]", None
    if artifacts is None or not block.mime_type.startswith("image/"):
        return f"[an image ({block.mime_type}, {len(content):,} bytes) that could not be kept]", None
    try:
        identifier = await artifacts.put("image", block.mime_type, content)
    except StoreError as error:  # the call itself has succeeded
        return f"[an image ({block.mime_type}) that could not be stored: {error.code}]", None
    return f"[image {identifier}]", f"artifact:{identifier};{block.mime_type}"


def _text(block: Any) -> str:
    match block:
        case TextContent():
            return block.text
        case EmbeddedResource(resource=BlobResourceContents() as resource):
            return f"[a binary resource: {resource.uri}]"
        case EmbeddedResource(resource=TextResourceContents() as text):
            return text.text
        case ResourceLink():
            return f"[a resource: {block.uri}]"
        case AudioContent():
            return f"[a sound ({block.mime_type}) that was left out]"
        case _:
            return f"[content of type {getattr(block, 'type', 'unknown')} that was left out]"
