"""The store: one Protocol (``base``), what its implementations share (``json_store``), and the way to open one.

``open_store`` imports only what the settings ask for: nobody on SQLite waits for psycopg or supabase.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.settings import Settings
    from shared.store.base import Store

__all__ = ["open_store"]


def open_store(settings: Settings) -> Store:
    """The store that the settings name. It is connected by ``await store.open()``, and closed by the caller."""
    if settings.store_kind == "postgres":
        from shared.store.postgres import PostgresStore

        return PostgresStore(settings)
    if settings.store_kind == "supabase":
        from shared.store.supabase import SupabaseStore

        return SupabaseStore(settings)
    from shared.store.sqlite import SqliteStore

    return SqliteStore(settings)
