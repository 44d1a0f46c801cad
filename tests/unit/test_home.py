"""The folder under ``TURNKEEPER_HOME``: made, or named as what cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from shared.home import usable_folder


def test_it_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    assert usable_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_what_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(ConfigurationError, match=f"TURNKEEPER_HOME: nothing can be kept in {path}: "):
            usable_folder(path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # a file system mounted read-only, which root may not write too
    with pytest.raises(ConfigurationError, match="it cannot be written"):
        usable_folder(tmp_path)
