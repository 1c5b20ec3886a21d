"""Where backends keep what they have found out or compiled: one folder of the user's."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile


def folder() -> Path:
    """$TILEWISE_CACHE, or tilewise/ in $XDG_CACHE_HOME, or in ~/.cache. RuntimeError where there is no home."""
    asked = os.environ.get("TILEWISE_CACHE")
    if asked:
        return Path(asked).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tilewise"


def put(where: Path, content: bytes) -> None:
    """Write a file and its folder. Readers see what was there or all of this, never half of it; OSError where it cannot be."""
    where.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=where.parent, prefix=f".{where.stem[:20]}", delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, where)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise
