"""The vector layer of the CPU backend, piece by piece against NumPy, in every width that this computer runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("llvmlite")

from cpu_code import run, runnable

from tilewise.backends.cpu import arithmetic, micro, pack, panel
from tilewise.backends.cpu.target import Target
from tilewise.backends.cpu.vector import BF16, F16, F32, INDEX, Code

RNG = np.random.default_rng(0)
widths = pytest.mark.parametrize("target", runnable(), ids=lambda t: f"{t.lanes} lanes")


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def apply(target: Target, function: Any, *inputs: np.ndarray) -> np.ndarray:
    """A function of vectors, on arrays that are whole vectors."""
    out = np.empty_like(inputs[0])
    arrays = {f"x{i}": x for i, x in enumerate(inputs)}

    def write(code: Code, w: Any) -> None:
        with code.loop(w.count) as i:
            at = i * code.vector_bytes
            code.store(w.out_ptr + at, function(code, *(code.load(getattr(w, f"x{n}_ptr") + at) for n in range(len(inputs)))))

    run(target, write, out=out, count=out.size // target.lanes, **arrays)
    return out


@widths
def test_operators_are_ieee(target):
    a, b = normal(64), normal(64)
    a[:4], b[2:6] = (np.nan, np.inf, -np.inf, 0), np.nan
    for write, right in (
        (lambda c, x, y: x + y, a + b),
        (lambda c, x, y: x - y * 2.0, a - b * 2),
        (lambda c, x, y: x / 3.0, a / np.float32(3)),
        (lambda c, x, y: c.greater(x, y), np.where(a > b, a, b)),
        (lambda c, x, y: c.lesser(x, y), np.where(a < b, a, b)),
        (lambda c, x, y: c.select(x.differs(y), x, 7.0), np.where(a != b, a, 7)),
    ):
        assert np.array_equal(apply(target, write, a, b), right.astype(np.float32), equal_nan=True)
    fused = (a[8:].astype(np.float64) * b[8:] + a[8:]).astype(np.float32)
    assert np.array_equal(apply(target, lambda c, x, y: c.fma(x, y, x), a, b)[8:], fused)


@widths
def test_integers_wrap_and_loops_count(target):
    out = np.zeros(8, np.int64)

    def write(code: Code, w: Any) -> None:
        total = code.variable(code.index(0))
        with code.loop(w.start, w.stop, 3) as i, code.when((i % 2).equals(0)):
            total.set(total.get() + i)
        code.put(w.out_ptr, total.get())
        with code.either(total.get() > 10) as (yes, no):
            with yes:
                code.put(w.out_ptr + 8, code.index(1))
            with no:
                code.put(w.out_ptr + 8, code.index(2))
        count = code.variable(code.index(0))
        with code.repeat() as leave:
            leave(count.get() >= 5)
            count.set(count.get() + 1)
        code.put(w.out_ptr + 16, count.get())
        lanes = code.numbered() * 3 + 1
        code.put(w.out_ptr + 24, code.most(lanes).to(INDEX))
        code.put(w.out_ptr + 32, code.least(lanes - 5).to(INDEX))
        code.put(w.out_ptr + 40, code.any(lanes.equals(4)).to(INDEX))
        code.put(w.out_ptr + 48, code.fetch_add(w.out_ptr + 56, 9))

    run(target, write, out=out, start=1, stop=14)
    assert out.tolist() == [4 + 10, 1, 5, 3 * (target.lanes - 1) + 1, -4, 1, 0, 9]


@widths
def test_transpose_totals_and_among(target):
    n = target.lanes
    x, out = normal(n, n), np.zeros((n + 2, n), np.float32)

    def write(code: Code, w: Any) -> None:
        rows = [code.load(w.x_ptr + r * code.vector_bytes) for r in range(n)]
        made = [*code.transpose(rows), code.totals(rows), code.among(rows[0], 4, lambda a, b: a + b)]
        for r, vector in enumerate(made):
            code.store(w.out_ptr + r * code.vector_bytes, vector)

    run(target, write, x=x, out=out)
    assert np.array_equal(out[:n], x.T)
    assert np.allclose(out[n], x.sum(1), atol=1e-5)
    assert np.allclose(out[n + 1], np.repeat(x[0].reshape(-1, 4).sum(1), 4), atol=1e-5)


@widths
@pytest.mark.parametrize("kind, dtype", [(BF16, torch.bfloat16), (F16, torch.float16), (F32, torch.float32)])
def test_conversions_are_those_of_torch(target, kind, dtype):
    halfway, largest = [1.00390625, 1.01171875], 65504.0  # between two bfloat16 numbers; of float16
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, *halfway, largest])
    x = torch.cat([torch.randn(200) * 10.0 ** torch.randint(-6, 6, (200,)), special])
    given, stored = x.numpy().copy(), x.to(dtype)
    out, back = np.zeros(len(x) * dtype.itemsize, np.int8), np.zeros(len(x), np.float32)

    def write(code: Code, w: Any) -> None:
        with code.loop(code.index(0), w.count, code.lanes) as i:
            left = code.lesser(w.count - i, code.index(code.lanes))
            code.store(w.out_ptr + i * dtype.itemsize, code.load(w.x_ptr + i * 4, F32, left), kind, left)
            code.store(w.back_ptr + i * 4, code.load(w.out_ptr + i * dtype.itemsize, kind, left), F32, left)

    run(target, write, x=given, out=out, back=back, count=len(x))
    assert np.array_equal(back, stored.float().numpy(), equal_nan=True)


@widths
def test_functions_are_accurate_and_keep_nan(target):
    special = [0, -0.0, -126.6, -1e4, -np.inf, np.nan, *[0] * 10]
    x = np.concatenate([np.linspace(-126, 0, 4096 - 16), special]).astype(np.float32)
    mine, right = apply(target, arithmetic.exp2, x), np.exp2(x.astype(np.float64))
    assert mine[-16] == 1 and np.all(mine[-14:-11] == 0) and np.isnan(mine[-11])
    assert np.max(np.abs(mine[:-16] / right[:-16] - 1)) < 2e-7
    x = np.concatenate([np.geomspace(1e-30, 1e30, 4094), [0, np.nan]]).astype(np.float32)
    mine = apply(target, arithmetic.log, x)
    assert mine[-2] == -np.inf and np.isnan(mine[-1])
    assert np.max(np.abs(mine[:-2] - np.log(x[:-2].astype(np.float64))) / np.maximum(np.abs(mine[:-2]), 1)) < 2e-7
    x = np.concatenate([np.linspace(-12, 12, 4000), np.geomspace(1e-20, 1, 92), [np.inf, -np.inf, np.nan, 0]])
    x = x.astype(np.float32)
    mine, right = apply(target, arithmetic.tanh, x), np.tanh(x.astype(np.float64))
    assert np.isnan(mine[-2]) and mine[-1] == 0
    assert np.max(np.abs(mine[:-4] - right[:-4]) / np.maximum(np.abs(right[:-4]), 1e-30)) < 6e-7


@widths
@pytest.mark.parametrize("begin", ["zero", "add", "rescale"])
@pytest.mark.parametrize("depth", [0, 1, 7, 64])
def test_product(target, begin, depth):
    rows, vectors = target.rows, target.vectors
    a, b, c = normal(rows, depth + 1), normal(depth + 1, target.panel), normal(rows, target.panel)
    alpha, before = normal(target.panel), c.copy()

    def write(code: Code, w: Any) -> None:
        function = micro.product(code.module, rows, vectors, begin)
        code.call(function, w.a_ptr, w.a_row, 4, w.b_ptr, 4 * target.panel, w.depth, w.c_ptr, 4 * target.panel, w.alpha_ptr)

    run(target, write, a=a, b=b, c=c, alpha=alpha, a_row=4 * (depth + 1), depth=depth)
    start = {"zero": 0 * before, "add": before, "rescale": before * alpha}[begin]
    assert np.allclose(c, start + a[:, :depth] @ b[:depth], atol=1e-5)


@widths
@pytest.mark.parametrize("count", [1, 5, 64])
@pytest.mark.parametrize("d", [1, 19, 40])
def test_packing_there_and_back(target, count, d):
    x, columns = normal(count + 1, d + 3), pack.key_columns(target, d)
    keys = np.full((count, columns), 9, np.float32)
    wide = pack.value_columns(target, d)
    values = np.full(wide * 70, 9, np.float32)
    dirty = np.zeros(1, np.int64)
    panels = np.full((wide, target.panel), 9, np.float32)
    out = np.full((target.lanes, d + 1), 9, np.float32)
    factor = np.where(np.arange(target.lanes) == 1, 0, 0.5).astype(np.float32)
    given = {"keys": keys, "values": values, "dirty": dirty, "panels": panels, "out": out, "factor": factor}

    def write(code: Code, w: Any) -> None:
        code.call(pack.pack_keys(code.module, F32), w.x_ptr, w.row, w.count, w.d, w.keys_ptr)
        code.put(w.dirty_ptr, code.call(pack.pack_values(code.module, F32), w.x_ptr, w.row, w.count, w.d, w.values_ptr, 70))
        code.call(pack.pack_queries(code.module, F32), w.x_ptr, w.row, w.count, w.d, w.panels_ptr, code.constant(2.0))
        code.call(pack.unpack_outputs(code.module, F32), w.panels_ptr, w.factor_ptr, w.d, w.out_ptr, 4 * (d + 1), w.count)

    for poison in (0.0, math.nan, math.inf):
        x[count - 1, d - 1] += np.float32(poison)
        run(target, write, x=x, row=4 * (d + 3), count=count, d=d, **given)
        assert np.array_equal(keys[:, :d], x[:count, :d], equal_nan=True) and not keys[:, d:].any()
        tiled = values.reshape(-1, 70, target.rows)[:, :count].transpose(1, 0, 2).reshape(count, -1)
        assert np.array_equal(tiled[:, :d], x[:count, :d], equal_nan=True) and not tiled[:, d:].any()
        assert dirty[0] == (poison != 0)
    lanes = np.minimum(np.arange(target.lanes), count - 1)
    assert np.array_equal(panels[:d, : target.lanes].T, 2 * x[lanes, :d], equal_nan=True)
    there = min(count, target.lanes)
    right = np.where(np.arange(there)[:, None] == 1, 0, x[:there, :d])
    assert np.array_equal(out[:there, :d], right, equal_nan=True) and (out[there:] == 9).all() and (out[:, d] == 9).all()


@widths
@pytest.mark.parametrize("marked", [False, True])
def test_weigh_is_absorb(target, marked):
    """One block of scores against `softmax.absorb`; a query that sees nothing, and NaN in one alone."""
    from tilewise.softmax import State, absorb

    keys, lanes = 11, target.panel
    s, m, l = normal(keys, lanes) * 3, normal(lanes), np.abs(normal(lanes))  # noqa: E741
    s[:, 0], m[0], l[0], s[3, 2], s[4, 5] = -np.inf, -np.inf, 0, np.nan, -np.inf
    natural = s.T.astype(np.float64) * math.log(2)
    right = absorb(State(m * math.log(2), l.astype(np.float64), np.zeros((lanes, keys))), natural, np.eye(keys))
    alpha = np.zeros(lanes, np.float32)

    def write(code: Code, w: Any) -> None:
        function = panel.weigh(code.module, target.vectors, marked)
        code.call(function, w.s_ptr, w.keys, w.m_ptr, w.l_ptr, w.alpha_ptr)

    run(target, write, s=s, m=m, l=l, alpha=alpha, keys=keys)
    clean = np.arange(lanes) != 2
    assert np.isnan(l[2]) and np.isnan(s[3, 2])
    assert np.allclose(l[clean], right.l[clean], rtol=1e-5) and np.allclose(s[:, clean], right.acc.T[:, clean], atol=1e-6)
    assert (s[:, 0] == 0).all() and bool(np.signbit(s[4, 5])) == marked and not np.signbit(s[:, clean][:, 1:][0]).any()


@widths
def test_hide(target):
    s, lanes = np.zeros((9, target.panel), np.float32), np.arange(target.panel, dtype=np.int32)
    first, past = lanes % 5, lanes % 7 + 2

    def write(code: Code, w: Any) -> None:
        code.call(panel.hide(code.module, target.vectors), w.s_ptr, 9, w.start, w.first_ptr, w.past_ptr)

    run(target, write, s=s, first=first, past=past, start=1)
    key = np.arange(1, 10)[:, None]
    assert np.array_equal(np.isneginf(s), ~((key >= first) & (key < past)))


@widths
def test_masked_loads_read_nothing_beyond(target):
    """A masked load at the end of a page, with nothing mapped behind it, does not fault."""
    import mmap

    page = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    array = np.frombuffer(page, np.float32)
    array[:] = 1
    out = np.zeros(target.lanes, np.float32)

    def write(code: Code, w: Any) -> None:
        code.store(w.out_ptr, code.load(w.x_ptr + (mmap.PAGESIZE - 4), F32, w.count))

    run(target, write, x=array, out=out, count=1)
    assert out.tolist() == [1.0] + [0.0] * (target.lanes - 1)
