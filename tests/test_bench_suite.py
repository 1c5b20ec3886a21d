"""The suite in tests/gpu, which continuous integration has no GPU for: it runs, it is skipped, it keeps what it finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(*arguments: object) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_it_runs_on_any_device_and_keeps_what_it_finds(tmp_path: Path) -> None:
    file = tmp_path / "suite.json"
    some = "chunked-float32 or chunked-bfloat16-128 or ends or graph"
    code, said = run("tests/gpu", "--backend", "torch", "--device", "cpu", "--json", file, "-k", some)
    assert code == 0, said
    found = json.loads(file.read_text())
    assert (found["backend"], found["device"], found["failed"]) == ("torch", "cpu", 0)
    assert found["passed"] == 3 and found["skipped"] == 6 and found["skips"] == {"Skipped: is about CUDA": 6}
    assert {(r["feature"], r["dtype"], r["head"]) for r in found["worst"]} == {
        ("chunked", "float32", "64"), ("chunked", "bfloat16", "128"), ("ends", "bfloat16", "64"),
    }  # fmt: skip
    assert all(0 < r["error"] <= r["budget"] for r in found["worst"])
    assert found["versions"]["torch"] and "--backend torch" in found["command"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_is_skipped_without_its_device() -> None:
    code, said = run("tests/gpu/test_features.py", "--device", "cuda:99", "-k", "chunked-float32", "-rs")
    assert code == 0 and "needs the device cuda:99" in said, said


def test_it_is_not_collected_unless_named() -> None:
    others = "--ignore-glob", ROOT / "tests" / "test_*", "--ignore", ROOT / "tests" / "browser"
    code, said = run("--collect-only", "tests", *others)
    assert code == 5 and "no tests collected" in said, said
