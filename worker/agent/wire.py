"""From stored messages to what a provider is sent. Quirks of providers live here, those that litellm leaves broken.

The stored history is never changed: a message that needs no change is passed on as the same object, any other as a
copy. Kept as they are: reasoning, signatures, and every key that is not ours.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shared.history import ARTIFACT_SCHEME, Message
from worker.agent.base import ArtifactAccess

PRIVATE_PREFIX: Final = "tk_"  # keys of messages and calls with this start are ours, whatever they mean
PRIVATE_KEYS: Final = frozenset({"pending_approval"})  # HolmesGPT's, in imported histories
IMAGE_GONE: Final = "[An image stood here. It is no longer available.]"
ID_CHARACTERS: Final = 64
NAME_CHARACTERS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]+")
IMAGES_BELOW: Final = "[The images of this result are in the next message.]"
IMAGES_OF: Final = "Images of the tool results above:"


def to_wire(messages: Sequence[Message], *, images: Mapping[str, str]) -> list[Message]:
    """The messages as an OpenAI-format provider takes them.

    ``images``: artifact reference (``artifact:<id>;<media type>``) to data URL, see ``load_images``; a reference
    that is not in it becomes a note.
    """
    wire: list[Message] = []
    moved: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if role == "tool" and len(str(message.get("tool_call_id", ""))) > ID_CHARACTERS:
            message = {**message, "tool_call_id": _alias(str(message["tool_call_id"]))}
        if moved and role != "tool":
            wire.append(_images_message(moved))
            moved = []
        if role == "assistant":
            wire.append(_assistant(message))
        elif isinstance(content := message.get("content"), list):
            parts = [_part(part, images) for part in content]
            if role == "tool":
                moved += [part for part in parts if part.get("type") == "image_url"]
                wire.append({**_public(message), "content": _texts(parts)})
            else:
                wire.append({**_public(message), "content": parts})
        else:
            wire.append(_public(message))
    if moved:
        wire.append(_images_message(moved))
    return wire


async def load_images(
    messages: Sequence[Message], artifacts: ArtifactAccess | None, loaded: dict[str, str]
) -> Mapping[str, str]:
    """The ``images`` of ``to_wire``: every artifact that the messages refer to and that still exists.

    ``loaded``: those of earlier calls of the same turn; what is new is fetched at once and added to it.
    """
    new = [r for r in dict.fromkeys(image_references(messages)) if r not in loaded]
    if new and artifacts is not None:
        contents = await asyncio.gather(*(artifacts.get(_artifact(reference)[0]) for reference in new))
        for reference, content in zip(new, contents, strict=True):
            if content is not None:
                encoded = base64.b64encode(content).decode()
                loaded[reference] = f"data:{_artifact(reference)[1]};base64,{encoded}"
    return loaded


def _artifact(reference: str) -> tuple[str, str]:
    """Id and media type of an artifact reference."""
    identifier, _, media_type = reference.removeprefix(ARTIFACT_SCHEME).partition(";")
    return identifier, media_type or "image/png"


def image_references(messages: Sequence[Message]) -> Iterator[str]:
    """Every artifact reference in the messages, in order, repeats included."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            url = _url(part)
            if url.startswith(ARTIFACT_SCHEME):
                yield url


def _assistant(message: Message) -> Message:
    """Calls with valid JSON arguments, no empty list of calls, no blank text beside calls."""
    wire = dict(_public(message))
    calls = wire.pop("tool_calls", None)
    if calls:
        wire["tool_calls"] = [_call(call) for call in calls]
    content = wire.get("content")
    if content is None or (isinstance(content, str) and not content.strip()):
        # Bedrock refuses blank text and OpenAI an assistant message with neither text nor calls.
        wire["content"] = None if calls else "(no text)"
    return wire


def _call(call: dict[str, Any]) -> dict[str, Any]:
    wire, function = _public(call), call.get("function")
    identifier = call.get("id")
    if isinstance(identifier, str) and len(identifier) > ID_CHARACTERS:
        wire = {**wire, "id": _alias(identifier)}
    if not isinstance(function, dict):
        return wire
    name, arguments = _name(function.get("name")), _arguments(function.get("arguments"))
    if arguments is function.get("arguments") and name is function.get("name"):
        return wire
    return {**wire, "function": {**function, "name": name, "arguments": arguments}}


def _alias(identifier: str) -> str:
    """A call's id of a length that every provider takes; the same for the call and its result."""
    return f"call_{hashlib.sha256(identifier.encode()).hexdigest()[:32]}"


def _name(name: Any) -> Any:
    """A tool's name as providers take it (1 to 64 of ``A-Z a-z 0-9 _ -``): models invent others, and one such name in
    the history would have every later request refused."""
    if not isinstance(name, str) or _NAME.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{_NOT_IN_NAMES.sub('_', name)[: NAME_CHARACTERS - 9]}_{digest}"


def _arguments(value: Any) -> str:
    """The arguments as a JSON object in a string; text that is none goes along as one, so that the model sees it."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str) or not value.strip():
        return "{}"
    return value if _is_object(value) else json.dumps({"invalid_arguments": value}, ensure_ascii=False)


@functools.lru_cache(maxsize=4_096)
def _is_object(text: str) -> bool:
    """Cached: every call of a history goes to the provider again at every step."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _public(value: dict[str, Any]) -> dict[str, Any]:
    if not any(_is_private(key) for key in value):
        return value
    return {key: item for key, item in value.items() if not _is_private(key)}


def _is_private(key: str) -> bool:
    return key.startswith(PRIVATE_PREFIX) or key in PRIVATE_KEYS


def _part(part: Any, images: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(part, dict):
        return {"type": "text", "text": str(part)}
    url = _url(part)
    if not url.startswith(ARTIFACT_SCHEME):
        return part
    if url not in images:
        return {"type": "text", "text": IMAGE_GONE}
    return {**part, "image_url": {**part["image_url"], "url": images[url]}}


def _url(part: Any) -> str:
    image = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
    return str(image.get("url", "")) if isinstance(image, dict) else ""


def _texts(parts: Sequence[dict[str, Any]]) -> str:
    texts = [str(part["text"]) for part in parts if part.get("type") == "text" and part.get("text")]
    if any(part.get("type") == "image_url" for part in parts):
        texts.append(IMAGES_BELOW)
    return "\n".join(texts)


def _images_message(parts: list[dict[str, Any]]) -> Message:
    """OpenAI-style endpoints refuse images in tool messages, so they follow in a message of the user's."""
    return {"role": "user", "content": [{"type": "text", "text": IMAGES_OF}, *parts]}
