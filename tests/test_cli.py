"""The command line: what it prints, how it refuses, and that its checks catch wrong answers."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from tilewise import backends
from tilewise.bench.cases import Case
from tilewise.bench.machine import machine
from tilewise.cli import app
from tilewise.explain import tilemap
from tilewise.mask import Causal, Window
from tilewise.problem import Options
from tilewise.tiles import TileShape

GRID = """\
q\\k  0 1 2 3 4 5 6 7
  0  1 0 0 0 0 0 0 0
  1  1 1 0 0 0 0 0 0
  2  1 1 1 0 0 0 0 0
  3  1 1 1 1 0 0 0 0
  4  0 1 1 1 1 0 0 0
  5  0 0 1 1 1 1 0 0
  6  0 0 0 1 1 1 1 0
  7  0 0 0 0 1 1 1 1
"""

TORCH: Any = backends.load("torch")
TINY = Case("tiny", 2, 37, 41, 4, 2, 8, 5, options=Options(Causal() & Window(left=11)))


def tilewise(*arguments: object, width: int = 100) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": str(width)})


# mask


def test_mask_prints_its_grid_and_tiles() -> None:
    result = tilewise("mask", "causal & window(left=3)", 8, 8, "--block-m", 4, "--block-n", 4)
    assert result.exit_code == 0, result.output
    assert GRID in result.stdout
    assert "▒▒· \n▒▒▒▒\n" in result.stdout
    assert "0 FULL" in result.stdout and "3 PARTIAL" in result.stdout and "1 EMPTY" in result.stdout
    assert "visits 3 of 4 tiles; visible: 26 of 64 pairs" in result.stdout


def test_mask_is_bottom_right_and_shows_positions() -> None:
    assert "q\\k  0 1 2 3\n  2  1 1 1 0\n  3  1 1 1 1\n" in tilewise("mask", "causal", 2, 4).stdout
    assert "q\\k  0 1 2 3\n  0  1 0 0 0\n  1  1 1 0 0\n" in tilewise("mask", "causal('top-left')", 2, 4).stdout


def test_mask_too_wide_prints_tiles_only() -> None:
    result = tilewise("mask", "causal", 512, width=80)
    assert "the 512 × 512 grid does not fit here" in result.stdout
    assert "496 FULL" in result.stdout and "32 PARTIAL" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "tilewise", "mask", "causal & window(left=3)", "8", "8"], capture_output=True)
    assert done.returncode == 0 and done.stderr == b""
    assert GRID in done.stdout.decode() and b"\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("mask", "casual"), "expected one of full, causal, window"),
        (("mask", "window(left=-1)"), "cannot be negative, got -1"),
        (("mask", "causal(("), "cannot be read"),
        (("mask", "__import__('os').getcwd()"), "expected one of"),
        (("plan", "--dtype", "int8"), "dtype must be one of"),
        (("plan", "--h", 6, "--g", 4), "axis h"),
        (("plan", "--backend", "abacus"), "'abacus' is unknown"),
        (("plan", "--device", "abacus"), "device 'abacus' cannot be used"),
        (("check", "--case", "no such case"), "matches 'no such case'"),
        (("check", "--backend", "abacus"), "'abacus' is unknown"),
        (("check", "--dtype", "int8"), "dtype must be one of"),
        (("bench", "--case", "no such case"), "'no such case' is unknown"),
        (
            ("bench", "--group", "no such group"),
            "'no such group' is unknown; there are main, prefill, masks, half, decode, heads, small",
        ),
        (("bench", "--group", "small", "--case", "causal"), "no case is both in small and one of causal"),
        (("bench", "--peers", "sdpa,nobody"), "peer 'nobody' is unknown"),
    ],
)
def test_user_errors_are_one_line(arguments: tuple, says: str) -> None:
    result = tilewise(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr and result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.output


def test_pictures(tmp_path: Path) -> None:
    png, svg = tmp_path / "a.png", tmp_path / "a.svg"
    assert tilewise("mask", "causal", 20, 30, "--png", png, "--svg", svg).exit_code == 0
    assert png.read_bytes().startswith(b"\x89PNG") and b"<svg" in svg.read_bytes()


def test_tilemap_counts_what_the_walk_visits(tmp_path: Path) -> None:
    problem = TINY.problem(TINY.inputs("cpu"))
    counts = tilemap.save(problem, TileShape(8, 16), tmp_path / "a.svg")
    tiles = [problem.keep()[0, 0, i : i + 8, j : j + 16] for i in range(0, 37, 8) for j in range(0, 41, 16)]
    full, some = sum(bool(t.all()) for t in tiles), sum(bool(t.any()) for t in tiles)
    assert counts == (full, some - full, len(tiles) - some) == (0, 9, 6)
    assert counts.visited == some and counts.total == len(tiles)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = tilewise("mask", "causal", "--png", tmp_path / "a.png")
    assert result.exit_code == 1 and result.stderr == "error: this needs matplotlib: pip install 'tilewise[plot]'\n"


def test_without_typer_the_command_says_so() -> None:
    code = "import sys; sys.modules['typer'] = None; from tilewise.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "tilewise: the command line needs typer: pip install 'tilewise[cli]'\n"


def _raise(error: Exception) -> None:
    raise error


# plan, info


def test_plan_costs_no_memory_and_prints() -> None:
    shape = ("--b", 1, "--n", 4096, "--h", 8, "--d", 64, "--mask", "causal", "--g", 2, "--dtype", "bfloat16")
    result = tilewise("plan", *shape, "--backend", "torch")
    assert result.exit_code == 0, result.output
    for words in ("torch on cpu, bfloat16", "b=1 n=4096 s=4096 h=8 g=2 d=64 e=64", "256 × 256: visits 1088 of 2048", "GFLOP"):
        assert words in result.stdout
    assert tilewise("plan", "--n", 40000, "--h", 512, "--d", 4096).exit_code == 0  # 312 GiB, were it real


def test_info_names_backends_and_versions() -> None:
    result = tilewise("info")
    assert result.exit_code == 0
    assert torch.__version__ in result.stdout and "torch on cpu" in result.stdout and "ready" in result.stdout
    assert str(machine()["processor"])[:10] in result.stdout


# check


def test_check_passes_on_torch() -> None:
    result = tilewise("check", "--backend", "torch", "--dtype", "float32", "--case", "window")
    assert result.exit_code == 0, result.output
    assert "within budget" in result.stdout and "FAIL" not in result.stdout


def test_check_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    testing = importlib.import_module("tilewise.testing")
    results = [
        testing.Result("planted", "float32", q, error, 1e-6, "it is planted") for q, error in (("o", 1e-7), ("dq", 1e-3))
    ]

    def planted(*_: object) -> Iterator[object]:
        yield from results

    monkeypatch.setattr(testing, "conformance", planted)
    result = tilewise("check")
    assert result.exit_code == 1
    assert "FAIL" in result.stdout and "1 of 2 within budget" in result.stdout
    assert "planted float32 dq: it is planted" in result.stderr
    assert "1.0e-07" not in tilewise("check", "--failures").stdout


@pytest.mark.usefixtures("wrong")
def test_check_catches_a_wrong_operator() -> None:
    assert tilewise("check", "--dtype", "float32", "--case", "window").exit_code == 1
