"""Requests: what a producer asks for, checked once, and the record that the store keeps of it.

``Ask``, ``ToolDecisions`` and ``Retry`` are frozen models that refuse unknown fields. ``record_of`` turns one into
the JSON document that every store takes: cleaned, sized, with identifiers filled in, images moved to artifacts, and
approval tokens replaced by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from shared.clean import MAX_DEPTH, clean, too_deep
from shared.errors import RequestInvalid, RequestTooLarge

if TYPE_CHECKING:
    from shared.redaction import Redactor

SCHEMA_VERSION = 1
TITLE_CHARACTERS = 80
MAX_IDENTIFIER = 200  # characters
MAX_ENTRIES = 256  # decisions, results, tools or images of one request
_NAMESPACE = uuid.UUID("6b1f3c1e-2f4b-5b7e-9a55-6a1b0a4f7a11")

Identifier = Annotated[str, Field(min_length=1, max_length=MAX_IDENTIFIER)]
Position = Annotated[int, Field(ge=0, lt=2**31)]
Queue = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Target(_Model):
    """What the conversation is about: a host, or a place in a Kubernetes cluster."""

    mode: Literal["host", "kubernetes"]
    server_id: str | None = None
    server_name: str | None = None
    server_host: str | None = None
    cluster_id: str | None = None
    cluster_name: str | None = None
    namespace: str | None = None
    pod: str | None = None
    container: str | None = None

    @property
    def target_id(self) -> str:
        """Mode and server, or mode, cluster and namespace: equal for targets that share memories."""
        if self.mode == "host":
            parts = [self.mode, self.server_id or self.server_name or self.server_host or ""]
        else:
            parts = [self.mode, self.cluster_id or self.cluster_name or "", self.namespace or ""]
        return "/".join(parts)


class Image(_Model):
    """A picture in a question: by ``url``, or as base64 ``data`` that is stored as an artifact."""

    url: str | None = Field(None, pattern=r"^(https?://|data:image/)")
    data: str | None = Field(None, repr=False)
    media_type: str = Field("image/png", pattern=r"^image/[A-Za-z0-9.+-]+$")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.url is None) == (self.data is None):
            raise ValueError("an image has either url or data")
        return self


class Remember(_Model):
    """ "Don't ask again": calls of the same tool that the rule matches need no decision within the scope.

    ``prefix`` is required for tools that approve by rule, such as ``shell``; it is matched by whole words.
    """

    scope: Literal["conversation", "user", "account"] = "conversation"
    prefix: str | None = Field(None, min_length=1, max_length=1_000)


class Decision(_Model):
    """A person's word on one gated call. ``approval_token`` comes from the approval event."""

    tool_call_id: str = Field(min_length=1, max_length=1_000)
    approved: StrictBool
    feedback: str | None = None
    approval_token: str | None = Field(None, repr=False)
    turn: Position | None = None
    step: Position | None = None
    call_index: Position | None = None
    remember: Remember | None = None

    def contradicts(self, other: Decision) -> bool:
        """Both may be about the same call, and they say different things. Ids repeat, so tokens or keys tell apart."""
        if self == other or self.tool_call_id != other.tool_call_id:
            return False
        if self.approval_token is not None and other.approval_token is not None:
            return self.approval_token == other.approval_token
        keys = [(d.turn, d.step, d.call_index) for d in (self, other)]
        return None in keys[0] or None in keys[1] or keys[0] == keys[1]


class FrontendTool(_Model):
    """A tool that the asking client runs itself: the turn pauses and resumes with its result."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class FrontendResult(_Model):
    """The result of a frontend tool's call; anything but a string is shown to the model as JSON."""

    tool_call_id: str = Field(min_length=1, max_length=1_000)
    content: Any
    is_error: StrictBool = False


class _Request(_Model):
    schema_version: Literal[1] = 1
    conversation_id: uuid.UUID | None = None
    request_id: Identifier | None = None
    account_id: Identifier | None = None
    user_id: Identifier | None = None
    team_id: Identifier | None = None
    queue: Queue | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    tool_decisions: tuple[Decision, ...] = Field((), max_length=MAX_ENTRIES)
    frontend_tools: tuple[FrontendTool, ...] = Field((), max_length=MAX_ENTRIES)
    frontend_tool_results: tuple[FrontendResult, ...] = Field((), max_length=MAX_ENTRIES)
    model: str | None = Field(None, min_length=1)
    target: Target | None = None
    approval_mode: Literal["ask", "deny"] | None = None
    response_format: dict[str, Any] | None = None
    additional_system_prompt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _not_too_deep(cls, value: Any) -> Any:
        if too_deep(value):
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        return value

    @model_validator(mode="after")
    def _decide_once(self) -> Self:
        by_call: dict[str, list[Decision]] = {}
        for decision in self.tool_decisions:
            others = by_call.setdefault(decision.tool_call_id, [])
            if any(decision.contradicts(other) for other in others):
                raise ValueError(f"tool_decisions decides {decision.tool_call_id!r} in two ways")
            others.append(decision)
        ids = [r.tool_call_id for r in self.frontend_tool_results]
        if len(ids) != len(set(ids)):
            raise ValueError("frontend_tool_results answers a call twice")
        return self


class Ask(_Request):
    """A question. It may carry decisions, which are applied first; calls still undecided are then closed.

    ``supersede=False``: refuse instead of closing when somebody still has to decide.
    """

    kind: Literal["ask"] = "ask"
    ask: str = Field(min_length=1)
    images: tuple[Image, ...] = Field((), max_length=MAX_ENTRIES)
    supersede: StrictBool = True


class ToolDecisions(_Request):
    """Decisions or frontend results without a question: the paused turn's work goes on."""

    kind: Literal["tool_decisions"] = "tool_decisions"
    conversation_id: uuid.UUID

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.tool_decisions and not self.frontend_tool_results:
            raise ValueError("tool_decisions and frontend_tool_results are both empty")
        return self


class Retry(_Request):
    """Try the last turn again: it adds no message and goes on from the last one."""

    kind: Literal["retry"] = "retry"
    conversation_id: uuid.UUID


Request = Ask | ToolDecisions | Retry
_KINDS: dict[str, type[Ask | ToolDecisions | Retry]] = {"ask": Ask, "tool_decisions": ToolDecisions, "retry": Retry}


def parse_request(kind: str, arguments: dict[str, Any]) -> Request:
    """A request from untrusted arguments. Raises ``RequestInvalid`` with one line that names each wrong field."""
    model = _KINDS.get(kind)
    if model is None:
        raise RequestInvalid(f"Unknown kind of request {kind!r}; nothing was recorded.")
    if too_deep(arguments):
        raise RequestInvalid(f"The request was not recorded: it is nested deeper than {MAX_DEPTH} levels.")
    try:
        return model.model_validate(clean(arguments))
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(str(p) for p in e['loc']) or 'request'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors(include_input=False)[:10]
        )
        raise RequestInvalid(f"The request was not recorded: {wrong}.") from None


@dataclass(frozen=True, slots=True)
class Artifact:
    """Bytes too large for a message. The id is derived from conversation and content, so storing twice is once."""

    artifact_id: str
    name: str
    media_type: str
    content: bytes

    @classmethod
    def of(cls, conversation_id: str, name: str, media_type: str, content: bytes) -> Artifact:
        digest = hashlib.sha256(content).hexdigest()
        return cls(str(uuid.uuid5(uuid.UUID(conversation_id), digest)), name, media_type, content)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What a store records: the JSON document of a request, and the artifacts that belong to it.

    Keys of ``document``: all fields of the request (empty ones left out), ``kind``, ``request_id``,
    ``conversation_id``, ``account_id`` (None: the conversation's own, or ``default_account`` when it is created),
    ``default_account``, ``queue``, ``title``, ``target_id`` and ``digest`` (SHA-256 of the content, which tells a
    repeated submit from a conflicting one). Decisions carry ``approval_token_sha256`` in place of the token, and
    ``by_key: true`` when the setting allows the call's key to stand in for it. Images are
    ``{"artifact_id", "media_type"}`` or ``{"url"}``.
    """

    document: dict[str, Any]
    artifacts: tuple[Artifact, ...] = ()

    @property
    def conversation_id(self) -> str:
        return str(self.document["conversation_id"])

    @property
    def request_id(self) -> str:
        return str(self.document["request_id"])


def record_of(
    request: Request,
    *,
    request_id: str | None = None,
    queue: str = "interactive",
    default_account: str = "default",
    max_bytes: int = 4_000_000,
    accept_call_keys: bool = False,
    redactor: Redactor | None = None,
) -> RequestRecord:
    """The record of a request; ``request_id`` and ``queue`` are defaults for what it leaves open.

    The id of a new conversation is derived from account and ``request_id``, so that submitting twice creates one.
    ``redactor`` takes secrets out of what people wrote, before the digest is taken: every producer and worker of an
    installation has the same one. Raises ``RequestTooLarge`` and ``RequestInvalid``.
    """
    document = clean(request.model_dump(mode="json", exclude_none=True, exclude_defaults=False))
    document = {k: v for k, v in document.items() if v not in ([], {})}
    for result in document.get("frontend_tool_results", ()):
        result.setdefault("content", None)  # null is an answer too
    if redactor is not None:
        _redact(document, redactor)
    document["request_id"] = request.request_id or request_id or str(uuid.uuid4())
    if len(document["request_id"]) > MAX_IDENTIFIER:
        raise RequestInvalid(f"request_id is longer than {MAX_IDENTIFIER} characters; nothing was recorded.")
    document["queue"] = request.queue or queue
    document.setdefault("account_id", None)
    document["default_account"] = default_account
    if "conversation_id" not in document:
        account = document["account_id"] or default_account
        document["conversation_id"] = str(uuid.uuid5(_NAMESPACE, f"{account}/{document['request_id']}"))
    for decision in document.get("tool_decisions", ()):
        token = decision.pop("approval_token", None)
        if token is not None:
            decision["approval_token_sha256"] = token_sha256(token)
        elif accept_call_keys:
            decision["by_key"] = True
    if request.target is not None:
        document["target_id"] = request.target.target_id
    artifacts: list[Artifact] = []
    if isinstance(request, Ask):
        document["title"] = _title(document["ask"])
        if request.images:
            document["images"] = [_store_image(i, document["conversation_id"], artifacts) for i in request.images]
    size = len(orjson.dumps(document))
    if size > max_bytes:
        raise RequestTooLarge(
            f"The request has {size:,} bytes, the limit is {max_bytes:,}; nothing was recorded.",
            hint="Shorten it, or raise TURNKEEPER_REQUEST_BYTES. Images do not count.",
        )
    document["digest"] = _digest(document)
    return RequestRecord(document, tuple(artifacts))


def _title(ask: str) -> str:
    """The question's beginning, up to the end of a word."""
    text = re.sub(r"\s+", " ", ask).strip()
    if len(text) <= TITLE_CHARACTERS:
        return text
    whole, _, broken = text[:TITLE_CHARACTERS].rpartition(" ")
    return f"{whole or broken[:-1]}…"


def _redact(document: dict[str, Any], redactor: Redactor) -> None:
    """In place: the words of people and clients. What names, selects or is matched stays as it is."""
    for name in ("ask", "additional_system_prompt", "metadata"):
        if name in document:
            document[name] = redactor.value(document[name])
    for decision in document.get("tool_decisions", ()):
        if "feedback" in decision:
            decision["feedback"] = redactor.value(decision["feedback"])
    for result in document.get("frontend_tool_results", ()):
        result["content"] = redactor.value(result["content"])


def token_sha256(token: str) -> str:
    """The form in which an approval token is stored and compared."""
    return hashlib.sha256(token.encode()).hexdigest()


def _store_image(image: Image, conversation_id: str, artifacts: list[Artifact]) -> dict[str, str]:
    media_type, data = image.media_type, image.data or ""
    if image.url is not None:
        inline = re.fullmatch(r"data:(image/[\w.+-]+);base64,(.*)", image.url, re.DOTALL)
        if inline is None:
            return {"url": image.url}
        media_type, data = inline.groups()
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError:  # binascii.Error too
        raise RequestInvalid("images: data is not base64; nothing was recorded.") from None
    artifact = Artifact.of(conversation_id, "image", media_type, content)
    if artifact.artifact_id not in {a.artifact_id for a in artifacts}:
        artifacts.append(artifact)
    return {"artifact_id": artifact.artifact_id, "media_type": media_type}


_NOT_CONTENT = {"request_id", "queue", "default_account", "digest", "account_id", "title", "target_id"}


def _digest(document: dict[str, Any]) -> str:
    content = {k: v for k, v in document.items() if k not in _NOT_CONTENT}
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()
