"""Bringing a store's schema up to date, whichever store the settings name."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigurationError
from shared.settings import Settings

MIGRATIONS = Path(__file__).parent / "sql" / "postgres"


def migrate(settings: Settings) -> list[str]:
    """Apply what is missing; the names of what was applied. Running it twice, or at once, is once.

    Raises ``ConfigurationError`` where there is no way to run SQL, ``StoreUnavailable``.
    """
    if settings.store_kind == "sqlite":
        from shared.store.sqlite import migrate_sqlite

        return migrate_sqlite(settings.sqlite_path)
    if settings.database_url is None:
        raise ConfigurationError(
            "SUPABASE_URL runs no SQL; nothing was migrated.",
            hint=f"Set DATABASE_URL (in place of SUPABASE_URL) for this command, or apply the files of {MIGRATIONS} "
            "with the supabase command line.",
        )
    from shared.store.migrate_postgres import migrate_postgres

    return migrate_postgres(settings.database_url.get_secret_value(), settings.schema_name)
