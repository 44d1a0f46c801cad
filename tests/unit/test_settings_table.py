"""``docs/settings.md`` says what ``shared/settings.py`` is, field by field."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.settings_table import page, sections, variable
from shared.settings import Settings, load_settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_what_the_generator_prints() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m scripts.settings_table > docs/settings.md"


def test_every_field_is_listed_once() -> None:
    listed = [name for _, names in sections() for name in names]
    assert listed == list(Settings.model_fields)
    assert all(heading for heading, _ in sections())


def test_the_variables_are_those_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable of the page reaches its own field."""
    values = {bool: "true", int: "77777777", float: "1234.5"}
    for name, field in Settings.model_fields.items():
        value = values.get(field.annotation) if isinstance(field.annotation, type) else None
        if value is None:
            value = {
                "slots": "own=3",
                "log_level": "debug",
                "redaction": "off",
                "schema_name": "own",
                "fault": "after_claim",
                "health_port": "8080",
                "turn_tokens": "7",
                "turn_cost_usd": "7.5",
                "account_turns": "7",
                "account_cost_usd": "7.5",
            }.get(name, f"/own/{name}")
        if name == "database_url":
            continue  # excludes supabase_url
        monkeypatch.setenv(variable(name, field), value)
    settings = load_settings()
    for name, field in Settings.model_fields.items():
        if name != "database_url":
            assert getattr(settings, name) != field.default, f"{variable(name, field)} does not reach {name}"
    monkeypatch.delenv("SUPABASE_URL")
    monkeypatch.setenv(variable("database_url", Settings.model_fields["database_url"]), "postgresql://own")
    assert load_settings().store_kind == "postgres"
