"""Settings: one line for each wrong one, and the defaults that need none."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.errors import ConfigurationError
from shared.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the machine reaches these tests."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"TURNKEEPER_{name.upper()}", raising=False)
    for name in ("REDIS_URL", "DATABASE_URL", "SUPABASE_URL", "SUPABASE_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_with_nothing_set_everything_is_embedded() -> None:
    settings = load_settings()
    assert settings.store_kind == "sqlite"
    assert settings.embedded_redis
    assert settings.home == Path.home() / ".turnkeeper"
    assert settings.sqlite_path == settings.home / "turnkeeper.db"
    assert settings.effective_redis_url == f"unix://{settings.socket_path}"
    assert settings.slots == {"interactive": 64, "background": 8}


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TURNKEEPER_HOME", str(tmp_path))
    monkeypatch.setenv("TURNKEEPER_SLOTS", "interactive=3, chat=1")
    monkeypatch.setenv("TURNKEEPER_LEASE_SECONDS", "2.5")
    monkeypatch.setenv("REDIS_URL", "redis://localhost/1")
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:secret@localhost/db")
    settings = load_settings()
    assert (settings.home, settings.lease_seconds) == (tmp_path, 2.5)
    assert settings.slots == {"interactive": 3, "chat": 1}
    assert (settings.effective_redis_url, settings.embedded_redis) == ("redis://localhost/1", False)
    assert settings.store_kind == "postgres"
    assert settings.database_url is not None
    assert settings.database_url.get_secret_value() == "postgresql://u:secret@localhost/db"
    assert "secret" not in repr(settings)


def test_empty_urls_are_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REDIS_URL", "DATABASE_URL", "SUPABASE_URL", "SUPABASE_KEY"):
        monkeypatch.setenv(name, "")
    settings = load_settings()
    assert settings.store_kind == "sqlite"
    assert settings.embedded_redis


def test_supabase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPABASE_URL", "https://x.example.org")
    monkeypatch.setenv("SUPABASE_KEY", "key")
    assert load_settings().store_kind == "supabase"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TURNKEEPER_MAX_STEPS", "0"),
        ("TURNKEEPER_MAX_STEPS", "many"),
        ("TURNKEEPER_LEASE_SECONDS", "0.5"),
        ("TURNKEEPER_LEASE_SECONDS", "nan"),
        ("TURNKEEPER_TURN_DEADLINE_SECONDS", "-1"),
        ("TURNKEEPER_DRAIN_SECONDS", "-1"),
        ("TURNKEEPER_SLOTS", "interactive"),
        ("TURNKEEPER_SLOTS", "interactive=0"),
        ("TURNKEEPER_SLOTS", "interactive=x"),
        ("TURNKEEPER_SLOTS", "=3"),
        ("TURNKEEPER_SLOTS", ","),
        ("TURNKEEPER_SCHEMA_NAME", "drop table"),
        ("TURNKEEPER_LOG_LEVEL", "loud"),
        ("TURNKEEPER_REQUEST_BYTES", "1"),
        ("TURNKEEPER_DEFAULT_ACCOUNT", ""),
        ("TURNKEEPER_SNAPSHOTS_KEPT", "0"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("TURNKEEPER_") == 1


def test_all_wrong_settings_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNKEEPER_MAX_STEPS", "0")
    monkeypatch.setenv("TURNKEEPER_MAX_CRASHES", "0")
    with pytest.raises(ConfigurationError, match=r"TURNKEEPER_MAX_STEPS.*TURNKEEPER_MAX_CRASHES"):
        load_settings()


def test_two_stores_are_one_too_many_and_no_secret_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:secret@localhost/db")
    monkeypatch.setenv("SUPABASE_URL", "https://x.example.org")
    monkeypatch.setenv("SUPABASE_KEY", "secret")
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert "DATABASE_URL and SUPABASE_URL" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_supabase_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPABASE_URL", "https://x.example.org")
    with pytest.raises(ConfigurationError, match="SUPABASE_KEY"):
        load_settings()


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        load_settings().model = "other"  # type: ignore[misc]


def test_overrides_go_by_field_name(tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path, redis_url="redis://x", database_url="postgresql://y")
    assert (settings.effective_redis_url, settings.store_kind) == ("redis://x", "postgres")


def test_a_home_in_the_users_folder_is_expanded() -> None:
    assert load_settings(home="~/elsewhere").home == Path.home() / "elsewhere"


def test_a_long_home_puts_the_socket_elsewhere(tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path / ("x" * 120))
    assert len(str(settings.socket_path)) < 100
    assert settings.socket_path == load_settings(home=settings.home).socket_path
    assert settings.socket_path != load_settings(home=tmp_path / ("y" * 120)).socket_path


def test_every_setting_is_described() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []
