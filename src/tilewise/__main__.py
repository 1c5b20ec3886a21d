"""`python -m tilewise` and the `tilewise` command."""

from __future__ import annotations

import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line, or say in one line what it needs."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        from .cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"tilewise: the command line needs {error.name}: pip install 'tilewise[cli]'")
    app(prog_name="tilewise")


if __name__ == "__main__":
    main()
