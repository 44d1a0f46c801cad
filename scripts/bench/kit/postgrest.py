"""A PostgREST for one run, under ``/rest/v1`` as on Supabase."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import shutil

from scripts.bench.kit.postgres import cache_folder
from scripts.bench.kit.prefix_proxy import PrefixProxy
from scripts.bench.kit.processes import Server, free_port


class LocalPostgrest:
    """On the database at ``url`` (as ``postgres``), until ``stop``. ``url`` and ``key`` are what ``SUPABASE_URL`` and
    ``SUPABASE_KEY`` are to be; the key is that of the role ``service_role``. It outlives the database's restarts."""

    def __init__(self, database_url: str, schema: str) -> None:
        port, secret = free_port(), secrets.token_hex(32)
        environment = {
            "PGRST_DB_URI": database_url.replace("postgres@", "authenticator@"),
            "PGRST_DB_SCHEMAS": schema,
            "PGRST_DB_ANON_ROLE": "anon",
            "PGRST_JWT_SECRET": secret,
            "PGRST_SERVER_HOST": "127.0.0.1",
            "PGRST_SERVER_PORT": str(port),
        }
        self._server = Server([_program()], "Schema cache loaded", env=environment)
        self._proxy = PrefixProxy(port)
        self.url, self.key = self._proxy.url, _signed({"role": "service_role"}, secret)

    def stop(self) -> None:
        self._proxy.stop()
        self._server.stop()


def _program() -> str:
    cached = cache_folder() / "postgrest-12.0.2"  # where the tests keep theirs
    found = str(cached) if cached.exists() else shutil.which("postgrest")
    if found is None:
        raise RuntimeError("No PostgREST: run `python -m tests.support.programs`, or put postgrest on the PATH.")
    return found


def _signed(claims: dict[str, str], secret: str) -> str:
    """A JSON Web Token, HS256."""
    head = f"{_base64({'alg': 'HS256', 'typ': 'JWT'})}.{_base64(claims)}"
    signature = hmac.new(secret.encode(), head.encode(), hashlib.sha256).digest()
    return f"{head}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def _base64(value: dict[str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()
