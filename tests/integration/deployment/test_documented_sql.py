"""The queries of ``docs/production.md``, run on a migrated database."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg

PAGE = Path(__file__).parents[3] / "docs" / "production.md"


def test_queries(postgres_url: str) -> None:
    blocks = re.findall(r"^ *```sql\n(.*?)^ *```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    queries = [query for block in blocks for query in re.sub(r"--.*", "", block).split(";") if query.strip()]
    assert len(queries) >= 5
    with psycopg.connect(postgres_url) as connection:
        for query in queries:
            assert connection.execute(query).fetchall() == []  # type: ignore[arg-type]
        connection.execute("SELECT turnkeeper.apply_access()")
