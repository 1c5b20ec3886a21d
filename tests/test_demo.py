"""The demo: what it shows is computed and judged, and a wrong result fails it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from tilewise import demo
from tilewise.cli import app


def tilewise(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "100"})


def test_fold_is_the_seed_example() -> None:
    first, both, at_once = demo.fold()
    assert (first.m, round(first.l, 3)) == (3.0, 1.135) and (both.m, round(both.l, 3)) == (5.0, 1.203)
    assert np.allclose(both[1:], at_once[1:])


def test_demo_quick(tmp_path: Path) -> None:
    result = tilewise("demo", "--quick", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    for words in ("m=3", "ℓ=1.135", "m=5", "ℓ=1.203", "same embeddings", "peak memory", "skipped", "tiles.png"):
        assert words in result.stdout
    assert (tmp_path / "tiles.png").read_bytes().startswith(b"\x89PNG")


def test_demo_fails_where_embeddings_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    same = np.eye(len(demo.SENTENCES))
    monkeypatch.setattr(demo, "embed", lambda implementation: same if implementation == "sdpa" else same + 1e-4)
    monkeypatch.setattr(demo, "measure", lambda name, n: demo.Measured(1.0, 2, 1, np.zeros((64, 64)).tolist()))
    monkeypatch.setattr(demo.Long, "exact", lambda self: np.zeros((64, 64)))
    result = tilewise("demo", "--quick", "--out", tmp_path)
    assert result.exit_code == 1 and "DIFFERENT embeddings" in result.stdout


def test_standard_attention_is_left_out_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.cli.demo import compare

    monkeypatch.setattr(demo, "available_bytes", lambda: 10**6)
    asked: list[str] = []
    monkeypatch.setattr(
        demo, "measure", lambda name, n: asked.append(name) or demo.Measured(1.0, 2, 1, np.zeros((64, 64)).tolist())
    )
    compare(demo.Long(1024))
    assert asked == ["tilewise"]


def test_demo_fails_where_the_long_sequence_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.cli.demo import compare

    wrong = {"standard": 0.0, "tilewise": 1e-3}
    monkeypatch.setattr(demo, "measure", lambda name, n: demo.Measured(1.0, 2, 1, (np.zeros((64, 64)) + wrong[name]).tolist()))
    monkeypatch.setattr(demo.Long, "exact", lambda self: np.zeros((64, 64)))
    assert not compare(demo.Long(1024))
    wrong["tilewise"] = 0.0
    assert compare(demo.Long(1024))


def test_progress_in_a_pipe_is_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tilewise.cli import console

    monkeypatch.setattr(console, "LINE_S", 0.0)
    with console.progress(3) as step:
        step("first", 1)
        step("second", 2)
    assert capsys.readouterr().err == "… 1/3 first\n… 3/3 second\n"


def test_measured_memory_is_the_process_own() -> None:
    assert demo.memory("VmHWM") >= demo.memory("VmRSS") * 0.99 > 0
