"""Tuned sizes are found, kept, preferred and forgotten, whatever state their file is in. Nothing here needs a GPU: Triton's
interpreter runs the kernels and a made-up clock times them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import tilewise as tw
from tilewise import backends, testing
from tilewise.cli import app
from tilewise.problem import Inputs, Options, Problem

pytest.importorskip("triton")
NAMES = ("config", "offline", "store", "tune")
config, offline, store, tuning = (import_module(f"tilewise.backends.triton.{name}") for name in NAMES)
interpreted = pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="Triton's interpreter is off")

TRITON: Any = backends.load("triton")
WORK = tuning.Workload(16, 16, "float32", "causal", b=1, n=70, h=2, g=1)
Sizes = config.Launch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def problem(d: int = 16, dtype: torch.dtype = torch.float32, **options: Any) -> Problem:
    x = torch.zeros(1, 70, 2, d, dtype=dtype)
    return Problem.describe(Inputs(x, x, x), Options(tw.Causal(), **options))


def keep(one: Sizes, name: str = "forward", **other: Any) -> Any:
    """Put sizes into the store as if they had been found."""
    p = problem()
    key = store.key_of(p, config.machine(p.device).name, name)._replace(**other)
    store.add({key: store.Found(one.block_m, one.block_n, one.warps, one.stages, one.apart, 1.0, 2.0)})
    return key


def fake(times: Callable[[Any], float], tried: list[Any]) -> Any:
    """A timer whose laps come from the sizes of the contender's last launch but a careful one."""

    def timer(calls: dict[str, Any], seconds: float) -> dict[str, list[float]]:
        jobs = {at: call.__closure__[0].cell_contents for at, call in calls.items()}
        launches = {at: [x for job in of for x in job.rest if isinstance(x, Sizes) and not x.noted] for at, of in jobs.items()}
        sizes = {at: found[-1] for at, found in launches.items()}
        tried.extend(sizes.values())
        return {at: [times(one), times(one), 9.0] for at, one in sizes.items()}

    return timer


# the store


def test_sizes_lie_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", "~/here")
    assert store.path() == Path.home() / "here" / "sizes.json"
    monkeypatch.delenv("TILEWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert store.path() == Path("/xdg/tilewise/sizes.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.path() == Path.home() / ".cache/tilewise/sizes.json"


def test_calls_prefer_what_was_found(folder: Path) -> None:
    before = TRITON.configure(problem())
    mine = Sizes(32, 64, 4, 1, False)
    keep(mine)
    after = TRITON.configure(problem())
    assert after == replace(before, forward=mine)
    others = [problem(d=64), problem(dtype=torch.float16), problem(softcap=2.0), replace(problem(), mask=tw.Full())]
    assert mine not in [TRITON.configure(p).forward for p in others]
    assert TRITON.configure(problem(d=11)).forward == mine  # as many columns in a tile
    store.clear()
    assert TRITON.configure(problem()) == before and not store.clear()


@pytest.mark.parametrize("other", [{"gpu": "another"}, {"triton": "1.0"}, {"kernels": "changed"}, {"score": "bias"}])
def test_sizes_of_something_else_are_not_used(other: dict[str, str]) -> None:
    before = TRITON.configure(problem())
    keep(Sizes(32, 64, 4, 1), **other)
    assert TRITON.configure(problem()) == before


@pytest.mark.parametrize(
    "bad",
    [(256, 64, 4, 1), (48, 64, 4, 1), (32, 64, 3, 1), (32, 64, 4, 0), (32, 64, 4, "1"), (16, 64, 4, 1)],
    ids=["more rows than blocks have", "no power of two", "warps", "stages", "type", "no multiple of careful blocks"],
)
def test_sizes_that_kernels_cannot_have_are_not_used(bad: tuple) -> None:
    before = TRITON.configure(problem())
    keep(Sizes(*bad))
    assert TRITON.configure(problem()) == before


def broken(text: str, says: str, folder: Path) -> None:
    """The built-in sizes are used where the file is like this, and the user hears of it once."""
    before = TRITON.configure(problem())
    folder.mkdir(exist_ok=True)
    (folder / "sizes.json").write_text(text)
    store._entries.cache_clear()
    with pytest.warns(UserWarning, match=says):
        assert TRITON.configure(problem()) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TRITON.configure(problem()) == before


BROKEN = "", "{", "[]", "\x00", '{"format": 1}', '{"format": 1, "entries": [{"key": {}, "found": {}}]}'


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_is_ignored_with_one_warning(text: str, folder: Path) -> None:
    broken(text, r"sizes.json is broken .* run `tilewise tune` again; the built-in sizes are used", folder)
    key = keep(Sizes(32, 64, 4, 1))  # and written anew
    assert list(store.entries()) == [key] and TRITON.configure(problem()).forward == Sizes(32, 64, 4, 1)


@pytest.mark.parametrize("version", [0, 2, "1"])
def test_a_file_of_another_version_is_ignored_with_one_warning(version: Any, folder: Path) -> None:
    broken(json.dumps({"format": version, "entries": []}), f"is of format {version}, not 1", folder)


def test_a_file_that_cannot_be_read_is_ignored_with_one_warning(folder: Path) -> None:
    (folder / "sizes.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot read its tuned sizes"):
        TRITON.configure(problem())


def test_a_folder_that_cannot_be_written_is_left_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = keep(Sizes(32, 64, 4, 1))

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        keep(Sizes(64, 64, 4, 1))
    assert list(store.entries()) == [key] and os.listdir(folder) == ["sizes.json"]
    assert store.entries()[key].block_m == 32


def test_what_is_added_comes_beside_what_is_there() -> None:
    keys = [keep(Sizes(32, 64, 4, 1), name) for name in ("forward", "dq")]
    assert sorted(store.entries()) == sorted(keys)


# the search


@interpreted
def test_the_fastest_choice_is_found_and_kept_and_used() -> None:
    tried: list[Any] = []
    bench = tuning.Bench(WORK, "cpu")
    asked = [bench.builtin.forward, *(Sizes(m, n, 4, s) for m, n, s in ((32, 32, 1), (32, 64, 1), (64, 32, 2)))]
    timer = fake(lambda one: 1e-6 * one.block_m * one.block_n, tried)
    outcome = tuning.search(bench, "forward", asked, timer, 0.0, lambda text, steps: None)
    assert set(tried) == set(asked) and not outcome.skipped
    assert outcome.found.launch(asked[0]) == asked[1] and outcome.found.microseconds == 1024 and outcome.gain > 1
    store.add({outcome.key: outcome.found})
    assert TRITON.configure(bench.problem).forward == asked[1]


@interpreted
def test_the_built_in_sizes_stay_where_nothing_is_faster() -> None:
    bench = tuning.Bench(WORK, "cpu")
    first = bench.builtin.dq
    timer = fake(lambda one: 1.0 + (one != first), [])
    outcome = tuning.search(bench, "dq", [first, Sizes(32, 32, 4, 1)], timer, 0.0, lambda text, steps: None)
    assert outcome.found.launch(first) == first and outcome.gain == 1


@interpreted
def test_choices_that_fail_or_compute_something_else_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tuning.Bench.answer
    wrong, fails = Sizes(32, 32, 4, 1), Sizes(32, 64, 4, 1)

    def answer(self: Any, name: str, one: Sizes) -> list[Tensor]:
        if one == fails:
            raise RuntimeError("first line\nout of resource\n")
        return [t + (one == wrong) for t in right(self, name, one)]

    monkeypatch.setattr(tuning.Bench, "answer", answer)
    bench, tried = tuning.Bench(WORK, "cpu"), []
    outcome = tuning.search(bench, "dk_dv", [wrong, fails], fake(lambda one: 1.0, tried), 0.0, lambda text, steps: None)
    assert outcome.skipped[fails] == "RuntimeError: out of resource" and "its result is off by" in outcome.skipped[wrong]
    assert set(tried) == {bench.builtin.dk_dv}


@interpreted
@pytest.mark.parametrize("name", ["forward", "dq", "dk_dv", "dbias"])
def test_every_choice_gives_the_same_up_to_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = replace(WORK, bias=True, mask="table", b=2)
    bench = tuning.Bench(work, "cpu")
    few = tuning.choices(config.machine("cpu"), bench, name)[:6]
    monkeypatch.setattr(tuning, "choices", lambda *_: few)
    [outcome] = tuning.tune(work, [name], "cpu", fake(lambda one: 1.0, []))
    assert not outcome.skipped and outcome.key.score == "bias" and outcome.key.mask == "TABLE"
    store.add({outcome.key: outcome.found})
    x = bench.x
    testing.assert_right(x, Options(work._mask(x.q.device)), "triton")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("d", [16, 80, 512])
def test_choices_are_legal_and_few(d: int, dtype: str) -> None:
    work = replace(WORK, d=d, e=d, dtype=dtype, bias=True)
    bench, machine = tuning.Bench(work, "cpu"), config.machine("cpu")
    for name in work.passes:
        found, careful = tuning.choices(machine, bench, name), bench.builtin.careful
        assert found[0] == getattr(bench.builtin, name) and len(set(found)) == len(found) <= 144
        kept = [store.Found(x.block_m, x.block_n, x.warps, x.stages, x.apart, 1.0, 1.0) for x in found]
        assert all(one.legal for one in kept)
        assert not any(one.block_m % careful.block_m or one.block_n % careful.block_n for one in found)
    plain = tuning.choices(machine, tuning.Bench(replace(work, mask="full"), "cpu"), "forward")
    assert all(one.apart for one in plain)


def test_a_pass_that_there_is_not_is_refused() -> None:
    with pytest.raises(tw.OptionError, match="'dbias' is none of forward, dq, dk_dv without a bias"):
        next(tuning.tune(WORK, ["dbias"], "cpu", fake(lambda one: 1.0, [])))
    with pytest.raises(tw.OptionError, match="dtype must be one of"):
        replace(WORK, dtype="int8")


COMPILE = """
import sys
from dataclasses import replace
from triton.backends.compiler import GPUTarget
from tilewise.backends.triton import config, tune

if __name__ == "__main__":
    work = tune.Workload(16, 16, "float16", "full", n=64)
    base = tune.Bench(work, "cpu").builtin
    asked = [config.Launch(64, 64, 4, 1), config.Launch(128, 128, 8, 8), config.Launch(48, 64, 4, 1)]
    built = base, GPUTarget("cuda", 90, 32), 40000
    said = []
    failed = tune.compile_all(work, "forward", asked, built, 2, lambda text, steps: said.append(text))
    print([failed.get(one, "") for one in asked], said)
"""


def test_choices_are_compiled_into_tritons_cache_by_other_processes(tmp_path: Path) -> None:
    script, cache = tmp_path / "compile_choices.py", tmp_path / "triton"
    script.write_text(COMPILE)
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        found.append((done.stdout, len(list(cache.glob("*/forward_kernel.cubin")))))
    assert found[0] == found[1] and found[0][1] == 2  # the second time, nothing is compiled again
    assert "bytes of shared memory where there are 40000" in done.stdout and "must be a power of 2" in done.stdout
    assert done.stdout.startswith("['', ") and done.stdout.count("forward: compiled") == 3


def test_without_processes_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("no processes here")

    monkeypatch.setattr(tuning, "ProcessPoolExecutor", refuse)
    said: list[str] = []
    assert tuning.compile_all(WORK, "forward", [], (None, None, 0), 2, lambda text, steps: said.append(text)) == {}
    assert said == ["forward: no processes to compile in (PermissionError); compiling one by one"]


# the command


def tilewise(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160"})


def test_the_command_shows_and_forgets(folder: Path) -> None:
    assert f"{folder / 'sizes.json'}: nothing is kept" in tilewise("tune", "--show").stdout
    keep(Sizes(32, 64, 4, 1, False))
    keep(Sizes(64, 64, 4, 1), "dq", kernels="others")
    shown = tilewise("tune", "--show").stdout
    assert "2 entries" in shown and "cpu cuda90, Triton" in shown and "2.00×" in shown
    assert "32 × 64, 4 warps, 1 stages, one loop" in shown and shown.count("of other kernels: not used") == 1
    assert "removed" in tilewise("tune", "--clear").stdout and "there was no" in tilewise("tune", "--clear").stdout


def test_the_command_tunes_and_keeps(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from tilewise.cli import tune as command

    key = store.key_of(problem(), "cuda90", "forward")
    best = store.Found(32, 64, 4, 1, True, 10.0, 15.0)
    outcome = tuning.Outcome(key, best, Sizes(64, 64, 4, 1), {}, {Sizes(1, 1, 1, 1): "no"})
    asked: list[Any] = []

    def found(work: Any, names: list[str], *_: Any) -> Any:
        asked.append((str(work), names))
        yield outcome

    monkeypatch.setattr(command, "_check", lambda device: None)
    monkeypatch.setattr(tuning, "tune", found)
    result = tilewise("tune", "--d", 64, "--mask", "causal", "--g", 4, "--bias", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert asked == [("b=2 n=4096 h=16 g=4 d=64 bfloat16 mask=causal bias", ["forward", "dq", "dk_dv", "dbias"])]
    assert "1.50×" in result.stdout and "1 choices, 1 of them do not run" in result.stdout
    assert list(store.entries()) == [key]


def test_the_command_refuses_what_has_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    result = tilewise("tune", "--device", "cpu")
    assert result.exit_code == 2 and "device 'cpu' has no sizes to tune: GPUs have" in result.stderr


def test_the_command_says_first_that_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tilewise.cli import tune as command

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(command, "_check", lambda device: None)
    result = tilewise("tune")
    assert result.exit_code == 2 and "could not be kept" in result.stderr
