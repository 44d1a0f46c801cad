"""The folder that ``TURNKEEPER_HOME`` names, or that stands below it."""

from __future__ import annotations

import os
from pathlib import Path

from shared.errors import ConfigurationError


def usable_folder(path: Path) -> Path:
    """The folder, made for its owner alone if missing. Raises ``ConfigurationError`` if nothing can be kept there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = "" if os.access(path, os.W_OK | os.X_OK) else "it cannot be written"
    except OSError as error:
        reason = str(error.strerror).lower()
    if reason:
        raise ConfigurationError(
            f"TURNKEEPER_HOME: nothing can be kept in {path}: {reason}.",
            hint="Set TURNKEEPER_HOME to a folder that can be written.",
        )
    return path
