"""Runs a program that compiles kernels in a process where Triton is not the interpreter, and with another Triton where
`TILEWISE_TRITON=<folder>` asks for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OTHER = os.environ.get("TILEWISE_TRITON")


def told_by(program: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """What a program of this folder says in JSON."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env |= {"TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    if OTHER:
        env["PYTHONPATH"] = os.pathsep.join([str(Path(OTHER).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
    command = [sys.executable, HERE / program, "--processes", processes, "--json", folder / "rows.json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = json.loads((folder / "rows.json").read_text())
    assert not OTHER or Path(told["from"]).is_relative_to(Path(OTHER).resolve())
    return told
