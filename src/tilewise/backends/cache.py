"""Where backends keep what they have found out or compiled: one folder of the user's."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """$TILEWISE_CACHE, or tilewise/ in $XDG_CACHE_HOME, or in ~/.cache. RuntimeError where there is no home."""
    asked = os.environ.get("TILEWISE_CACHE")
    if asked:
        return Path(asked).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tilewise"
