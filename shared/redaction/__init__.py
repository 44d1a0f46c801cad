"""Redaction: secrets in what people, tools and models say are replaced before anything keeps, shows or sends them.

A secret becomes ``[redacted:github_token:3f9a1c]``: its kind, and six digits of a keyed digest. The same secret has the
same marker everywhere in an installation, so that two mentions can be seen to be one; without the key the digits
tell nothing. Redacting twice changes nothing.

``Redactor`` is the whole interface; ``RedactedStream`` is what it gives for text that comes in pieces. What counts as a
secret is in ``formats``, what a value must look like in ``values``; ``docs/security.md`` says what is left out.
"""

from shared.redaction.redactor import RedactedStream, Redactor

__all__ = ["RedactedStream", "Redactor"]
