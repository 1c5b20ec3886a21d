"""The measuring instrument: what it times is right, is what was asked for, and is told as it was found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from tilewise import backends
from tilewise.bench import cases, host, run, verify
from tilewise.bench.cases import QKV, Case, Task
from tilewise.bench.catalog import CASES, DOCUMENTS
from tilewise.bench.peers import PEERS, Peer
from tilewise.bench.report import Note, Report, Row
from tilewise.bench.run import Setting
from tilewise.bench.timing import Clock, burst, spread, sustained
from tilewise.cli import app
from tilewise.cli.bench import fit
from tilewise.dropout import Dropout
from tilewise.mask import Causal, Documents, Where, Window
from tilewise.problem import Options, Partial
from tilewise.ragged import Ragged
from tilewise.tiles import visible_pairs

MINE: Any = backends.load("cpu" if find_spec("llvmlite") else "torch")  # what runs on a CPU
MASKED = Options(Causal() & Window(left=11))
TINY = Case("tiny", 2, 37, 41, 4, 2, 8, 5, options=MASKED)
SDPA = PEERS[:1]


def bench(*arguments: object, width: int = 160) -> Result:
    return CliRunner().invoke(app, ["bench", *(str(a) for a in arguments)], env={"COLUMNS": str(width)})


def quiet(text: str) -> None:
    """Hears what is going on and says nothing."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases, of a group each."""
    there = {"tiny": TINY, "other": replace(TINY, name="other", group="rest", passes=("decode",))}
    monkeypatch.setitem(CASES, "cpu", there)


def _raise(error: BaseException) -> Any:
    raise error


# the command


@pytest.mark.usefixtures("tiny")
def test_it_writes_one_json_object(tmp_path: Path) -> None:
    file = tmp_path / "new" / "bench.json"
    result = bench("--quick", "--case", "tiny", "--seconds", 0.01, "--json", file)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert list(found) == ["machine", "versions", "commit", "date", "command", "asked", "done", "rows", "notes"]
    assert (found["asked"], found["done"]) == (1, 1)
    assert [(r["pass"], r["regime"]) for r in found["rows"]] == [
        ("forward", "burst"), ("forward", "sustained"), ("backward", "burst"), ("backward", "sustained"),
    ]  # fmt: skip
    for row in found["rows"]:
        assert list(row) == [
            "group", "case", "pass", "regime", "unit", "work", "ours", "peers", "spread", "error", "budget",
        ]  # fmt: skip
        assert row["case"] == "tiny" and row["unit"] == "TFLOP/s" and row["ours"] > 0 and row["peers"]["sdpa"] > 0
        assert 0 < row["error"] <= row["budget"] and row["spread"] >= 0 and row["work"] > 0
    assert "against sdpa" in result.stdout and "flex" in result.stdout


@pytest.mark.usefixtures("tiny")
def test_groups_have_tables_of_their_own() -> None:
    result = bench("--seconds", 0.0, "--peers", "none")
    assert result.exit_code == 0, result.output
    assert result.stdout.index("main") < result.stdout.index("tiny") < result.stdout.index("rest")
    assert "tiny" not in bench("--seconds", 0.0, "--peers", "none", "--group", "rest").stdout


@pytest.mark.usefixtures("tiny")
def test_peers_that_are_not_here_say_why_once() -> None:
    result = bench("--seconds", 0.0, "--peers", "sdpa-flash,fa4", "--case", "tiny")
    assert "sdpa-flash not measured: needs CUDA\nfa4 not measured: needs CUDA\n" in result.stdout


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("ends", ["interrupt", "limit"])
def test_what_was_measured_before_the_end_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: str) -> None:
    module, file = import_module("tilewise.cli.bench"), tmp_path / "bench.json"
    outcomes = iter([lambda: run(TINY, Setting(seconds=0.0), quiet), lambda: _raise(KeyboardInterrupt())])
    monkeypatch.setattr(module, "run", lambda *_: next(outcomes)())
    limit = ["--minutes", 0] if ends == "limit" else []
    result = bench("--peers", "none", "--json", file, *limit)
    done = {"limit": 0, "interrupt": 1}[ends]
    assert f"after {done} of 2 cases" in result.stderr
    assert file.exists() == bool(done) and not list(tmp_path.glob("*.part"))
    if done:
        assert result.exit_code == 0 and "against" in result.stdout
        found = json.loads(file.read_text())
        assert (found["asked"], found["done"], len(found["rows"])) == (2, 1, 4)


@pytest.mark.usefixtures("tiny", "wrong")
def test_it_refuses_a_wrong_backend(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = bench("--quick", "--case", "tiny", "--json", file)
    assert result.exit_code == 1
    assert "refused: tiny" in result.stderr and "refused" in result.stdout
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4 and all(row["ours"] is None and row["peers"] == {} for row in rows)
    assert any(row["error"] > row["budget"] for row in rows)


@pytest.mark.usefixtures("tiny")
def test_it_says_what_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MINE, "forward", lambda *arguments: _raise(RuntimeError("out of paper")))
    result = bench("--quick", "--case", "tiny")
    assert result.exit_code == 1 and "RuntimeError: out of paper" in result.stdout


# what is right


@pytest.mark.parametrize(
    "answer",
    [lambda p: Partial(p.o * torch.nan, p.lse), lambda p: Partial(p.o, p.lse + 1e-3), lambda p: p.no_such_name],
    ids=["NaN", "lse", "raises"],
)
def test_what_is_not_right_is_refused(monkeypatch: pytest.MonkeyPatch, answer: Callable) -> None:
    right = MINE.forward
    monkeypatch.setattr(MINE, "forward", lambda *arguments: answer(right(*arguments)))
    assert not verify.verify(TINY, "cpu")["forward"].ok
    rows = run(TINY, Setting(seconds=0.0), quiet).rows
    assert len(rows) == 4 and all(row.refused for row in rows)
    json.dumps([row.json() for row in rows], allow_nan=False)


def test_what_cannot_be_timed_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("tilewise.bench.run")
    monkeypatch.setattr(module, "contenders", lambda *_: _raise(torch.OutOfMemoryError("no room")))
    outcome = module.run(TINY, Setting(seconds=0.0), quiet)
    assert len(outcome.rows) == 4 and all(row.refused for row in outcome.rows)
    assert {note.reason for note in outcome.notes} == {"no room (OutOfMemoryError)"}


def test_verify_sees_hidden_rows_and_softcap() -> None:
    case = Case("hard", 1, 23, 13, 4, 2, 8, 8, options=Options(Causal(), softcap=5.0))  # ten queries before the first key
    assert set(verify.verify(case, "cpu")) == {"forward", "backward"}
    assert all(verdict.ok for verdict in verify.verify(case, "cpu").values())


LONG = Case("long", 3, 131, 131, 4, 2, 8, 8)
SAMPLED = (
    replace(LONG, options=Options(Causal() & Window(left=97)), sink=True, needs=(*QKV, "sink")),
    replace(LONG, options=Options(Causal()), s=97, alibi=True, dtype="bfloat16"),
    replace(LONG, n=97, bias="1 h n s", options=Options(softcap=3.0)),
    replace(LONG, bias="b 1 1 s", options=Options(Causal() & Documents.from_lengths([61, 70]))),
    replace(LONG, options=Options(Causal(), dropout=Dropout(0.3, seed=5))),
    replace(LONG, b=1, options=Options(Causal(), ragged=Ragged.from_lengths([0, 61, 3, 60]), dropout=Dropout(0.3, seed=5))),
    replace(LONG, b=1, s=141, options=Options(ragged=Ragged.from_lengths([61, 3, 60], [50, 20, 70]))),
    replace(LONG, b=9, n=1, options=Options(Causal()), passes=("decode",)),
)


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of a few thousand pairs already count as too large to be checked whole."""
    for module in (cases, verify):
        monkeypatch.setattr(module, "PAIRS", 4000)


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("case", SAMPLED, ids=lambda c: str(c.options.mask))
def test_a_large_case_is_checked_at_its_own_size_in_some_rows(case: Case) -> None:
    assert case.pairs > 4000 >= case.reduced().pairs
    results = verify.sample(case, "cpu", "torch")
    assert not [r for r in results if not r.ok]
    assert {r.quantity for r in results} == {"o", "lse", *(f"d{name}" for name, _ in case.inputs("cpu").present())}
    assert all(verdict.ok for verdict in verify.verify(case, "cpu").values())


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_gradient_that_is_wrong_at_full_size_only_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = MINE.backward

    def off(problem, *arguments):
        found = right(problem, *arguments)
        if problem.n == 131:
            getattr(found, name)[0, 5, 0, 0] += 1e-2  # of another batch entry than the sampled one
        return found

    monkeypatch.setattr(MINE, "backward", off)
    verdict = verify.verify(LONG, "cpu")["backward"]
    assert not verdict.ok and "should be 0" in verdict.detail


@pytest.mark.parametrize("device", CASES)
def test_every_case_reduces_to_what_can_be_checked(device: str) -> None:
    for name, case in CASES[device].items():
        small = case.reduced()
        assert name == case.name and case.group and set(case.passes) <= set(cases.UNITS)
        assert small.small and small.h // small.g == case.h // case.g and small.options.mask == case.options.mask
        assert set(case.needs) <= {"q", "k", "v", *(n for n in ("bias", "alibi", "sink") if getattr(case, n))}
    assert set(CASES["cpu"]) & {"causal", "window", "decode"}


def test_the_gpu_cases_are_those_of_the_published_tables() -> None:
    grid = [case for case in CASES["cuda"].values() if case.group == "issue"]
    assert len(grid) == 2 * 2 * 6 + 2 * 2
    assert all((case.b * case.n, case.h * case.d) == (16384, 2048) for case in grid)
    assert sum(DOCUMENTS) == 16384 and len(set(DOCUMENTS)) > 32 and len(DOCUMENTS) == 64
    packed, documents = CASES["cuda"]["packed"], CASES["cuda"]["documents"]
    small = [replace(case, h=1, g=1, d=2, e=2) for case in (packed, documents)]
    assert len({visible_pairs(case.problem(case.inputs("cpu"))) for case in small}) == 1


# what is counted


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(left=5), Where(lambda b, h, i, j: (i + j + h) % 3 == 0)])
def test_visible_pairs_are_counted_by_the_definition(mask) -> None:
    case = Case("pairs", 2, 300, 41, 3, 3, 4, 4, options=Options(mask))
    problem = case.problem(case.inputs("cpu"))
    pairs = int(np.broadcast_to(problem.keep(), (2, 3, 300, 41)).sum())
    assert visible_pairs(problem) == pairs
    forward, backward = (Task.of(case, name, "cpu") for name in ("forward", "backward"))
    assert (forward.work, forward.unit) == (2 * pairs * 8 / 1e12, "TFLOP/s")
    assert (backward.work, backward.unit) == (2 * pairs * 20 / 1e12, "TFLOP/s")
    assert (Task.of(case, "decode", "cpu").work, Task.of(case, "decode", "cpu").unit) == (2 * 41 * 3 * 8 * 4 / 1e9, "GB/s")
    assert (Task.of(case, "step", "cpu").work, Task.of(case, "step", "cpu").unit) == (1.0, "calls/s")


def test_contenders_take_turns() -> None:
    turns: list[str] = []
    contenders = {name: lambda name=name: turns.append(name) for name in "ab"}
    times = burst(contenders, Clock("cpu"), 0.0)
    assert "".join(turns) == "aabb" + "bbaa" + "aabb"
    assert len(times["a"]) == len(times["b"]) == 6
    assert {name: len(t) > 3 for name, t in sustained(contenders, Clock("cpu"), 0.01).items()} == {"a": True, "b": True}
    assert spread([1.0, 2.0, 3.0]) == 0.5


# how it is told


def row(ours: float | None = 1.0, regime: str = "burst", **peers: float) -> Row:
    return Row("g", "c", "forward", regime, "TFLOP/s", 1.0, ours, peers, 0.1, 1e-7, 1e-6)


def test_losses_count_like_wins() -> None:
    rows = [row(1.0, sdpa=2.0), row(4.0, "sustained", sdpa=2.0)]
    report = Report("tilewise bench", rows, [Note("flex", "c", "forward", "why"), Note("flex", "d", "forward", "why")])
    assert report.score("sdpa") == (1, 1) and [row.ratio("sdpa") for row in rows] == [0.5, 2.0]
    assert report.footnotes() == ["flex not measured: why"]
    report.notes += [Note("fa4", "d", "forward", "not today")]
    assert report.footnotes()[1] == "fa4 not measured in d forward: not today"
    assert rows[0].ratio("flex") is None and not Report("empty").ok


@pytest.mark.parametrize(("width", "columns"), [(64, 7), (80, 9), (120, 11)])
def test_narrow_terminals_get_fewer_columns(width: int, columns: int) -> None:
    console = Console(width=width, file=StringIO())
    made = fit([row(sdpa=2.0, flex=0.5)], console)
    console.print(made)
    assert len(made.columns) == columns and isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert "vs flex" in lines[1] and "2.00×" in lines[3] and ("error/budget" in lines[1]) == (width == 120)


# the host


def test_calls_are_timed_eager_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "COMPILE", partial(torch.compile, backend="eager", fullgraph=True))
    case = replace(TINY, passes=("call", "step"))
    found = list(host.calls(case, Setting(peers=SDPA), quiet))
    assert [(r.name, r.how, r.who) for r in found if isinstance(r, host.HostRow)] == [
        (name, how, who) for how in ("eager", "compiled") for name in ("call", "step") for who in ("tilewise", "sdpa")
    ]
    assert all(r.us > 0 for r in found if isinstance(r, host.HostRow)) and len(found) == 8


@pytest.mark.usefixtures("wrong")
def test_a_wrong_call_is_not_timed() -> None:
    (note,) = host.calls(TINY, Setting(), quiet)
    assert isinstance(note, Note) and "not right" in note.reason


def test_first_calls_are_timed_in_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, again = host.starts(Setting(peers=()), quiet)
    assert isinstance(ours, host.StartRow) and isinstance(again, host.StartRow)
    assert (ours.cache, again.cache, ours.who) == ("cold", "warm", "tilewise")
    assert min(ours.ready_s, ours.forward_s, ours.backward_s or 0) > 0
    monkeypatch.setattr("sys.executable", "false")
    assert [note.reason for note in host.starts(Setting(peers=()), quiet) if isinstance(note, Note)] == [
        "it failed without a word"
    ] * 2


def test_the_host_table_is_shown_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [host.HostRow("tiny", "call", "eager", "tilewise", 12.34, 0.05)]
    monkeypatch.setattr(host, "calls", lambda *_: iter([*rows, Note("fa4", "tiny", "call", "why")]))
    monkeypatch.setattr(host, "starts", lambda *_: iter([host.StartRow("tiny", "sdpa", "cold", 1.0, 2.0, None)]))
    result = bench("--host", "--json", tmp_path / "a.json")
    assert result.exit_code == 0 and "12.3 ± 5%" in result.stdout and "2.00" in result.stdout and "why" in result.stdout
    found = json.loads((tmp_path / "a.json").read_text())
    assert [r["pass"] for r in found["rows"]] == ["call", "first call"] and found["versions"]["torch"]


def test_a_backend_that_refuses_is_a_footnote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.load("torch"), "why_not", lambda *_: ("only on Tuesdays",))
    outcome = run(TINY, Setting(backend="torch"), quiet)
    assert outcome.rows == [] and outcome.notes[0] == ("tilewise", "tiny", "forward", "only on Tuesdays")


def test_a_peer_that_differs_or_fails_is_a_footnote() -> None:
    def broken(task):
        raise NotImplementedError("no such kernel\nand more")

    peers = (
        Peer("refuses", lambda task: ("only on Tuesdays",), broken),
        Peer("fails", lambda task: (), broken),
        Peer("differs", lambda task: (), lambda task: lambda q, k, v: q[..., : v.shape[-1]] * 1.0),
        *SDPA,
    )
    outcome = run(Case("one", 1, 8, 8, 1, 1, 4, 4, passes=("forward",)), Setting(seconds=0.01, peers=peers), quiet)
    assert all(set(row.peers) == {"sdpa"} for row in outcome.rows)
    reasons = {note.who: note.reason for note in outcome.notes}
    assert reasons["refuses"] == "only on Tuesdays" and reasons["fails"] == "no such kernel and more (NotImplementedError)"
    assert reasons["differs"].startswith("computes something else")
