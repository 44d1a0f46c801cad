"""The embedded store on stdlib sqlite3: ``SqliteStore`` and ``migrate_sqlite``.

``connection`` opens files and runs transactions, ``schema`` keeps the tables up to date, ``store`` runs operations
off the event loop; ``submit``, ``decisions``, ``claim``, ``append``, ``leases``, ``beside`` and ``reads`` are the
operations of docs/store.md, each a function of one transaction.
"""

from shared.store.sqlite.schema import migrate_sqlite
from shared.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore", "migrate_sqlite"]
