"""The paper's claims against the model: what is reproduced, by which count, and what is said not to be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner, Result

from tilewise.bench import traffic
from tilewise.bench.report import Note, Record
from tilewise.bench.traffic import TrafficRow, Workload
from tilewise.cli import app
from tilewise.cli import paper as command
from tilewise.cost import paper
from tilewise.explain import iomodel, ioplot
from tilewise.machine import find
from tilewise.softmax import absorb, empty


def tilewise(*arguments: object, width: int = 200) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": str(width)})


# the row at the beginning


def test_the_row_in_two_blocks():
    state = empty(rows=1, e=1)
    sums = []
    for block in ([1.0, 3.0], [2.0, 5.0]):
        state = absorb(state, np.array([block]), np.ones((2, 1)))
        sums.append(f"{state.l[0]:.3f}")
    assert sums == ["1.135", "1.203"]
    assert state.l[0] == pytest.approx(np.exp(np.array([1, 3, 2, 5]) - 5.0).sum(), rel=1e-15)


# figure 2


def test_standard_attention_with_mask_and_dropout_comes_to_the_published_bytes():
    ways = paper.standard_ways()
    published = paper.FIGURE2["standard"].gb
    near = [names for names, way in ways.items() if abs(way.cost.bytes / 1e9 / published - 1) < 0.1]
    assert near == ["mask-add,dropout"]  # and no other way does, within 10 %
    assert ways["mask-add,dropout"].cost.bytes / 1e9 == pytest.approx(published, rel=0.002)
    gigabytes = [25.23, 29.53, 35.97, 40.27, 44.56, 48.86, 50.73]
    assert [round(way.cost.bytes / 1e9, 2) for way in ways.values()] == gigabytes
    assert [sum(way.parts) for way in ways.values()] == [11, 13, 16, 18, 20, 22, 22]


def test_flash_attention_with_nothing_twice_comes_to_the_published_bytes():
    ways = paper.flash_ways()
    published = paper.FIGURE2["flash"].gb
    assert ways[0].cost.bytes / 1e9 == pytest.approx(published, rel=0.025)
    assert [round(way.cost.bytes / 1e9, 2) for way in ways] == [4.49, 5.75, 6.10, 3.86, 8.32]
    assert not [way for way in ways[1:] if abs(way.cost.bytes / 1e9 / published - 1) < 0.1]


def test_the_published_operations_are_not_reproduced_and_nothing_scales_ours():
    bounds = paper.bounds(find("a100-40gb"))
    ours = {who: bound.flops / 1e9 for who, bound in bounds.items()}
    assert round(ours["standard"], 1) == 824.6 and round(ours["flash"], 1) == 962.1
    one, two = (paper.FIGURE2[who].gflop for who in ("standard", "flash"))
    assert ours["standard"] / one > 12 and ours["flash"] / two > 12
    product = 2 * 1024**3 * 64 / 1e9
    assert (two - one) * 16 == pytest.approx(product, rel=0.002)


def test_bounds_lie_below_the_published_times():
    bounds = paper.bounds(find("a100-40gb"))
    assert bounds["standard"].binds == "HBM" and bounds["standard"].seconds == pytest.approx(25.9e-3, rel=0.001)
    assert bounds["flash"].binds == "matrix" and bounds["flash"].seconds == pytest.approx(3.08e-3, rel=0.002)
    assert all(1e3 * bound.seconds < paper.FIGURE2[who].ms for who, bound in bounds.items())


def test_blocks_of_256_to_512_keys_turn_from_memory_to_arithmetic():
    machine = find("a100-40gb")
    rows = paper.middle(machine)
    binds = {row.block_n: "memory" if row.hbm_s > row.matrix_s else "arithmetic" for row in rows}
    assert binds == {64: "memory", 128: "memory", 256: "memory", 512: "arithmetic", 1024: "arithmetic"}
    assert [round(row.lean / 1e9, 2) for row in rows] == [6.71, 3.42, 1.77, 0.95, 0.54]
    assert [row.block_n for row in rows if row.kilobytes * 1024 > machine.block_bytes] == [1024]


# theorem 2


def test_theorem_2_holds_of_key_tiles_outside():
    assert [f"{slope:+.3f}" for slope in paper.slopes("keys outside")] == ["+1.995", "+1.980", "-0.989"]
    n, d, elements = 8192, 64, 50_000
    constant = paper.traffic("keys outside", n, d, elements) / (n**2 * d**2 / elements)
    assert 12 <= constant <= 12.5


def test_query_tiles_outside_need_their_own_tile():
    assert paper.slopes("queries outside")[2] == 0
    assert paper.slopes("the best tile")[2] == pytest.approx(-1, abs=0.06)
    assert paper.slopes("standard")[1:] == pytest.approx((0, 0), abs=0.02)


def test_ratios_to_standard_attention():
    found = {(one.d, one.kilobytes): one for one in paper.ratios()}
    shown = {at: [f"{x:.2f}" for x in (one.outside, one.same, one.least)] for at, one in found.items()}
    assert shown[64, 100] == ["4.08", "2.00", "9.92"] and shown[128, 100] == ["1.04", "1.57", "2.45"]
    assert found[128, 100].four == 1 and f"{found[128, 100].whole:.2f}" == "1.20"
    assert found[256, 48].outside < 1  # d² is larger than M: storing the scores moves less


def test_counted_runs_are_the_model_and_their_exponents_are_fitted():
    for n, d, elements in ((256, 16, 2048), (384, 32, 4096), (128, 8, 512)):
        point = iomodel.counted(n, d, elements)
        assert point.accesses == paper.traffic("keys outside", n, d, elements)
    line = [iomodel.Point(n, 64, 50_000, 7 * n**1.75) for n in (64, 128, 512)]
    assert iomodel.fitted("N", line) == pytest.approx(1.75)
    line = [iomodel.Point(64, d, 50_000, 3 / d) for d in (16, 32, 64)]
    assert iomodel.fitted("d", line) == pytest.approx(-1)


# eager torch is what the model counts


class Traffic(TorchDispatchMode):
    """How often matrices as large as the scores are read or written by operations that are no views."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.passes = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            [x for x in some if isinstance(x, torch.Tensor) and x.numel() == self.size]
            for some in (args, result if isinstance(result, tuple) else (result,))
        )
        same = {x.untyped_storage().data_ptr() for x in given} & {x.untyped_storage().data_ptr() for x in made}
        if not same or func._schema.is_mutable:
            self.passes += len(given) + len(made)
        return result


@pytest.mark.parametrize(("passes", "forward", "both"), [("", 4, 11), ("mask-add", 6, 13)])
def test_eager_attention_makes_the_passes_that_are_counted(passes, forward, both):
    work = Workload("tiny", "standard", passes, b=2, n=37, h=3, d=5, dtype="float32")
    size = 2 * 3 * 37 * 37
    with Traffic(size) as one:
        traffic.prepare(work, "forward", "cpu")()
    call = traffic.prepare(work, "backward", "cpu")
    with Traffic(size) as two:
        call()
    assert (one.passes, one.passes + two.passes) == (forward, both)


def test_a_pass_more_is_seen():
    with Traffic(6) as one:
        _ = torch.ones(2, 3) * 2 + 1
    assert one.passes == 1 + 2 + 2


# the command


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a second instead of several."""
    monkeypatch.setattr(iomodel, "BASE", {"N": 512, "d": 16, "M": 4096})
    monkeypatch.setattr(iomodel, "VARIED", {"N": (128, 256, 512), "d": (8, 16, 32), "M": (2048, 4096, 8192)})
    monkeypatch.setattr(ioplot, "BASE", iomodel.BASE)
    monkeypatch.setattr(ioplot, "VARIED", iomodel.VARIED)
    monkeypatch.setattr(ioplot, "LINES", iomodel.VARIED)


def record_of(rows: list[TrafficRow], gpu: str = "Testing GPU 9000", date: str = "2026-11-30") -> dict[str, Any]:
    return {"machine": {"gpus": [gpu]}, "date": date, "rows": [row.json() for row in rows]}


def rows_of(who: str, passes: str, dram: float) -> list[TrafficRow]:
    model = {"least_bytes": 10**9, "asked_bytes": 4 * 10**9, "flops": 1}
    return [TrafficRow("figure 2", way, who, passes, 1.5, dram, 3e9, 400e9, model) for way in ("forward", "backward")]


@pytest.mark.usefixtures("small")
def test_the_command_shows_published_model_and_measured_apart(tmp_path: Path):
    path, png = tmp_path / "a-paper.json", tmp_path / "a.png"
    found = record_of([*rows_of("standard", "mask-add,dropout", 20.5e9), *rows_of("tilewise", "", 1.25e9)])
    path.write_text(json.dumps(found))
    result = tilewise("paper", "--measured", path, "--plot", png)
    assert result.exit_code == 0, result.output
    assert "1.135" in result.stdout and "1.203" in result.stdout
    line = next(line for line in result.stdout.splitlines() if line.strip().startswith("additive mask, dropout"))
    assert line.split()[-2:] == ["40.27", "41.00"]
    operations = [line.split() for line in result.stdout.splitlines() if "GFLOP of products" in line]
    assert [line[-3:] for line in operations] == [["66.6", "824.6", "800.0"], ["75.2", "962.1", "800.0"]]
    assert "+1.995" in result.stdout and "not reproduced" in result.stdout and "Testing GPU 9000" in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")
    assert command.totals(command.load(path)) == {"standard": 41.0, "flash": 2.5}


def test_the_model_of_standard_attention_is_todays(tmp_path: Path):
    path = tmp_path / "a-paper.json"
    path.write_text(json.dumps(record_of([*rows_of("standard", "", 1e9), *rows_of("standard", "planted", 1e9)])))
    rows = {(row["passes"], row["pass"]): row["model"]["least_bytes"] for row in command.load(path).rows}
    scores = 64 * 16 * 1024**2 * 2
    assert rows["planted", "forward"] == rows["planted", "backward"] == 10**9
    assert rows["", "backward"] - rows["", "forward"] == pytest.approx((7 + 3 - 4) * scores, rel=0.05)


def test_records_of_one_device_are_one_and_the_latest_counts(tmp_path: Path):
    planted = {
        "b": record_of([*rows_of("standard", "", 1e9), *rows_of("tilewise", "", 2e9)], date="2026-11-29"),
        "a": record_of(rows_of("tilewise", "", 3e9), date="2026-11-30"),
        "c": record_of(rows_of("tilewise", "", 4e9), gpu="Another"),
    }
    for name, record in planted.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    found = command.by_device(command.load(path) for path in sorted(tmp_path.glob("*.json")))
    assert {(one.device, row["who"], row["pass"]): row["dram_bytes"] for one in found for row in one.rows} == {
        ("Testing GPU 9000", who, way): size
        for who, size in (("standard", 1e9), ("tilewise", 3e9))
        for way in ("forward", "backward")
    } | {("Another", "tilewise", way): 4e9 for way in ("forward", "backward")}


@pytest.mark.usefixtures("small")
def test_without_a_record_the_measured_column_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    result = tilewise("paper")
    line = next(line for line in result.stdout.splitlines() if line.strip().startswith("additive mask, dropout"))
    assert line.split()[-2:] == ["40.27", "–"] and "measured: nothing yet" in result.stdout


@pytest.mark.parametrize("text", ["no json", "{}", '{"machine": {"gpus": []}}', '{"machine": 3, "rows": []}'])
def test_a_file_that_is_no_record_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    result = tilewise("paper", "--measured", path)
    assert result.exit_code == 2 and "is no record of `tilewise paper --measure`" in result.stderr
    assert tilewise("paper", "--measured", tmp_path / "missing.json").exit_code == 2


def test_measuring_needs_a_gpu():
    result = tilewise("paper", "--measure", "--device", "cpu")
    assert result.exit_code == 2 and "device 'cpu' has no hardware counters" in result.stderr


def test_an_interrupt_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def measured(works: list[Workload], *_: object) -> Iterator[TrafficRow | Note]:
        if works[0].who == "tilewise":
            raise KeyboardInterrupt
        yield rows_of("standard", "", 1e9)[0]
        yield Note("ncu", works[0].name, "forward", "it is planted")

    monkeypatch.setattr(command, "measure", measured)
    record, path = Record[TrafficRow]("planted"), tmp_path / "a.json"
    command.collect([Workload("a", "standard"), Workload("b", "tilewise")], "cpu", record, path)
    written = json.loads(path.read_text())
    assert len(written["rows"]) == 1 and written["done"] == 1 and "it is planted" in written["notes"][0]


# cost and blocks


def test_cost_prints_every_order_and_writes_every_number(tmp_path: Path):
    path = tmp_path / "cost.json"
    sizes = ("--n", 257, "--h", 4, "--g", 2, "--d", 64, "--mask", "causal & window(left=31)", "--dtype", "float16")
    result = tilewise("cost", *sizes, "--machine", "a100", "--ranks", 4, "--splits", 2, "--json", path)
    assert result.exit_code == 0, result.output
    names = ("standard", "FlashAttention-1", "FlashAttention-2", "FlashAttention-2, atomic", "decode, 2 splits")
    for words in (*names, "a ring of 4", "A100 80GB SXM"):
        assert words in result.stdout
    found = json.loads(path.read_text())
    assert found["ring"]["hops"] == 3 and found["problem"]["g"] == 2
    for row in found["orders"]:
        moved = row["tensors"].values()
        assert row["read_bytes"] == sum(x["read"] for x in moved) and row["least_bytes"] == sum(x["least"] for x in moved)
        assert row["bound_s"] <= row["uncached_bound_s"] and row["binds"] in row["seconds"]
    pairs = sum(min(i + 1, 32) for i in range(257))
    assert found["useful_flops"]["forward"] == 2 * 4 * pairs * 128


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("cost", "--machine", "abacus"), "machine 'abacus' is unknown; there are t4"),
        (("cost", "--machine", "t4"), "T4 has no matrix units for bfloat16"),
        (("cost", "--mask", "casual"), "expected one of full, causal"),
        (("cost", "--mask", "__import__('os')"), "expected one of full, causal"),
        (("cost", "--h", 6, "--g", 4), "axis h"),
        (("cost", "--passes", "relu"), "pass 'relu' is unknown"),
        (("cost", "--accounting", "creative"), "accounting 'creative' is unknown; there are lean"),
        (("cost", "--dropout", 1.5), "dropout"),
        (("blocks", "abacus"), "machine 'abacus' is unknown"),
        (("blocks", "t4"), "T4 has no matrix units for bfloat16"),
        (("paper", "--measure", "--device", "abacus"), "device 'abacus' cannot be used"),
    ],
)
def test_user_errors_are_one_line(arguments: tuple, says: str):
    result = tilewise(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_blocks_chooses_and_says_why():
    result = tilewise("blocks", "h100")
    assert result.exit_code == 0, result.output
    for words in ("chosen", "192 × 112", "powers of two", "paper's rule", "128 × 228", "bytes fall as 1/B_r", "⌈M/4d⌉ = 228"):
        assert words in result.stdout
    nothing = tilewise("blocks", "t4", "--dtype", "float16", "--d", 4096, "--n", 64)
    assert nothing.exit_code == 1 and "no tile of 16 query rows or more fits T4" in nothing.stdout
