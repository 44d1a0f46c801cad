"""Which values count as secrets behind a word that announces one. Pure functions of the value.

Placeholders, references to variables, words of prose and the names of Kubernetes objects are none: text about
operations is full of ``secret=default/my-tls`` and ``token: <none>``.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

_WORDS: Final = frozenset(
    """
    true false yes no on off null nil none undefined empty unset blank optional required disabled enabled default
    missing invalid incorrect wrong expired changed rejected accepted failed failure error unknown hidden masked
    redacted removed protected str string text bytes int integer bool boolean object any secretstr char varchar
    password passwd token secret is was are not must should may can will has the for and with from file env
    prompt auth authentication authorization verification field policy hash reset aws4-hmac-sha256
    """.split()  # noqa: SIM905 - one word a line would hide what it is
)
_PLACEHOLDER: Final = re.compile(
    r"[*•x.X_#?-]{3,}|\$\w+|%\w+%?|x{3,}[\w*-]*|(?i:change-?me|your[_-].*|example|placeholder|todo)"
)
_CODE: Final = re.compile(r"[A-Za-z_]+(?:\.[A-Za-z_]+)+")  # settings.database.password
_PARTS: Final = re.compile(r"[-./_:@]")
_NAME_PART: Final = 5  # characters of the longest part with digits that the name of a Kubernetes object has
_LOOKS_ENCODED: Final = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])|(?=.*[a-z])(?=.*[A-Z]).{16}")


def counts(rule: str, value: str) -> bool:
    """Whether ``value`` is a secret by the rule of its keyword: ``any``, ``random``, ``header`` or ``docker``."""
    if len(value) < 3 or value.lower() in _WORDS or _PLACEHOLDER.fullmatch(value) or _CODE.fullmatch(value):
        return False
    if rule == "any":
        return True
    if rule == "docker":
        return _is_basic(value)
    return is_random(value)


def is_random(value: str) -> bool:
    """At least 8 characters, letters and digits mixed, and not made of words and short parts as names are."""
    if len(value) < 8 or len(set(value)) < 5 or not _LOOKS_ENCODED.match(value):
        return False
    return any(len(part) > _NAME_PART and not part.isalpha() for part in _PARTS.split(value)) or _mixed(value)


def _mixed(value: str) -> bool:
    """A long text of both cases without separators, such as base64 without a digit."""
    return len(value) >= 16 and not value.islower() and not value.isupper() and not _PARTS.search(value)


def _is_basic(value: str) -> bool:
    """Base64 of ``user:password``, as Docker's configuration has it."""
    try:
        return b":" in base64.b64decode(value, validate=True)
    except binascii.Error:
        return False
