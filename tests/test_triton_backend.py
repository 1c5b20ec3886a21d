"""What is particular to the triton backend: what the conformance suite does not ask. Kernels run in Triton's interpreter."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise import backends, recall, testing
from tilewise.dropout import Dropout
from tilewise.problem import Inputs, Options, Problem
from tilewise.request import Request

pytest.importorskip("triton")
from tilewise.backends import tape
from tilewise.backends.triton import configure
from tilewise.backends.triton.call import Call, bias_kind, precision
from tilewise.backends.triton.variant import slabs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's own, where the interpreter multiplies infinities
NAN, INF = math.nan, math.inf


def tensors(n=20, s=64, h=2, g=1, d=16, e=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((1, n, h, d), (1, s, g, d), (1, s, g, e))
    return Inputs(*(torch.randn(size, generator=generator).to(dtype) for size in sizes))


def everything(x, options):
    """o, lse and the gradient of each input."""
    leaves = x.map(lambda t: t.clone().requires_grad_())
    o, lse = testing.api.compute(leaves, options, backend="triton")
    generator = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(t.shape, generator=generator).to(t) for t in (o, lse))
    return o, lse, *torch.autograd.grad((o, lse), [t for _, t in leaves.present()], (do, dlse))


def cache(x):
    """A cache whose keys past position 14 hold garbage."""
    x.k[:, 15:] = x.v[:, 15:] = NAN
    return x, Options(tw.Causal(), positions=(tw.Positions(20, start=-5), tw.Positions(64)))


def above_the_diagonal(x):
    x.k[0, 30] = NAN
    return x, Options(tw.Causal("top-left"))


def behind_a_bias(x):
    x.bias = torch.zeros(1, 1, 1, 64, dtype=x.q.dtype)
    x.bias[..., 30] = -INF
    x.v[0, 30] = INF
    return x, Options()


def behind_a_table(x):
    x.k[0, 7], x.v[0, 9] = NAN, -INF
    seen = torch.ones(20, 64, dtype=torch.bool)
    seen[:, [7, 9]] = False
    return x, Options(tw.Where(seen))


def padding(x):
    x.k[0, 50:] = x.v[0, 50:] = NAN
    return x, Options(tw.Lengths([50]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spoil", [cache, above_the_diagonal, behind_a_bias, behind_a_table, padding])
def test_what_hidden_pairs_hold_reaches_nothing(spoil, dtype):
    x, options = spoil(tensors(dtype=dtype))
    clean = x.map(lambda t: t if t is x.bias else torch.where(t.isfinite(), t, 1.0))
    for mine, right in zip(everything(x, options), everything(clean, options), strict=True):
        assert testing.agree(mine, right)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_visible_nan_reaches_what_sees_it_and_nothing_else(name):
    x = tensors(n=20, s=20, h=1)
    getattr(x, name)[0, 5] = NAN
    mine, theirs = ([], [])
    for found, backend in ((mine, "triton"), (theirs, "torch")):
        leaves = x.map(lambda t: t.clone().requires_grad_())
        o, lse = tw.attention_with_lse(leaves.q, leaves.k, leaves.v, mask=tw.Causal(), backend=backend)
        o.sum().backward()
        found += [o, lse, *(t.grad for _, t in leaves.present())]
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("scale", [0.0, 1e-46, -1e-46, -0.3, 7.0])
def test_any_scale(scale):
    testing.assert_right(tensors(), Options(tw.Causal(), scale), "triton")


@pytest.mark.parametrize("cap", [0.5, 50.0, 1e8])
def test_a_softcap_of_float64_keeps_its_digits(cap):
    testing.assert_right(tensors(dtype=torch.float64), Options(tw.Causal(), softcap=cap), "triton")


@pytest.mark.parametrize("d, e", [(80, 24), (17, 16), (72, 200), (1, 100)])
def test_head_sizes_between_powers_of_two(d, e):
    testing.assert_right(tensors(d=d, e=e), Options(tw.Causal()), "triton")


def test_slabs_cover_every_head_size_with_the_least():
    for size in range(1, 513):
        first, second = slabs(size)
        assert first + second >= size and first & (first - 1) == 0 and second & (second - 1) == 0 and first >= 16
        assert first + second <= max(16, 1 << (size - 1).bit_length())
    assert [slabs(x) for x in (64, 80, 96, 192, 512)] == [(64, 0), (64, 16), (64, 32), (128, 64), (512, 0)]


@pytest.mark.parametrize("change", [
    lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    lambda t: torch.stack([t, t], -1)[..., 0],
    lambda t: torch.nn.functional.pad(t, (3, 2))[..., 3:-2],
    lambda t: t[:, :1].expand_as(t),
    lambda t: torch._neg_view(-t),  # pyright: ignore[reportPrivateImportUsage]
])  # fmt: skip
def test_any_strides(change):
    x = tensors().map(change)
    testing.assert_right(x, Options(tw.Causal()), "triton")


def test_an_upstream_gradient_with_the_negative_bit():
    x = tensors().map(lambda t: t.requires_grad_())
    o = tw.attention(x.q, x.k, x.v, backend="triton")
    do = torch.complex(torch.randn(o.shape), torch.randn(o.shape)).conj().imag
    found = torch.autograd.grad(o, x.q, do, retain_graph=True)[0]
    assert torch.equal(found, torch.autograd.grad(o, x.q, do.resolve_neg())[0])


def test_a_sink_of_minus_infinity_takes_nothing():
    x = tensors(n=64, s=20, h=2)
    x.sink = torch.tensor([-INF, 0.5], requires_grad=True)
    tw.attention(x.q, x.k, x.v, mask=tw.Causal(), sink=x.sink, backend="triton").sum().backward()
    assert x.sink.grad is not None and x.sink.grad[0] == 0 and x.sink.grad.isfinite().all()


@pytest.mark.parametrize("seed", [3, -5, 2**63 - 1, torch.tensor(2**63 + 5, dtype=torch.uint64)])
@pytest.mark.parametrize("ragged", [None, tw.Ragged.from_lengths([3, 0, 11, 6], [20, 4, 30, 10])])
def test_dropout_is_that_of_every_backend(seed, ragged):
    x = tensors(h=4, g=2)
    mine, theirs = (
        testing.api.compute(x, Options(tw.Causal(), ragged=ragged), None, (0.4, seed), name).o for name in ("triton", "torch")
    )
    assert testing.agree(mine, theirs)


@pytest.mark.parametrize("setting, expected", [("none", "tf32x3"), ("ieee", "ieee"), ("tf32", "tf32")])
def test_how_float32_is_multiplied(setting, expected):
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = setting
        assert precision("float32") == expected and precision("bfloat16") == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


# ---- one meaning, two ways to read it


def call_of(x, options):
    """What the backend makes of a call on these tensors."""
    problem = Problem.describe(x, options)
    return Call.of(problem, x, configure(problem))


@pytest.mark.parametrize(
    "bias, kind",
    [
        (torch.randn(2, 20, 64), "TILES"),
        (torch.randn(1, 1, 20, 64), "TILES"),
        (torch.randn(2, 24, 80)[:, 2:22, 8:72], "TILES"),
        (torch.randn(2, 24, 80)[:, 2:22, 9:73], "POINTS"),  # does not start at a whole step of 16 bytes
        (torch.randn(2, 64, 20).transpose(1, 2), "POINTS"),
        (torch.randn(2, 1, 64), "POINTS"),
        (torch.randn(2, 20, 1), "POINTS"),
    ],
)  # fmt: skip
def test_a_bias_is_read_in_tiles_where_the_copy_engine_can(bias, kind):
    x = tensors()
    x.bias = bias
    assert bias_kind(Problem.describe(x, Options(tw.Causal())), bias) == kind
    ours = everything(x, Options(tw.Causal()))
    theirs = everything(x.map(torch.Tensor.double), Options(tw.Causal()))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize(
    "starts, lines",
    [((0, 0), True), ((-5, 8), True), ((7, 9), False), ((2**40, 2**40), False)],
)
def test_dropout_asks_once_for_four_keys_where_they_start_whole(starts, lines):
    x, (i, j) = tensors(), starts
    options = Options(positions=(tw.Positions(20, start=i), tw.Positions(64, start=j)))
    drop = Dropout(0.4, seed=3)
    assert (call_of(x, replace(options, dropout=drop)).lines is not None) == lines
    o = testing.api.compute(Inputs(x.q, x.k, torch.eye(64)[None, :, None]), options, dropout=(0.4, 3), backend="triton").o
    for head in range(2):
        keep = drop.keep(0, head, np.arange(i, i + 20)[:, None], np.arange(j, j + 64))
        assert ((o[0, :, head] != 0).numpy() == keep).all()


# ---- tapes


def compiled(log):
    """A compiled kernel that notes how it is launched."""
    return SimpleNamespace(run=lambda *args: log.append(args), function=None, packed_metadata=None, metadata=SimpleNamespace())


def wrapped(log, meta):
    """A compiled kernel under the wrapper of Triton 3.5 and 3.6."""
    launcher, tensordesc_indices, tensordesc_meta = (lambda *args: log.append(args)), {0}, [meta]

    def inner(*args):
        raise AssertionError(f"went through the wrapper: {launcher}, {tensordesc_indices}, {tensordesc_meta}")

    run = SimpleNamespace(launch=inner, global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=0, launch_pdl=0)
    return SimpleNamespace(run=run, function="function", packed_metadata=(4, 1, 0))


def played(recorded, other, found, held=()):
    """What a launch fills that was recorded on the tensors `recorded` and is played on `other`; None where it is not whole."""
    made = tape.Tape(recorded)
    made.hold(*held)
    room = made.room("o", (1,), torch.float32, recorded["q"])
    made.add(found, 7, (tape.Rows(recorded["q"], [1], [1], [1]), room, 3, None, *held))
    assert made.done()["o"] is room
    return made.play(other, stream=5) if made.whole else None


def test_a_tape_plays_on_other_tensors():
    (first, second), log, kept = ({"q": torch.zeros(1)} for _ in range(2)), [], torch.zeros(1)
    made = played(first, second, compiled(log), (kept,))
    assert made is not None and log[0][:4] == (7, 1, 1, 5)
    rows, o, number, nothing, own = log[0][9:]
    assert rows.base is second["q"] and o is made["o"] and (number, nothing) == (3, None) and own is kept


def test_a_tape_plays_below_the_wrapper_with_addresses_and_kept_tensor_maps(monkeypatch):
    (first, second), log, asked = ({"q": torch.zeros(1)} for _ in range(2)), [], []

    def expanded(meta, rows):
        asked.append(rows.base)
        return [f"{meta} of {rows.base.data_ptr()}", *rows.shape, *rows.strides]

    monkeypatch.setattr(tape, "_expanded", expanded)
    kept = torch.zeros(1)
    made = played(first, second, wrapped(log, "map"), (kept,))
    assert made is not None and asked == [first["q"], second["q"]]
    assert log[0][:13] == (7, 1, 1, 5, "function", 0, 0, None, None, (4, 1, 0), None, None, None)
    assert log[0][13:] == (f"map of {second['q'].data_ptr()}", 1, 1, made["o"].data_ptr(), 3, None, kept.data_ptr())
    maps = tape.Maps(tape.Rows(first["q"], [1], [1], [1]), lambda rows: expanded("map", rows))
    many = [torch.zeros(1) for _ in range(tape.MAPS + 1)]
    found = [maps.add(x.data_ptr(), x) for x in many]
    assert found[-1] == maps[many[-1].data_ptr()] and len(maps) == 1


def test_a_tape_holds_no_tensor_that_it_was_recorded_on(monkeypatch):
    for found in (compiled([]), wrapped([], "map")):
        monkeypatch.setattr(tape, "_expanded", lambda meta, rows: ["map", *rows.shape])
        q = torch.zeros(1)
        made = tape.Tape({"q": q})
        o = made.room("o", (1,), torch.float32, q)
        made.add(found, 7, (tape.Rows(q, [1], [1], [1]), o))
        seen = [weakref.ref(x) for x in (q, o)]
        assert made.steps and made.done()
        del q, o
        gc.collect()
        assert [ref() for ref in seen] == [None, None]


def test_a_tape_of_one_tensor_under_two_names_is_not_kept():
    x = torch.zeros(1)
    assert played({"q": x, "k": x}, {}, compiled([])) is None


def test_a_tape_into_which_another_tensor_went_is_not_kept():
    known, other = torch.zeros(1), torch.zeros(1)
    made = tape.Tape({"q": known})
    made.add(compiled([]), 1, (other,))
    assert not made.whole


# ---- plans are kept


def plan(x, mask, **options):
    return recall.plan_of(x, Request(Options(mask, **options)).encode())


def test_a_plan_is_made_once_for_what_it_depends_on():
    x = tensors()
    assert plan(x, tw.Causal()) is plan(x, tw.Causal())
    others = [plan(x, tw.Window(3)), plan(x, tw.Causal(), scale=0.5), plan(x.map(torch.Tensor.double), tw.Causal())]
    assert all(other is not plan(x, tw.Causal()) for other in others)


def test_plans_with_the_same_arrays_are_made_once():
    x, ids = tensors(), np.arange(64) // 9
    before = plan(x, tw.Documents(ids))
    assert plan(x, tw.Documents(ids.copy())) is before
    assert plan(x, tw.Documents(torch.as_tensor(ids))) is before
    assert plan(x, tw.Documents(ids // 2)) is not before
    for number in range(recall.MOST_LENT):
        plan(x, tw.Documents(ids + number + 1))
        assert len(recall._lent) <= recall.MOST_LENT
    assert plan(x, tw.Documents(ids)) is not before  # kept no longer


def test_a_plan_with_an_array_that_its_owner_changed_is_made_anew():
    x, lengths = tensors(), torch.tensor([50])
    before = plan(x, tw.Lengths(lengths))
    lengths[0] = 9
    assert plan(x, tw.Lengths(lengths)) is not before
    assert plan(x, tw.Lengths(torch.tensor([50]))) is before
    assert int(before.problem.mask.kv) == 50


def test_a_plan_with_arrays_or_a_function_looks_again():
    x, lengths = tensors(), np.array([50])
    before = tw.attention(x.q, x.k, x.v, mask=tw.Lengths(lengths))
    lengths[0] = 9
    assert not torch.equal(before, tw.attention(x.q, x.k, x.v, mask=tw.Lengths(lengths)))
    limit = [50]
    mask = tw.Where(lambda b, h, i, j: j + 0 * i < limit[0])
    before = tw.attention(x.q, x.k, x.v, mask=mask)
    limit[0] = 9
    assert not torch.equal(before, tw.attention(x.q, x.k, x.v, mask=mask))


# merging in place


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("e", "extra"), [(40, 0), (33, 3), (1, 0), (0, 0)])
def test_merging_in_place_is_merge(e, extra, dtype):
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def partial(rows, *out_of):
        o, lse = torch.randn(2, *out_of, 3, e + extra, generator=generator), 9 * torch.randn(2, 3, rows, generator=generator)
        return o.to(dtype), lse.to(wide)

    o, lse = partial(37, 74)
    into = tw.Partial(o[:, ::2, :, :e], lse.transpose(1, 2).contiguous().transpose(1, 2))
    part = tw.Partial(*partial(37, 37))
    part = part._replace(o=part.o[..., :e])
    for x, rows in ((into, (3, 5, 7)), (part, (5, 6, 7))):
        x.lse[0, 1, list(rows)] = -INF
        x.o[0, list(rows), 1] = NAN
    right = tw.merge(tw.Partial(into.o.clone(), into.lse.clone()), part)
    between = o[:, 1::2].clone()
    assert backends.absorb(into, part)
    assert testing.agree(into.o, right.o) and testing.agree(into.lse, right.lse)
    assert torch.equal(o[:, 1::2], between)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("e", "extra"), [(40, 0), (33, 3), (0, 0)])
def test_delta_is_what_it_says(e, extra, dtype):
    o, do = (torch.randn(2, 74, 3, e + extra).to(dtype)[:, ::2, :, :e] for _ in range(2))
    dlse = torch.randn(2, 37, 3, dtype=torch.float64 if dtype == torch.float64 else torch.float32).transpose(1, 2)
    for upstream in (do, do[:1, :1].expand_as(do)):
        right = (upstream.double() * o.double()).sum(-1).transpose(1, 2) - dlse
        found = backends.total(o, upstream, dlse)
        assert found is not None and found.dtype == dlse.dtype
        torch.testing.assert_close(found, right.to(dlse.dtype))
    assert backends.total(o.transpose(1, 3), do.transpose(1, 3), dlse) is None or e < 2


def test_columns_apart_are_not_merged_in_place():
    o, lse = torch.zeros(1, 2, 3, 8), torch.zeros(1, 3, 2)
    assert not backends.absorb(tw.Partial(o[..., ::2], lse), tw.Partial(o[..., ::2], lse))
