"""The redactor of an installation: its key, its patterns, and what is done with texts, JSON values and messages."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from shared.errors import ConfigurationError
from shared.home import usable_folder
from shared.redaction.keys import announced
from shared.redaction.kubernetes import redact_secrets
from shared.redaction.scanner import Scanner, Stream
from shared.settings import Settings

if TYPE_CHECKING:  # its libraries take time to import, and most installations have no patterns of their own
    from shared.redaction.custom import CustomPattern

DIGITS: Final = 6  # of the digest that a marker shows: two secrets are told apart, one in 16 million is not
QUOTED_CHARACTERS: Final = 6  # of a secret that is looked for where it is quoted, at least: less is a word of prose
KEY_FILE: Final = "redaction.key"
_LABEL: Final = b"turnkeeper redaction key 1\0"
_SIGNATURES: Final = frozenset({"signature", "thought_signature", "thought_signatures", "encrypted_content"})


class RedactedStream(Protocol):
    """Text in pieces. ``feed`` gives what may be shown by now, ``end`` what was still held back; ``cut`` in its place,
    where the text was broken off, gives no part of a secret that was coming."""

    def feed(self, text: str) -> str: ...

    def end(self) -> str: ...

    def cut(self) -> str: ...


class Redactor:
    """Replaces secrets. Immutable, and the same on every worker and client with the same settings."""

    def __init__(self, key: bytes, patterns: Sequence[CustomPattern] = (), *, enabled: bool = True) -> None:
        self._key = key
        self._scanner = Scanner(patterns)
        self.enabled = enabled

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """As the settings say. Raises ``ConfigurationError`` that names a wrong pattern or an unreadable key."""
        patterns: Sequence[CustomPattern] = ()
        if settings.redact is not None:
            from shared.redaction.custom import read_patterns

            patterns = read_patterns(settings.redact)
        if settings.redaction == "off":
            return cls(b"", patterns, enabled=False)
        return cls(_key_of(settings), patterns)

    @classmethod
    def off(cls) -> Self:
        """Changes nothing."""
        return cls(b"", enabled=False)

    @classmethod
    def for_process(cls) -> Self:
        """The known shapes, with markers that mean something within this process only: for logs before the settings
        are known."""
        return cls(secrets.token_bytes(32))

    def text(self, text: str) -> str:
        """A text without its secrets; the same object if there are none."""
        if not self.enabled or not text:
            return text
        redacted = Stream(self._scanner, self._marker).take(text, final=True)
        return text if redacted == text else redacted

    def output(self, text: str) -> str:
        """A text that a tool or a person brought: Kubernetes secrets too, by what stands around them."""
        if not self.enabled:
            return text
        return self.text(redact_secrets(text, lambda value: self._marker("kubernetes_secret", value)))

    def value(self, value: Any) -> Any:
        """A JSON value with every string redacted, and what stands under a key such as ``password`` as well. Keys stay;
        unchanged parts are shared."""
        if not self.enabled:
            return value
        if isinstance(value, dict):
            return _same_or(value, {key: self._under(key, item) for key, item in value.items()})
        if isinstance(value, list | tuple):
            return _same_or(value, [self.value(item) for item in value])
        return self.output(value) if isinstance(value, str) else value

    def quoting(self, arguments: Any, text: str) -> str:
        """``output`` of a text that may quote a call's arguments: what a key announces there as a secret has no shape
        of its own by which it would be known here."""
        if not self.enabled:
            return text
        for secret, marker in self._announced(arguments):
            if len(secret) >= QUOTED_CHARACTERS:
                text = text.replace(secret, marker)
        return self.output(text)

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A model's message: its text and reasoning redacted, as the stream shows them; a signed block that holds a
        secret left out, since its signature would not fit any more; its tool calls as they are: they are what runs."""
        if not self.enabled:
            return message
        redacted: dict[str, Any] = {}
        for name, item in message.items():
            changed = item if name in ("role", "tool_calls") else self._strings(item)
            if changed is item or not _is_signed(item):
                redacted[name] = changed
            elif isinstance(item, list):
                pairs = zip(item, changed, strict=True)
                kept = [new for old, new in pairs if new is old or not _is_signed(old)]
                redacted.update({name: kept} if kept else {})
        return redacted

    def shown(self, event: dict[str, Any]) -> dict[str, Any]:
        """An event's row for people and readers: secrets in the arguments of its tool calls masked. What runs, is
        compared and is sent back to the model is the stored row."""
        if not self.enabled or not isinstance(event.get("data"), dict):
            return event
        data = dict(event["data"])
        if "message" in data:
            data["message"] = self._masked(data["message"])
        if isinstance(data.get("messages"), list):
            data["messages"] = [self._masked(message) for message in data["messages"]]
        return {**event, "data": data}

    def _masked(self, message: Any) -> Any:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        return {**message, "tool_calls": [self._strings(call) for call in calls]} if calls else message

    def _strings(self, value: Any) -> Any:
        """A JSON value with the text of every string redacted, whatever key it stands under."""
        if isinstance(value, dict):
            return _same_or(value, {key: self._strings(item) for key, item in value.items()})
        if isinstance(value, list):
            return _same_or(value, [self._strings(item) for item in value])
        return self.text(value) if isinstance(value, str) else value

    def stream(self) -> RedactedStream:
        """For text that comes in pieces."""
        return Stream(self._scanner, self._marker) if self.enabled else _Unchanged()

    def _under(self, key: Any, value: Any) -> Any:
        redacted = self.value(value)
        if redacted is value and isinstance(key, str) and isinstance(value, str):
            found = announced(key, value)
            if found is not None:
                return value[: found.begin] + self._marker(found.kind, value[found.begin :])
        return redacted

    def _announced(self, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for key, item in value.items():
                found = announced(key, item) if isinstance(key, str) and isinstance(item, str) else None
                if found is not None:
                    yield item[found.begin :], self._marker(found.kind, item[found.begin :])
                else:
                    yield from self._announced(item)
        elif isinstance(value, list):
            for item in value:
                yield from self._announced(item)

    def _marker(self, kind: str, secret: str) -> str:
        digest = hmac.new(self._key, secret.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
        return f"[redacted:{kind}:{digest[:DIGITS]}]"


class _Unchanged:
    """A stream that is not redacted."""

    def feed(self, text: str) -> str:
        return text

    def end(self) -> str:
        return ""

    def cut(self) -> str:
        return ""


def _same_or(old: Any, new: Any) -> Any:
    """``old`` if nothing in it has changed."""
    pairs = ((old[key], new[key]) for key in old) if isinstance(old, dict) else zip(old, new, strict=True)
    return old if all(a is b for a, b in pairs) else new


def _is_signed(item: Any) -> bool:
    """A signature or an encrypted text is in it, at any depth: then it is to be sent back as it came, or not at all."""
    if isinstance(item, dict):
        if item.get("type") == "redacted_thinking" or any(item.get(name) for name in _SIGNATURES):
            return True
        return any(map(_is_signed, item.values()))
    return isinstance(item, list) and any(map(_is_signed, item))


def _key_of(settings: Settings) -> bytes:
    """The key of the markers' digests: the setting; or derived from what opens the database, which all workers have
    and readers of the log do not; or, with the embedded store, a random file beside it."""
    secret = settings.redaction_key or settings.supabase_key or settings.database_url
    if secret is None:
        return _key_file(settings.home / KEY_FILE)
    return hashlib.sha256(_LABEL + secret.get_secret_value().encode()).digest()


def _key_file(path: Path) -> bytes:
    """The key in the file, which the first process makes: whole under another name first, so that nobody reads half."""
    try:
        if not path.exists():
            usable_folder(path.parent)
            draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(32))
            try:
                os.link(draft, path)
            except FileExistsError:  # another process was first
                pass
            finally:
                draft.unlink()
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"The key of the redaction's markers cannot be kept in {path}: {error.strerror}.",
            hint="Set TURNKEEPER_REDACTION_KEY, or make TURNKEEPER_HOME writable.",
        ) from None
