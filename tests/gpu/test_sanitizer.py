"""Small cases under NVIDIA's compute-sanitizer: no access out of bounds and no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
FOUND, LIMIT_S = 77, 280
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(not Path(SANITIZER).exists(), reason="there is no compute-sanitizer")


def sanitized(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process under one of the sanitizer's tools; it ends with `FOUND` if the tool finds anything. Every tensor has an
    allocation of its own, so that the first byte past it is out of bounds."""
    watched = [SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all", sys.executable]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run([*watched, *arguments], capture_output=True, text=True, timeout=LIMIT_S, env=environment)


def test_a_store_out_of_bounds_is_found():
    done = sanitized("memcheck", str(HERE / "planted_store.py"))
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this machine")
    assert done.returncode == FOUND and "Invalid __global__ write" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("case", ["several tiles", "everything", "documents, causal"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_nothing_is_found_in_small_cases(tool: str, case: str, request: pytest.FixtureRequest):
    device, backend = (str(request.config.getoption(name)) for name in ("--device", "--backend"))
    asked = ("--backend", backend, "--device", device, "--dtype", "bfloat16", "--case", case)
    done = sanitized(tool, "-m", "tilewise", "check", *asked)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this machine")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout
