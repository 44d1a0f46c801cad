"""What to type to run this command line again, from where the user stands."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def program() -> str:
    """``turnkeeper`` if that is what the shell finds, else what this process was started with."""
    started = sys.argv[0]
    if Path(started).suffix == ".py":
        return f"{shlex.quote(sys.executable)} -m scripts.cli"
    found = shutil.which("turnkeeper")
    if found is not None and os.path.realpath(found) == os.path.realpath(started):
        return "turnkeeper"
    return shlex.quote(started)
