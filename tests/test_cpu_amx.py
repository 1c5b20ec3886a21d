"""Kernels of the CPU backend that multiply tiles: that they compile anywhere, and what they compute where there are tiles."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("llvmlite")

from cpu_code import compiled, run, undefined
from llvmlite import binding as llvm

import tilewise as tw
from tilewise import backends, testing
from tilewise.backends.cpu import amx, amx_backward, amx_forward, amx_pack, choose, machinecode, selfcheck
from tilewise.backends.cpu.backward_kernel import Kinds
from tilewise.backends.cpu.micro import Begin
from tilewise.backends.cpu.target import AMX
from tilewise.backends.cpu.vector import BF16, F32, I32, Code
from tilewise.problem import Inputs, Options

CPU = backends.load("cpu")
TILED = choose.tiled()
needs_tiles = pytest.mark.skipif(TILED is None, reason="no tiles of bfloat16 here, or none for this process")

CONFIGURE, RELEASE = rb"\xc4\xe2\x78\x49[^\xc0]", rb"\xc4\xe2\x78\x49\xc0"
MULTIPLY = rb"\xc4\xe2[\x42\x46\x4a\x4e\x52\x56\x5a\x5e\x62\x66\x6a\x6e\x72\x76\x7a\x7e]\x5c"
"""ldtilecfg, tilerelease and tdpbf16ps as processors read them."""


@pytest.mark.skipif(llvm.llvm_version_info < choose.OLDEST, reason="an LLVM that calls bfloat16 otherwise")
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_it_compiles_without_its_hardware(kernel):
    module = amx_forward.write(AMX, BF16, BF16) if kernel == "forward" else amx_backward.write(AMX, Kinds(BF16, BF16))
    code = machinecode.compile(module)
    assert code[:4] == b"\x7fELF" and kernel.encode() in code and not undefined(code)
    assert len(re.findall(MULTIPLY, code)) > 10
    assert len(re.findall(CONFIGURE, code)) == len(re.findall(RELEASE, code)) == 1  # nobody finds tiles that are not his


# ---- pieces


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bits(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy()


def form(x: torch.Tensor, paired: bool, turned: bool) -> np.ndarray:
    """What `pack` is to make of a matrix: tiles "rows columns 16 32", rows and columns being those of tiles over the matrix."""
    high, wide = (32, 16) if paired else (16, 32)
    shape = -(-x.shape[0] // 32) * 32, -(-x.shape[1] // wide) * wide
    filled = np.zeros(shape, np.int16)
    filled[: x.shape[0], : x.shape[1]] = bits(x)
    tiles = filled.reshape(shape[0] // high, high, shape[1] // wide, wide).swapaxes(1, 2)
    if paired:  # pairs of rows side by side
        tiles = tiles.reshape(*tiles.shape[:2], 16, 2, 16).swapaxes(-1, -2)
    words = np.ascontiguousarray(tiles).reshape(*tiles.shape[:2], 16, 32).view(np.int32)
    return np.ascontiguousarray(words.swapaxes(-1, -2) if turned else words).view(np.int16)


@needs_tiles
@pytest.mark.parametrize("paired, turned", [(False, False), (False, True), (True, False), (True, True)])
def test_packing_is_that_of_numpy(paired, turned):
    assert TILED is not None

    def write(code: Code, w: Any) -> None:
        given = (w.x_ptr, w.stride, w.rows, w.columns, w.out_ptr, amx.LINE, amx.TILE, w.down)
        code.put(w.found_ptr, code.call(amx_pack.pack(code.module, paired, turned), *given))

    array = np.zeros(1)
    pack = compiled(TILED, write, x=array, out=array, found=array, stride=0, rows=0, columns=0, down=0)
    for rows, columns in ((1, 1), (16, 32), (37, 45), (64, 96), (70, 17)):
        for poison in (None, math.nan, math.inf, -math.inf):
            x = normal(rows, columns)
            if poison is not None:
                x[-1, -1] = poison
            right = form(x, paired, turned)
            far = torch.full((rows, columns + 3), math.nan, dtype=torch.bfloat16)  # what is beside it is not looked at
            far[:, :columns] = x
            out, found, down = np.full_like(right, 7), np.zeros(1, np.int64), right.shape[1] * amx.TILE
            pack(x=bits(far), out=out, found=found, stride=2 * far.shape[1], rows=rows, columns=columns, down=down)
            assert np.array_equal(out, right) and found[0] == (poison is not None)


@needs_tiles
@pytest.mark.parametrize("rows, columns, depth", [(1, 1, 1), (2, 2, 3), (3, 5, 2), (4, 2, 4)])
def test_a_product_of_tiles_is_that_of_numpy(rows, columns, depth):
    assert TILED is not None
    a, b = normal(16 * rows, 32 * depth), normal(32 * depth, 16 * columns, seed=1)
    before = normal(16 * rows, 16 * columns, seed=2).float().numpy()
    out = {"zero": np.full_like(before, 5), "add": before.copy()}
    left, right = form(a, False, False), np.ascontiguousarray(bits(b).reshape(16 * depth, 2, -1).swapaxes(1, 2))

    def write(code: Code, w: Any) -> None:
        given: tuple[tuple[Begin, Any], ...] = (("zero", w.zero_ptr), ("add", w.add_ptr))
        for how, address in given:
            tiles = (w.a_ptr, amx.LINE, depth * amx.TILE, amx.TILE, w.b_ptr, columns * amx.LINE, columns * amx.TILE)
            c = (address, columns * amx.LINE, columns * amx.TILE)
            code.call(amx.multiply(code.module, how), *tiles, *c, rows, columns, depth)

    def tiled(code: Code, w: Any) -> None:
        with amx.configured(code):
            write(code, w)

    run(TILED, tiled, a=left, b=right, **out)
    exact = a.double().numpy() @ b.double().numpy()
    assert np.allclose(out["zero"], exact, rtol=1e-5, atol=1e-5)
    assert np.allclose(out["add"], exact + before, rtol=1e-5, atol=1e-5)


@needs_tiles
def test_rounding_is_that_of_torch():
    assert TILED is not None
    special = torch.tensor([0.0, 1.00390625, 1.01171875, 3e38, 1e-30, math.inf, -math.inf, math.nan])
    x = torch.cat([torch.randn(24) * 10.0 ** torch.randint(-6, 6, (24,)), special]).numpy()
    paired, following = np.zeros(32, np.int16), np.zeros(32, np.int16)

    def write(code: Code, w: Any) -> None:
        first, second = code.load(w.x_ptr, F32), code.load(w.x_ptr + 64, F32)
        code.store(w.paired_ptr, amx.pair_up(code, first, second), I32)
        code.store(w.following_ptr, amx.follow(code, first, second), I32)

    run(TILED, write, x=x, paired=paired, following=following)
    right = torch.from_numpy(x).bfloat16()
    for found, order in ((following, right), (paired, right.view(2, 16).T.reshape(-1))):
        assert torch.equal(torch.from_numpy(found).view(torch.bfloat16).nan_to_num(7.0), order.nan_to_num(7.0))


# ---- passes


def draw(b: int, n: int, s: int, h: int, g: int, d: int, e: int) -> Inputs[torch.Tensor]:
    return Inputs(normal(b, n, h, d), normal(b, s, g, d, seed=1), normal(b, s, g, e, seed=2))


SIZES = [
    (1, 2, 1, 1, 1, 1, 1), (2, 16, 17, 2, 1, 16, 16), (1, 97, 301, 3, 3, 40, 37), (1, 149, 131, 2, 2, 72, 80),
    (1, 33, 673, 2, 1, 96, 17), (2, 161, 545, 6, 2, 64, 128),
    (1, 1, 1, 1, 1, 1, 1), (3, 1, 700, 7, 1, 37, 53), (2, 1, 129, 12, 4, 128, 64), (1, 1, 611, 5, 1, 80, 96),
]  # fmt: skip


@needs_tiles
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mask", [None, tw.Causal(), tw.Window(33, 8)], ids=["full", "causal", "window"])
def test_sizes(sizes, mask):
    testing.assert_right(draw(*sizes), Options(mask), "cpu")


@needs_tiles
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_any_scale(scale):
    testing.assert_right(draw(1, 65, 200, 2, 1, 24, 40), Options(tw.Causal(), scale=scale), "cpu")


@needs_tiles
def test_scores_that_grow_from_block_to_block():
    """The reference of a row changes in every chunk, and what has been summed up is multiplied by α."""
    x = draw(1, 40, 640, 2, 1, 32, 32)
    x.k[:] = (x.k.float() * torch.linspace(0, 12, 640)[None, :, None, None]).bfloat16()
    testing.assert_right(x, Options(), "cpu")
    testing.assert_right(Inputs(x.q, x.k.flip(1), x.v), Options(), "cpu")


@needs_tiles
def test_what_the_self_check_finds():
    assert selfcheck.broken("bfloat16") == ""
    x, do = selfcheck.small("bfloat16", 53)
    assert selfcheck.differences((x, do)) == []


HIDING = [tw.Causal(), tw.Window(5, 0), tw.Where(lambda b, h, i, j: j <= i)]


def everything(x: Inputs[torch.Tensor], mask: Any, **options: Any) -> list[torch.Tensor]:
    """o, lse and the gradients of q, k and v."""
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    o, lse = tw.attention_with_lse(*leaves, mask=mask, backend="cpu", **options)
    return [o, lse, *torch.autograd.grad(o, leaves, normal(*o.shape, seed=3))]


@needs_tiles
@pytest.mark.parametrize("mask", HIDING, ids=["causal", "window", "where"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_a_hidden_key_holds_is_not_read(mask, poison):
    """Results differ by how weights are rounded: those of a block in which something is not finite are not."""
    x, positions = draw(1, 101, 150, 2, 1, 19, 23), (tw.Positions(101), tw.Positions(150))
    right = everything(x, mask, positions=positions)
    x.k[:, 101:], x.v[:, 101:] = poison, poison
    found = everything(x, mask, positions=positions)
    assert not found[3][:, 101:].any() and not found[4][:, 101:].any()
    for mine, other in zip(found, right, strict=True):
        assert (mine - other).float().norm() < 2**-8 * other.float().norm()


@needs_tiles
def test_what_a_hidden_row_holds_is_not_read():
    """A row of q or do that is not finite reaches the keys that it sees, and no others."""
    x = draw(1, 101, 150, 2, 1, 19, 23)
    right = everything(x, tw.Window(5, 0), positions=(tw.Positions(101), tw.Positions(150)))
    x.q[:, 70, 0, 3] = math.inf
    found = everything(x, tw.Window(5, 0), positions=(tw.Positions(101), tw.Positions(150)))
    for mine, other in zip(found[3:], right[3:], strict=True):
        assert mine[:, 65:71].isnan().any()
        for part in (slice(0, 65), slice(71, 150)):
            assert (mine - other)[:, part].float().norm() < 2**-8 * other.float().norm()


@needs_tiles
def test_a_visible_nan_reaches_exactly_the_rows_that_see_it():
    for mask in HIDING:
        x = draw(1, 150, 150, 2, 1, 19, 23)
        x.v[:, 101, :, 3] = math.nan
        found = tw.attention(x.q, x.k, x.v, mask=mask, backend="cpu")
        nan = found.isnan()
        assert nan[:, 101, :, 3].all() and nan[..., 3].sum() == nan.sum() and not nan[:, :101].any()
        assert nan[:, 107:].any() == (not isinstance(mask, tw.Window))


# ---- threads


def gradients(x: Inputs[torch.Tensor]) -> list[torch.Tensor]:
    return everything(x, tw.Causal() & tw.Window(left=301))


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_tiles
def test_results_are_bit_equal_whatever_the_threads(torch_threads):
    x = draw(2, 331, 641, 6, 3, 40, 40)
    found = []
    for count in (1, 2, 8, 1):
        torch_threads(count)
        found.append([*gradients(x), *gradients(Inputs(x.q[:, -1:], x.k, x.v))])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_tiles
def test_products_of_torch_are_none_the_worse(torch_threads):
    """oneDNN has tiles of its own, on the same threads."""
    torch_threads(2)
    x, a, b = draw(1, 131, 257, 4, 2, 48, 32), normal(192, 320), normal(320, 256, seed=1)
    product, mine = a @ b, gradients(x)
    assert testing.agree(product, (a.double() @ b.double()).bfloat16())

    def work(at: int) -> bool:
        same = []
        for _ in range(5):
            same += [torch.equal(a @ b, product)]
            same += [torch.equal(p, q) for p, q in zip(gradients(x), mine, strict=True)]
        return all(same)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
