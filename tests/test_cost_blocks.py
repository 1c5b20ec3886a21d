"""Rooflines, orders side by side, and the choice of a tile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilewise import cost
from tilewise.cost import Cost, Moved, Passes
from tilewise.cost.blocks import FRUGAL, choices, elementwise, fit, footprint, least_traffic, paper_blocks, weigh
from tilewise.cost.roofline import in_turn, roofline
from tilewise.machine import KB, find
from tilewise.mask import Causal, Full, Mask
from tilewise.problem import Inputs, Options, Problem
from tilewise.tiles import TileShape


def problem_of(n: int, d: int, mask: Mask = Full(), dtype: str = "float16", heads: int = 1) -> Problem:
    x = np.broadcast_to(np.float32(0), (1, n, heads, d))
    return replace(Problem.describe(Inputs(x, x, x), Options(mask)), dtype=dtype)


# roofline


def test_a_roofline_is_each_part_alone_and_the_slowest():
    machine = find("a100-40gb")
    moved = {"k": Moved(read=3 * 10**9, write=10**9, least=1555 * 10**6)}
    price = Cost(312 * 10**9, 2 * 10**9, moved, chip_bytes=5, reader_bytes=7)
    one = roofline(price, machine, "float16", readers=3)
    assert one.seconds["matrix"] == pytest.approx(1e-3) and one.seconds["HBM"] == pytest.approx(1e-3)
    assert one.seconds["exp"] == pytest.approx(2e9 / (108 * 16 * 1.41e9))
    assert one.seconds["L2"] == pytest.approx(4e9 / (5120 * 1.41e9))
    assert one.seconds["shared"] == pytest.approx((5 + 3 * 7) / (108 * 128 * 1.41e9))
    assert one.bound == max(one.seconds.values()) and one.seconds[one.binds] == one.bound
    bare = roofline(price, machine, "float16", cached=False)
    assert bare.binds == "HBM" and bare.bound == pytest.approx(4e9 / 1555e9)
    assert "L2" not in roofline(price, find("b200"), "float16").seconds


def test_kernels_in_turn_add_their_bounds():
    machine = find("a100")
    products, copies = Cost(flops=10**12), Cost(tensors={"x": Moved(least=10**10)})
    both = in_turn(roofline(one, machine, "float16") for one in (products, copies))
    assert both.bound == pytest.approx(1e12 / 312e12 + 1e10 / 2039e9)
    assert both.binds == "HBM" and both.seconds["matrix"] == pytest.approx(1e12 / 312e12)


@pytest.mark.parametrize(
    ("name", "standard_hbm", "matrix"),
    [("t4", 78.9, 14.8), ("a100-40gb", 16.2, 3.08), ("h100", 7.5, 0.97), ("h200", 5.26, 0.97), ("b200", 3.15, 0.43)],
)
def test_figure_2_on_other_machines(name, standard_hbm, matrix):
    problem, machine = replace(problem_of(1024, 64, heads=1024), dtype="float16"), find(name)
    stored = roofline(cost.standard(problem) + cost.standard(problem, True), machine, "float16")
    shape = TileShape(128, 64)
    flash = cost.keys_outside.backward(problem, shape) + cost.forward(problem, shape)
    assert 1e3 * stored.seconds["HBM"] == pytest.approx(standard_hbm, rel=0.01)
    assert 1e3 * roofline(flash, machine, "float16").seconds["matrix"] == pytest.approx(matrix, rel=0.01)


# orders


def test_orders_are_the_costs_of_their_kernels():
    problem, machine, shape = problem_of(512, 64, Causal()), find("h200"), TileShape(64, 32)
    found = {order.name: order for order in cost.orders(problem, machine, shape, Passes(mask="add"))}
    assert found["standard"].cost("backward").bytes >= cost.standard(problem, True, Passes(mask="add")).bytes
    assert found["standard"].cost("forward").least_bytes == cost.standard(problem, False, Passes(mask="add")).bytes
    assert found["FlashAttention-2"].cost("forward") == cost.forward(problem, shape)
    assert found["FlashAttention-2"].cost("backward").bytes == cost.backward(problem, shape).bytes
    assert found["FlashAttention-1"].shape == paper_blocks(228 * KB // 2, 64)
    assert "forward" not in found["FlashAttention-2, atomic"].kernels
    for order in found.values():
        for way in order.kernels:
            slow, fast = (order.roofline(way, machine, "float16", cached) for cached in (False, True))
            assert slow.bound >= fast.bound > 0 and order.on_chip(way, machine) >= 0


# tiles


def test_the_papers_rule():
    assert paper_blocks(51200, 64) == (64, 200) and paper_blocks(51200, 128) == (100, 100)
    assert paper_blocks(1, 64) == (1, 1)


def test_a_footprint_is_what_lies_on_chip():
    assert footprint(TileShape(3, 5), 7, 2) == {"q": 21, "k": 35, "v": 10, "o": 6, "s": 15, "m, l": 6}


@pytest.mark.parametrize(("d", "kilobytes"), [(64, 48), (64, 228), (128, 100), (256, 164)])
def test_the_tile_of_least_traffic_is_that_of_a_search(d, kilobytes):
    elements, problem = kilobytes * KB // 2, problem_of(1024, d)
    sides = range(16, 1025, 16)
    fitting = [TileShape(r, c) for r in sides for c in sides if sum(footprint(TileShape(r, c), d, d).values()) <= elements]
    fewest = min(-(-problem.n // shape.block_m) for shape in fitting)  # bytes of k and v grow with the blocks of query rows
    best = least_traffic(elements, problem)
    assert best is not None and best in fitting and -(-problem.n // best.block_m) == fewest


def test_no_tile_fits_too_little_memory():
    assert least_traffic(64, problem_of(128, 64)) is None


def test_what_a_tile_takes():
    problem, machine = problem_of(512, 128), find("h100")
    one = fit(TileShape(128, 128), machine, problem)
    assert one.shared_bytes == 2 * (128 * 128 + 2 * 128 * 256)
    assert one.register_bytes == 4 * (128 * 128 + 128 * 128 + 2 * 128) + 2 * 128 * 128 and one.at_once == 1
    assert fit(TileShape(64, 32), machine, problem).at_once > 1
    assert fit(TileShape(512, 256), machine, problem).at_once == 0


def test_elementwise_operations_equal_a_count_by_hand():
    # n = s = 4 in tiles of 2 × 2, d = 3: 16 scores of 5 each; 2 visits of every row, each of e + 4; at the end e + 2 a row
    problem = problem_of(4, 3)
    assert elementwise(cost.forward(problem, TileShape(2, 2)), problem) == 16 * 5 + 4 * 2 * (3 + 4) + 4 * (3 + 2)


@pytest.mark.parametrize("name", ["a100", "h100", "mi300x", "t4"])
@pytest.mark.parametrize("d", [64, 128])
def test_the_chosen_tile_fits_and_nothing_as_fast_moves_less(name, d):
    machine, problem = find(name), problem_of(1024, d)
    found = choices(problem, machine)
    chosen, fastest = found[0], min(one.seconds for one in found)
    assert chosen.fit.at_once and chosen.fit.shared_bytes <= machine.block_bytes
    assert chosen.fit.register_bytes < machine.register_bytes
    assert chosen.seconds <= FRUGAL * fastest
    assert not [one for one in found if one.seconds <= FRUGAL * fastest and one.cost.bytes < chosen.cost.bytes]
    assert chosen.shape.block_m % machine.rows == 0
    assert all(weigh(one.shape, one.fit, problem, machine) == one for one in found[:3])


@pytest.mark.parametrize(("d", "tile"), [(64, (192, 144)), (128, (192, 112)), (256, (128, 80))])
def test_tiles_of_a_hopper(d, tile):
    assert choices(problem_of(4096, d), find("h100"))[0].shape == tile


def test_a_choice_follows_the_machine():
    """With L2 ten times slower, rows are worth more than anything; with little memory, the tile shrinks."""
    machine, problem = find("h100"), problem_of(2048, 128)
    assert machine.l2 is not None
    right = choices(problem, machine)[0]
    slow = choices(problem, replace(machine, l2=machine.l2 / 10))[0]
    assert slow.shape.block_m > right.shape.block_m and slow.slowest == "L2"
    small = choices(problem, replace(machine, block_bytes=machine.block_bytes // 4))[0]
    assert small.shape.block_m < right.shape.block_m


def test_a_machine_without_registers_holds_everything_in_one_memory():
    machine = replace(find("a100"), register_bytes=0, l2=None, shared=None, shared_bytes=512 * KB, block_bytes=512 * KB)
    problem = problem_of(512, 64, dtype="float32")
    one = choices(problem, machine)[0]
    assert one.fit.register_bytes == 0 and 0 < one.fit.shared_bytes <= 512 * KB and one.slowest == "HBM"


def test_nothing_fits_a_head_too_large():
    assert choices(problem_of(64, 4096), find("t4")) == []
