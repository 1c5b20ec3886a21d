"""`tilewise ring`: what it prints, writes and draws, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tilewise.cli import app


def ring(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ring", *(str(a) for a in arguments)], env={"COLUMNS": "160"})


def test_it_prints_owners_work_bytes_and_why():
    result = ring("--n", 16384, "--forward-only")
    assert result.exit_code == 0, result.output
    for text in (
        "0–1023, 15360–16383",
        "chosen: zigzag with",
        "exactly equal",
        "1.0000",
        "310 GB/s inside",
        "efficiency",
        "GiB",
    ):
        assert text in result.stdout, text
    assert "backward" not in result.stdout


def test_it_writes_what_it_prints(tmp_path: Path):
    path = tmp_path / "made" / "ring.json"
    result = ring("--n", 8192, "--ranks", 4, "--method", "direct by 1", "--layout", "zigzag", "--json", path)
    assert result.exit_code == 0, result.output
    told = json.loads(path.read_text())
    assert told["layout"] == "zigzag" and told["method"] == "direct by 1" and told["problem"]["mask"] == "causal"
    assert told["owners"][0] == [[0, 1024, 1], [7168, 8192, 1]]
    work = told["passes"]["forward"]["work"]
    assert len(work) == 4 and all(len(set(row)) == 1 for row in work)
    assert sum(map(sum, work)) == 64 * 8192 * 8193 / 2
    assert set(told["passes"]) == {"forward", "backward"}
    assert sum(told["passes"]["backward"]["sent_bytes"]) > 2 * sum(told["passes"]["forward"]["sent_bytes"])


def test_documents_are_given_by_length():
    result = ring("--n", 8192, "--ranks", 4, "--documents", "5000 192,3000", "--forward-only")
    assert result.exit_code == 0 and "causal & documents" in result.stdout
    wrong = ring("--n", 8192, "--documents", "5000 193 3000")
    assert wrong.exit_code == 2 and "add up to n = 8192, got 8193" in wrong.output
    assert ring("--n", 8192, "--documents", "many").exit_code == 2


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("zigzag.svg", ["--n", 8192, "--method", "direct by 1"]),
        ("stripes.png", ["--n", 512, "--ranks", 4, "--node", 2, "--layout", "striped", "--method", "ring-1"]),
        ("decode.svg", ["--n", 1, "--s", 65536]),
        (
            "teams.svg",
            ["--n", 65536, "--ranks", 20, "--node", 4, "--method", "double of 5, heads over 2"],
        ),
    ],
)
def test_it_draws(name: str, arguments: list[object], tmp_path: Path):
    result = ring(*arguments, "--forward-only", "--draw", tmp_path / name)
    assert result.exit_code == 0, result.output
    drawn = (tmp_path / name).read_bytes()
    assert drawn[:4] == b"\x89PNG" if name.endswith("png") else b"<svg" in drawn


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mask", "spiral"], "expected one of"),
        (["--method", "ring of 2"], "method must read like"),
        (["--layout", "spiral"], "layout must be one of"),
        (["--machine", "abacus"], "machine must be one of"),
        (["--method", "double of 3"], "do not form nodes of 3"),
        (["--g", 7], "h"),
        (["--memory", 0.001], "no method fits"),
        (["--memory", "nan"], "memory must be a finite number above 0, got nan"),
        (["--near", "nan"], "near must be a finite number above 0, got nan"),
        (["--far", "inf"], "far must be a finite number above 0, got inf"),
        (["--node", 3], "8 ranks do not form nodes of 3"),
        (["--draw", "x.gif"], "a drawing ends in one of .svg, .png, .pdf, got 'x.gif'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments: list[object], message: str):
    result = ring("--n", 4096, *arguments)
    assert result.exit_code == 2 and message in result.output and result.output.count("\n") == 1
