"""The command line: what it prints, how it refuses, and that its checks catch wrong answers."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from tilewise import backends
from tilewise.bench.cases import CASES, Case, Task, visible_pairs
from tilewise.bench.machine import machine
from tilewise.bench.peers import PEERS, Peer
from tilewise.bench.report import Note, Report, Row
from tilewise.bench.run import Setting, run
from tilewise.bench.timing import Clock, burst, spread, sustained
from tilewise.bench.verify import verify
from tilewise.cli import app
from tilewise.cli.bench import fit
from tilewise.explain import tilemap
from tilewise.mask import Causal, Where, Window
from tilewise.problem import Partial
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
TINY = Case("tiny", 2, 37, 41, 4, 2, 8, 5, mask=Causal() & Window(left=11))


def tilewise(*arguments: object, width: int = 100) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": str(width)})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one case there is."""
    monkeypatch.setitem(CASES, "cpu", {"tiny": TINY})


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is off by a thousandth."""
    right = TORCH.forward

    def off(*arguments):
        o, lse = right(*arguments)
        return Partial(o * 1.001, lse)

    monkeypatch.setattr(TORCH, "forward", off)


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
    result = tilewise("plan", "--b", 1, "--n", 4096, "--h", 8, "--d", 64, "--mask", "causal", "--g", 2, "--dtype", "bfloat16")
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


# bench


@pytest.mark.usefixtures("tiny")
def test_bench_writes_one_json_object(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = tilewise("bench", "--quick", "--case", "tiny", "--seconds", 0.01, "--json", file, width=160)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert list(found) == ["machine", "versions", "commit", "date", "command", "rows"]
    assert [(r["pass"], r["regime"]) for r in found["rows"]] == [
        ("forward", "burst"), ("forward", "sustained"), ("backward", "burst"), ("backward", "sustained"),
    ]  # fmt: skip
    for row in found["rows"]:
        assert list(row) == ["case", "pass", "regime", "unit", "ours", "peers", "spread", "error", "budget"]
        assert row["case"] == "tiny" and row["unit"] == "TFLOP/s" and row["ours"] > 0 and row["peers"]["sdpa"] > 0
        assert 0 < row["error"] <= row["budget"] and row["spread"] >= 0
    assert "against sdpa" in result.stdout and "flex" in result.stdout


@pytest.mark.usefixtures("tiny", "wrong")
def test_bench_refuses_a_wrong_backend(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = tilewise("bench", "--quick", "--case", "tiny", "--json", file, width=160)
    assert result.exit_code == 1
    assert "refused: tiny" in result.stderr and "refused" in result.stdout
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4 and all(row["ours"] is None and row["peers"] == {} for row in rows)
    assert any(row["error"] > row["budget"] for row in rows)


@pytest.mark.parametrize(
    "answer",
    [lambda p: Partial(p.o * torch.nan, p.lse), lambda p: Partial(p.o, p.lse + 1e-3), lambda p: p.no_such_name],
    ids=["NaN", "lse", "raises"],
)
def test_bench_refuses_what_is_not_right(monkeypatch: pytest.MonkeyPatch, answer: Callable) -> None:
    right = TORCH.forward
    monkeypatch.setattr(TORCH, "forward", lambda *arguments: answer(right(*arguments)))
    assert not verify(TINY, "cpu")["forward"].ok
    rows = run(TINY, Setting(seconds=0.0), lambda text: None).rows
    assert len(rows) == 4 and all(row.refused for row in rows)
    json.dumps([row.json() for row in rows], allow_nan=False)


@pytest.mark.usefixtures("tiny")
def test_bench_says_what_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TORCH, "forward", lambda *arguments: _raise(RuntimeError("out of paper")))
    result = tilewise("bench", "--quick", "--case", "tiny")
    assert result.exit_code == 1 and "RuntimeError: out of paper" in result.stdout


def test_a_backend_that_refuses_is_a_footnote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TORCH, "why_not", lambda problem: ("only on Tuesdays",))
    outcome = run(TINY, Setting(backend="torch"), lambda text: None)
    assert outcome.rows == [] and outcome.notes[0] == ("tilewise", "tiny", "forward", "only on Tuesdays")


def test_verify_sees_hidden_rows_and_softcap() -> None:
    case = Case("hard", 1, 23, 13, 4, 2, 8, 8, mask=Causal(), softcap=5.0)  # ten queries before the first key
    assert set(verify(case, "cpu")) == {"forward", "backward"}
    assert all(verdict.ok for verdict in verify(case, "cpu").values())


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(left=5), Where(lambda b, h, i, j: (i + j + h) % 3 == 0)])
def test_visible_pairs_are_counted_by_the_definition(mask) -> None:
    case = Case("pairs", 2, 300, 41, 3, 3, 4, 4, mask=mask)
    problem = case.problem(case.inputs("cpu"))
    pairs = int(np.broadcast_to(problem.keep(), (2, 3, 300, 41)).sum())
    assert visible_pairs(problem) == pairs
    forward, backward = (Task.of(case, name, "cpu") for name in ("forward", "backward"))
    assert (forward.work, forward.unit) == (2 * pairs * 8 / 1e12, "TFLOP/s")
    assert (backward.work, backward.unit) == (2 * pairs * 20 / 1e12, "TFLOP/s")
    assert (Task.of(case, "decode", "cpu").work, Task.of(case, "decode", "cpu").unit) == (2 * 41 * 3 * 8 * 4 / 1e9, "GB/s")


@pytest.mark.parametrize(
    "case", [case for device in CASES.values() for case in device.values()], ids=lambda c: f"{c.name}-{c.d}"
)
def test_every_case_reduces_to_what_can_be_checked(case: Case) -> None:
    small = case.reduced()
    assert small.pairs <= 2**21 and small.h // small.g == case.h // case.g and small.mask == case.mask
    assert set(case.passes) <= {"forward", "backward", "decode"}


def test_a_peer_that_differs_or_fails_is_a_footnote() -> None:
    def broken(problem):
        raise NotImplementedError("no such kernel\nand more")

    peers = (
        Peer("refuses", lambda problem: ("only on Tuesdays",), broken),
        Peer("fails", lambda problem: (), broken),
        Peer("differs", lambda problem: (), lambda problem: lambda q, k, v: q[..., : v.shape[-1]] * 1.0),
        PEERS[0],
    )
    outcome = run(Case("one", 1, 8, 8, 1, 1, 4, 4, passes=("forward",)), Setting(seconds=0.01, peers=peers), lambda text: None)
    assert all(set(row.peers) == {"sdpa"} for row in outcome.rows)
    reasons = {note.who: note.reason for note in outcome.notes}
    assert reasons["refuses"] == "only on Tuesdays" and reasons["fails"] == "no such kernel (NotImplementedError)"
    assert reasons["differs"].startswith("computes something else")


def test_contenders_take_turns() -> None:
    turns: list[str] = []
    contenders = {name: lambda name=name: turns.append(name) for name in "ab"}
    times = burst(contenders, Clock("cpu"), 0.0)
    assert "".join(turns) == "aabb" + "bbaa" + "aabb"
    assert len(times["a"]) == len(times["b"]) == 6
    assert {name: len(t) > 3 for name, t in sustained(contenders, Clock("cpu"), 0.01).items()} == {"a": True, "b": True}
    assert spread([1.0, 2.0, 3.0]) == 0.5


def test_losses_count_like_wins() -> None:
    rows = [
        Row("c", "forward", r, "TFLOP/s", ours, {"sdpa": 2.0}, 0.1, 0.0, 1.0)
        for r, ours in (("burst", 1.0), ("sustained", 4.0))
    ]
    report = Report("tilewise bench", rows, [Note("flex", "c", "forward", "why"), Note("flex", "d", "forward", "why")])
    assert report.score("sdpa") == (1, 1) and [row.ratio("sdpa") for row in rows] == [0.5, 2.0]
    assert report.footnotes() == ["flex not measured in c forward, d forward: why"]
    assert rows[0].ratio("flex") is None and not Report("empty").ok


@pytest.mark.parametrize(("width", "columns"), [(64, 7), (80, 9), (120, 11)])
def test_narrow_terminals_get_fewer_columns(width: int, columns: int) -> None:
    row = Row("case", "forward", "burst", "TFLOP/s", 1.0, {"sdpa": 2.0, "flex": 0.5}, 0.1, 1e-7, 1e-6)
    console = Console(width=width, file=StringIO())
    made = fit(Report("tilewise bench", [row]), console)
    console.print(made)
    assert len(made.columns) == columns and isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert "vs flex" in lines[1] and "2.00×" in lines[3] and ("error/budget" in lines[1]) == (width == 120)
