"""Machines as values: their figures agree with one another and with what is known, and wrong names are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilewise import machine
from tilewise._errors import OptionError
from tilewise.machine import KB, MACHINES, MB, Machine, find, measure

RIDGES = {
    "t4": 203, "a100-40gb": 201, "a100": 153, "rtx4090": 164, "h100": 295, "h200": 206, "b200": 281, "mi300x": 247,
}  # fmt: skip
"""FLOP a byte, float16: data-sheet rate over data-sheet bandwidth."""

EXPONENTIALS = {"t4": 1.02, "a100": 2.44, "rtx4090": 5.16, "h100": 3.86, "b200": 4.38, "mi300x": 10.2}
"""10¹² a second."""


def problems(one: Machine) -> list[str]:
    """What cannot be true of a machine."""
    wrong = []
    if not one.block_bytes <= one.shared_bytes:
        wrong.append("one tile may use more than there is")
    if one.l2 is not None and not one.hbm < one.l2:
        wrong.append("L2 is slower than memory")
    if one.l2 is not None and one.shared is not None and not one.l2 < one.shared:
        wrong.append("shared memory is slower than L2")
    if not one.rate("float32") > one.rate("float64") * 0.99:
        wrong.append("float64 is faster than float32")
    if "float16" in one.flops and not one.rate("float16") > one.rate("float32"):
        wrong.append("float32 is faster than float16")
    if not one.exponentials < one.elementwise:
        wrong.append("an exponential is faster than an addition")
    return wrong


@pytest.mark.parametrize("name", MACHINES)
def test_figures_agree_with_one_another(name):
    assert problems(MACHINES[name]) == []


def test_figures_that_disagree_are_found():
    right = MACHINES["h100"]
    assert problems(replace(right, hbm=right.hbm * 10)) == ["L2 is slower than memory"]
    assert problems(replace(right, block_bytes=2 * right.shared_bytes)) == ["one tile may use more than there is"]
    assert problems(replace(right, exponentials=1e15)) == ["an exponential is faster than an addition"]


@pytest.mark.parametrize("name", RIDGES)
def test_ridges(name):
    assert round(MACHINES[name].ridge("float16")) == RIDGES[name]


@pytest.mark.parametrize("name", EXPONENTIALS)
def test_exponentials(name):
    assert MACHINES[name].exponentials / 1e12 == pytest.approx(EXPONENTIALS[name], rel=0.005)


def test_every_machine_has_a_ridge_that_is_tested():
    assert set(RIDGES) == set(MACHINES)


@pytest.mark.parametrize(
    ("written", "name"), [("H200", "H200"), ("rtx 4090", "RTX 4090"), ("A100-40GB", "A100 40GB"), ("a100", "A100 80GB SXM")]
)
def test_names_are_found_however_written(written, name):
    assert find(written).name == name


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(OptionError, match=r"machine 'tpu' is unknown; there are t4, .*h200.* and cpu, which is measured"):
        find("tpu")


def test_a_dtype_that_a_machine_lacks_is_refused():
    with pytest.raises(OptionError, match=r"T4 has no matrix units for bfloat16: it has float16, float32, float64"):
        find("t4").rate("bfloat16")


def test_float32_is_the_faster_of_ieee_steps_and_three_tf32_products():
    assert find("h100").rate("float32") == 494.7e12 / 3
    assert find("rtx4090").rate("float32") == 82.6e12


def test_readers_share_rows_by_instruction():
    assert [find("a100").readers(rows) for rows in (16, 64, 128)] == [1, 2, 4]
    assert [find("h100").readers(rows) for rows in (64, 128, 192)] == [1, 2, 3]


def test_this_processor_is_measured(monkeypatch):
    ran = []
    monkeypatch.setattr(machine, "_seconds", lambda call: ran.append(call()) or 1e-3)
    one = measure()
    assert set(one.flops) == {"float32", "float64"} and one.rate("float32") == pytest.approx(2 * 768**3 / 1e-3)
    assert one.hbm == pytest.approx(2 * 64 * MB / 1e-3) and one.multiprocessors >= 1
    assert one.register_bytes == 0 and one.block_bytes == one.shared_bytes > 0
    assert len(ran) == 5 and find("CPU") == one


def test_a_clock_takes_the_fastest_of_a_few_calls(monkeypatch):
    ticks = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(ticks))
    assert machine._seconds(lambda: None, times=3) == 1.0


def test_caches_are_read_where_the_system_tells(tmp_path):
    caches = [(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "2M"), (3, "?", "")]
    for index, (level, kind, size) in enumerate(caches):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    (tmp_path / "index9").mkdir()
    assert machine._caches(str(tmp_path)) == {1: 48 * KB, 2: 2 * MB}
    assert machine._caches(str(tmp_path / "nowhere")) == {}


def test_a_measured_machine_is_fast_enough_to_be_true():
    seconds = machine._seconds(lambda: np.ones(10).sum())
    assert 0 < seconds < 1
