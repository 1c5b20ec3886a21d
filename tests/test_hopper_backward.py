"""The backward pass of the hopper backend, as far as a machine without a GPU can ask: what its kernels count with, run on
Python's numbers; what comes before and after the main one, in Triton's interpreter; and what is launched. Results are asked
in `tests/gpu`, compilation in `test_hopper_compile`."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.problem import Inputs, Options, Partial, Problem

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from tilewise.backends import hopper, sight
from tilewise.backends.hopper import backward_ends, backward_pass, backward_walk, config, looks, roster
from tilewise.backends.hopper.backward_variant import BLOCK_N, PART, Variant, Wide, block_m
from tilewise.backends.hopper.scratch import LAST_BARRIER, SHARED
from tilewise.tiles import TileShape

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's own, where the interpreter subtracts infinities
FAR = sight.FAR
DOCUMENTS = torch.tensor([0] * 137 + [1] + [2] * 262 + [3] * 117)
GAPS = tw.Positions.of(np.sort(np.random.default_rng(3).choice(1000, 517, replace=False))[None])


class Numbers(SimpleNamespace):
    """Gluon's words on Python's numbers."""

    minimum, maximum, int32 = min, max, int

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        return -(-x // y)

    @staticmethod
    def where(condition: bool, x: int, y: int) -> int:
        return x if condition else y


WALK = ("place_of", "visits_of", "rank", "beginning", "following")


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What kernels count with, as functions of Python's numbers."""
    monkeypatch.setattr(backward_walk, "gl", Numbers)
    return SimpleNamespace(**{name: getattr(backward_walk, name).fn for name in WALK})


def flaws(visits: np.ndarray, seen: np.ndarray, keep: np.ndarray, shape: TileShape) -> list[str]:
    """What is wrong with the visits (lo, hi, full_lo, full_hi) of blocks of keys, and the first and last visitors of blocks of
    rows, for pairs "n s" that are seen."""
    m, n = shape.block_m, shape.block_n
    rows, keys = -(-keep.shape[0] // m), -(-keep.shape[1] // n)
    found = []
    for key in range(keys):
        lo, hi, full_lo, full_hi = visits[key]
        for row in range(rows):
            tile = keep[row * m : (row + 1) * m, key * n : (key + 1) * n]
            if tile.any() and not lo <= row < hi:
                found.append(f"keys {key} do not visit rows {row}")
            if full_lo <= row < full_hi and not tile.all():
                found.append(f"keys {key} take rows {row} for FULL")
    for row in range(rows):
        visitors = [key for key in range(keys) if visits[key][0] <= row < visits[key][1]]
        if visitors and visitors != list(range(seen[row][0], seen[row][1] + 1)):
            found.append(f"the visitors of rows {row} do not follow each other, {seen[row]}: {visitors}")
    return found


def problem(mask: Any = None, n: int = 517, s: int = 517, d: int = 64, **options: Any) -> Problem:
    q, k = torch.zeros(2, n, 4, d, dtype=torch.bfloat16), torch.zeros(2, s, 2, d, dtype=torch.bfloat16)
    return Problem.describe(Inputs(q, k, k), Options(mask, **options))


# ---- which blocks see which, and in which order

MASKS = {
    "documents": {"mask": tw.Documents(DOCUMENTS) & tw.Causal()},
    "lengths": {"mask": tw.Lengths([53, 509])},
    "prefix": {"mask": tw.Prefix([7, 200])},
    "chunked": {"mask": tw.Chunked(50)},
    "gaps": {"mask": tw.Causal() & tw.Window(61), "positions": (GAPS, tw.Positions(517))},
}


@pytest.mark.parametrize("block", (64, 128))
@pytest.mark.parametrize("name", MASKS)
def test_surveyed_visits(name: str, block: int) -> None:
    p = problem(**MASKS[name])
    seen = sight.look(p, torch.zeros(()))
    assert seen.first is not None
    shape = TileShape(block, BLOCK_N)
    visits, ends = (t.numpy() for t in looks.survey_keys(seen, p.s, shape))
    keep = np.broadcast_to(p.keep(), (p.b, p.h, p.n, p.s))[:, 0]
    for b in range(len(visits)):
        assert flaws(visits[b], ends[b], keep[b], shape) == []
        assert (np.diff(visits[b, :, :2], axis=0) >= 0).all()


def test_wrong_visits_are_found() -> None:
    keep, shape = np.tril(np.ones((300, 300), bool)), TileShape(64, BLOCK_N)
    right = np.array([[0, 5, 2, 5], [2, 5, 4, 5], [4, 5, 5, 5]])
    ends = np.array([[0, 0], [0, 0], [0, 1], [0, 1], [0, 2]])
    assert flaws(right, ends, keep, shape) == []
    for place, value, flaw in (((1, 0), 3, "do not visit"), ((0, 2), 1, "for FULL"), ((0, 1), 4, "follow each other")):
        wrong = right.copy()
        wrong[place] = value
        assert any(flaw in line for line in flaws(wrong, ends, keep, shape))
    for step in ([1, 0], [0, 1]):
        assert any("follow each other" in line for line in flaws(right, ends + step, keep, shape))


BANDS = [
    (300, 411, -FAR, 112),
    (411, 300, -FAR, -110),
    (700, 700, -100, 1),
    (519, 700, 0, FAR),
    (300, 900, 350, 500),
    (64, 128, -FAR, FAR),
]
"""n, s, left and right: causal, with more keys and with more rows; windows; and bands that see all or hardly anything."""


@pytest.mark.parametrize("block", (64, 128))
@pytest.mark.parametrize("n, s, left, right", BANDS)
def test_counted_visits(walk: Any, n: int, s: int, left: int, right: int, block: int) -> None:
    shape = TileShape(block, BLOCK_N)
    i, j = np.arange(n)[:, None], np.arange(s)[None, :]
    keep = (j >= i + left) & (j < i + right)
    rows, keys = -(-n // block), -(-s // BLOCK_N)
    C, mask = SimpleNamespace(MASK="BAND", M=block, N=BLOCK_N), (0, 0, left, right, 0, 0, keys)
    visits = np.array([walk.visits_of(key, mask, n, s, C) for key in range(keys)])
    ends = np.array([(-walk.rank(row, 0, mask, 0, C), walk.rank(row, 0, mask, 1, C)) for row in range(rows)])
    assert flaws(visits, ends, keep, shape) == []


@pytest.mark.parametrize("n, s", ((211, 333), (128, 256), (1, 1)))
def test_all_visits_without_a_mask(walk: Any, n: int, s: int) -> None:
    C, rows = SimpleNamespace(MASK="NONE", M=64, N=BLOCK_N), -(-n // 64)
    for key in range(-(-s // BLOCK_N)):
        mask = (0, 0, 0, 0, 0, 0, -(-s // BLOCK_N))
        lo, hi, full_lo, full_hi = walk.visits_of(key, mask, n, s, C)
        assert (lo, hi) == (0, rows)
        ends = (key + 1) * BLOCK_N > s
        assert full_hi - full_lo == (0 if ends else n // 64)  # the last keys, and the last rows, are looked at
        for up, order in ((0, key), (1, mask[6] - 1 - key)):
            assert [walk.rank(row, key, mask, up, C) for row in range(rows)] == [order] * rows


@pytest.mark.parametrize("turns", (0, 1))
@pytest.mark.parametrize("heads, blocks, span", ((6, 5, 4), (1, 7, 1), (8, 3, 8), (5, 1, 2), (6, 4, 2)))
def test_nobody_waits_for_a_later_program(walk: Any, heads: int, blocks: int, span: int, turns: int) -> None:
    places = [walk.place_of(pid, heads, blocks, span, -(-heads // span), turns) for pid in range(heads * blocks)]
    assert sorted(place[:2] for place in places) == [(head, block) for head in range(heads) for block in range(blocks)]
    for head in range(heads):
        mine, (up,) = [block for at, block, _ in places if at == head], {up for at, _, up in places if at == head}
        assert mine == (list(range(blocks))[::-1] if up else list(range(blocks)))
        assert up == (turns and (-(-heads // span) - head // span + 1) % 2)  # in turn, and the last one down


@pytest.mark.parametrize("n, s, left, right", BANDS)
def test_lengths_of_blocks_of_keys(walk: Any, n: int, s: int, left: int, right: int) -> None:
    C, keys = SimpleNamespace(MASK="BAND", M=64, N=BLOCK_N), -(-s // BLOCK_N)
    visits = [walk.visits_of(key, (0, 0, left, right, 0, 0, keys), n, s, C) for key in range(keys)]
    found = roster.steps(n, s, (left, right), TileShape(64, BLOCK_N))
    assert found.tolist() == [hi - lo for lo, hi, _, _ in visits]
    for heads, span, turns in ((5, 2, 1), (4, 4, 0), (3, 1, 1)):
        places = [walk.place_of(pid, heads, keys, span, -(-heads // span), turns) for pid in range(heads * keys)]
        assert roster.in_turn(found, heads, span, turns).tolist() == [found[block] for _, block, _ in places]


@pytest.mark.parametrize("programs", (1, 7, 132))
def test_programs_take_blocks_of_keys_in_order(programs: int) -> None:
    found = roster.in_turn(np.arange(1, 17), heads=20, span=6, turns=1)
    table = roster.roster(found, programs, roster.CHANGE_OF_KEYS)
    mine = [table[1 : 1 + count, program].tolist() for program, count in enumerate(table[0])]
    assert sorted(one for blocks in mine for one in blocks) == list(range(320))
    assert all(blocks == sorted(blocks) for blocks in mine)


@pytest.mark.parametrize("up", [0, 1])
def test_rows_pass_in_order_with_all_heads(walk: Any, up: int) -> None:
    visits, passed = (2, 5, 0, 0, up, 6, 2), []
    m, head = walk.beginning(visits)
    for _ in range(6):
        passed.append((m, head))
        m, head = walk.following(m, head, visits)
    rows = (2, 3, 4) if up else (4, 3, 2)
    assert passed == [(row, head) for row in rows for head in (6, 7)]


# ---- before and after the main kernel


def in_pieces(x: np.ndarray, columns: int) -> np.ndarray:
    """Rows "64 columns" in the order in which the threads of a warpgroup hold them in an accumulator of the tensor cores:
    four numbers of a thread, those of two rows, after the other. Source: PTX ISA, wgmma, layout of D."""
    out = []
    for warp in range(4):
        for eighth in range(columns // 8):
            for lane in range(32):
                row, column = warp * 16 + lane // 4, eighth * 8 + lane % 4 * 2
                out += [x[row, column], x[row, column + 1], x[row + 8, column], x[row + 8, column + 1]]
    return np.array(out, np.float32)


@pytest.mark.parametrize("width, d", ((128, 128), (128, 80), (64, 64), (64, 40)))
def test_dq_of_its_sums(width: int, d: int) -> None:
    b, n, h, m = 1, 150, 2, block_m(width, light=True)
    blocks = -(-n // m)
    right = np.random.default_rng(0).standard_normal((b, h, blocks * m, width)).astype(np.float32)
    parts = [
        in_pieces(x, width // (2 if m == PART else 1))
        for block in right.reshape(-1, m, width)
        for x in (np.split(block, 2, 1) if m == PART else np.split(block, 2, 0))
    ]
    counts = torch.ones(b * h, blocks, 2, dtype=torch.int32)
    counts[1, -1] = 0
    sums = torch.from_numpy(np.concatenate(parts))
    dq, notes = torch.full((b, n, h, d), torch.nan), torch.full((b * h * 3,), 7, dtype=torch.int8)
    args = (sums, counts, dq, notes, 0.5, n, h, blocks, d, PART, m, width, 2 if m == PART else 1, d == width)
    backward_ends.dq_kernel[(b * h * 3,)](*args)
    want = torch.from_numpy(right[:, :, :n, :d] * 0.5).transpose(1, 2).clone()
    want[:, (blocks - 1) * m :, 1] = 0  # nobody has counted there
    assert torch.equal(dq, want)
    assert notes.tolist() == [0] * 6
    sums[3] = torch.inf
    backward_ends.dq_kernel[(b * h * 3,)](*args)
    assert notes.tolist() == [1, 0, 0, 0, 0, 0]


def test_what_ds_needs_of_each_row() -> None:
    b, n, h, e, padded = 2, 70, 3, 40, 128
    o, do = torch.randn(b, n, h, e).bfloat16(), torch.randn(b, h, n, 64).bfloat16()[..., :e].transpose(1, 2)
    lse, dlse = torch.randn(b, h, n), torch.randn(b, h, n)
    lse[0, 1, 5] = -torch.inf
    stats, counts = torch.full((2, b, h, padded), torch.nan), torch.full((b, h, 2, 2), 9, dtype=torch.int32)
    steps = [[stride // 8 for stride in (t.stride(0), t.stride(2), t.stride(1))] for t in (o, do)]
    backward_ends.delta_kernel[(b * h * 2,)](
        o, *steps[0], do, *steps[1], lse, dlse, stats, counts, n, h, 2, padded, b * h, e, PART, 64, False
    )
    delta = (o.float() * do.float()).sum(-1).transpose(1, 2) - dlse
    assert torch.allclose(stats[1, ..., :n], delta, atol=1e-5)
    assert torch.equal(stats[1, ..., n:], torch.zeros(b, h, padded - n))
    assert torch.allclose(stats[0, ..., :n].where(lse > -torch.inf, 0), (lse * 1.4426950408889634).where(lse > -torch.inf, 0))
    assert stats[0, 0, 1, 5] == torch.inf and (stats[0, ..., n:] == torch.inf).all()
    assert (counts == 0).all()


# ---- what is launched


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The kernels that would have run, with their variants."""
    names: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backward_pass, "launch", lambda kernel, grid, args, C, *rest: names.append((kernel.fn.__name__, C)))
    monkeypatch.setattr(backward_pass, "launch_plain", lambda kernel, *rest: names.append((kernel.fn.__name__, None)))
    for name in ("run_dq", "run_dk_dv"):
        monkeypatch.setattr(backward_pass, name, lambda *rest, name=name: names.append((name, None)))
    return names


def gradients(p: Problem, needs: tuple[str, ...] = ("q", "k", "v"), **extras: torch.Tensor) -> Inputs:
    sides = ((p.n, p.h), (p.s, p.g), (p.s, p.g))
    x = Inputs(*(torch.zeros(p.b, size, heads, p.d, dtype=torch.bfloat16) for size, heads in sides), **extras)
    saved = Partial(torch.zeros_like(x.q), torch.zeros(p.b, p.h, p.n))
    return hopper.backward(p, x, saved, Partial(torch.zeros_like(x.q), None), hopper.configure(p), needs)


def test_blocks_are_mended_only_where_a_mask_hides(launched: list[tuple[str, Any]]) -> None:
    found = gradients(problem(n=70, s=90, d=96))
    assert [name for name, _ in launched] == ["delta_kernel", "backward_kernel", "dq_kernel"]
    assert launched[1][1] == Variant(128, 64, "NONE")
    assert [tuple(t.shape) for t in (found.q, found.k, found.v)] == [(2, 70, 4, 96), (2, 90, 2, 96), (2, 90, 2, 96)]
    launched.clear()
    gradients(problem(tw.Causal(), n=70, s=90))
    assert [name for name, _ in launched] == ["delta_kernel", "backward_kernel", "dq_kernel", "run_dq", "run_dk_dv"]
    assert launched[1][1] == Variant(64, 128, "BAND")
    launched.clear()
    gradients(problem(n=70, s=90, d=192))
    assert launched[1][1] == Wide(256, 64, "NONE")
    launched.clear()
    gradients(problem(tw.Lengths([5, 90]), n=70, s=90, softcap=3.0))
    assert launched[1][1] == Variant(64, 64, "ROWS", PLAIN=False, CAPPED=True)


def test_programs_stay_where_blocks_of_keys_are_many_and_short(
    launched: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "processors", lambda device: 5)
    monkeypatch.setattr(backward_pass, "STAY", True)
    for n, mask, stay in (
        (130, None, False),
        (130, tw.Causal(), True),
        (130, tw.Lengths([5, 90]), False),
        (14000, tw.Causal(), False),
    ):
        launched.clear()
        gradients(problem(mask, n=n, s=n))
        assert launched[1][1].PERSISTENT is stay, (n, mask)
    launched.clear()
    gradients(problem(tw.Window(1, 1), n=130, s=600))
    assert not launched[1][1].PERSISTENT  # the first keys are seen by nobody
    launched.clear()
    monkeypatch.setattr(config, "processors", lambda device: 8)
    gradients(problem(tw.Causal(), n=130, s=130))
    assert not launched[1][1].PERSISTENT  # as many blocks as multiprocessors


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What triton's backward was asked for, instead of doing it."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(backward_pass.triton, "backward", lambda p, x, *rest: asked.append(rest[-1]) or x)
    return asked


def test_gradients_of_slopes_are_made_by_triton(launched: list[tuple[str, Any]], handed_over: list[tuple[str, ...]]) -> None:
    slopes = torch.zeros(4)
    p = Problem.describe(Inputs(*[torch.zeros(1, 9, 4, 64, dtype=torch.bfloat16)] * 3, alibi=slopes), Options())
    gradients(p, ("q", "alibi"), alibi=slopes)
    assert handed_over == [("q", "alibi")] and launched == []
    gradients(p, ("q",), alibi=slopes)
    assert launched[1][1] == Variant(64, 64, "NONE", PLAIN=False, ALIBI=True)


@pytest.mark.parametrize(
    "sizes, span, turns",
    (
        ((1, 16384, 16, 1, 128), 2, 1),
        ((16, 1024, 16, 1, 128), 32, 1),
        ((1, 300, 4, 1, 64), 2, 1),
        ((4, 4096, 16, 2, 128), 4, 1),
        ((4, 4096, 8, 4, 128), 8, 0),
        ((2, 8192, 8, 8, 128), 4, 0),
        ((1, 70000, 8, 8, 128), 1, 0),
        ((1, 4096, 4, 4, 128), 4, 0),
        ((4, 4096, 8, 4, 64), 4, 1),
    ),
)
def test_heads_that_go_together(sizes: tuple[int, int, int, int, int], span: int, turns: int) -> None:
    b, n, g, group, width = sizes
    p, C = SimpleNamespace(b=b, n=n, s=n, g=g, group=group, itemsize=2), SimpleNamespace(WIDTH=width, N=BLOCK_N)
    assert (backward_pass.span(p, C), backward_pass.turns(p, C)) == (span, turns)


def test_nothing_to_see_launches_nothing(launched: list[tuple[str, Any]]) -> None:
    found = gradients(problem(n=0, s=90))
    assert launched == [] and torch.equal(found.k, torch.zeros(2, 90, 2, 64, dtype=torch.bfloat16))


VARIANTS = (
    Variant(64, 128, "ROWS"),
    Variant(64, 64, "BAND", PLAIN=False, PERSISTENT=True),
    Variant(128, 64, "BAND", PERSISTENT=True),
    Wide(256, 64, "ROWS"),
)


@pytest.mark.parametrize("C", VARIANTS)
def test_every_variant_fits(C: Variant) -> None:
    assert C.scratch_bytes <= SHARED
    taken = [*range(6), *range(C.MET, C.MET + 4), C.LEFT, C.LEFT + 1]  # Triton's first; those of rings, warpgroups, carriers
    rings = [C.Q, C.DO] if isinstance(C, Wide) else [C.ROWS, C.KEYS]
    taken += [ring.FIRST + stage for ring in rings for stage in range(ring.STAGES)]
    assert len(taken) == len(set(taken)) and max(taken) <= LAST_BARRIER
