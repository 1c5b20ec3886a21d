"""The Hopper backend where there is no Hopper: what it describes, chooses and refuses, and its kernels' source on numpy."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import gluon_on_numpy as numpy_gluon
import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from hopper_emulated import put_on_the_cpu

from tilewise import backends, merge, testing
from tilewise.backends import hopper
from tilewise.backends.hopper import config, forward_kernel, forward_pass, launch, looks, refusals, roster, scratch, visits
from tilewise.backends.hopper.variant import Variant
from tilewise.backends.sight import Sight
from tilewise.cases import Case
from tilewise.dropout import Dropout
from tilewise.mask import Causal, Documents, Lengths, Mask, Prefix, Where, Window
from tilewise.ops import lse_dtype
from tilewise.positions import Positions
from tilewise.problem import Inputs, Options, Partial, Problem
from tilewise.ragged import Ragged
from tilewise.reference import plain
from tilewise.tiles import TileShape

MASKS = {
    "full": None,
    "causal": Causal(),
    "causal, short rows": Causal() & Window(40),
    "window": Window(41, 23),
    "documents": Documents(np.repeat([0, 1, 2], [97, 61, 103])) & Causal(),
    "lengths": Lengths([53, 199]),
    "prefix": Prefix(70),
}


def case(name: str, mask: Mask | None = None, **more: Any) -> Case:
    options = Options(mask, **{key: more.pop(key) for key in ("softcap", "scale", "ragged", "deterministic") if key in more})
    return Case(name, **{"b": 2, "n": 261, "s": 261, "h": 2, "g": 1, "d": 128, "e": 128, "options": options, **more})


CASES = {
    **{f"{name} {d}": case(name, mask, d=d, e=d) for name, mask in MASKS.items() for d in (64, 128)},
    "wide heads": case("", Causal(), d=256, e=256, b=1),
    "wide keys": case("", Causal(), d=192, e=128, b=1, n=130),
    "wide values": case("", d=40, e=72, b=1),
    "more rows than keys": case("", Causal(), s=77),
    "more keys than rows": case("", Causal(), n=77),
    "one row": case("", Causal(), n=1, h=4),
    "groups of heads": case("", h=6, g=2, b=1),
    "everything": case("", Causal(), softcap=5.0, alibi="b h", sink=True, s=193),
    "everything, narrow": case("", Window(90, 5), d=64, e=64, softcap=5.0, alibi="h", sink=True),
    "negative scale": case("", Causal(), scale=-0.1),
    "packed": case("", ragged=Ragged.from_lengths([100, 3, 150], [120, 30, 90]), b=1, s=250),
    "time that data do not change": case("", Causal(), deterministic=True, n=300, s=300),
}


# ---- running kernels on numpy


def forward(
    problem: Problem, x: Inputs[torch.Tensor], monkeypatch: pytest.MonkeyPatch, onto: Partial | None = None, **sizes: Any
) -> Partial:
    """o and lse by the kernel's source, merged with `onto`; seldom more than three programs where they stay."""
    jobs: list[Any] = []
    monkeypatch.setattr(launch, "start", lambda kernel, grid, args, *rest: jobs.append((kernel, grid, args)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    chosen = hopper.configure(problem)
    chosen = replace(chosen, programs=3, forward=replace(chosen.forward, **sizes))
    made = forward_pass.forward(problem, x, chosen) if onto is None else forward_pass.forward_onto(problem, x, onto, chosen)
    assert made is not None
    for kernel, grid, args in jobs:
        with numpy_gluon.emulated("tilewise.backends.hopper"):
            numpy_gluon.run(kernel, grid, args[:-1], args[-1].described)
    return made


def failures(asked: Case, dtype: str, made: Partial, x: Inputs[torch.Tensor]) -> list[str]:
    """What is over the conformance suite's budget."""
    exact = x.map(lambda t: t.double().numpy())
    do, dlse = (torch.from_numpy(a) for a in asked.upstream())
    grads = Partial(do.to(x.q), dlse.to(lse_dtype(x.q.dtype)))
    problem = Problem.describe(exact, asked.options)
    with np.errstate(all="ignore"):
        right = plain.attention(problem, exact)
    rough = testing.eager(problem, x, grads).arrays
    eps = torch.finfo(x.q.dtype).eps, torch.finfo(grads.lse.dtype).eps
    rounding = testing.roundings(problem, exact, Partial(*(a.double().numpy() for a in grads)), eps)
    mine = {"o": made.o.double().numpy(), "lse": made.lse.double().numpy()}
    rights = {"o": right.o, "lse": right.lse}
    told = [testing.compare((asked.name, dtype, q), mine[q], rights[q], rough[q], rounding[q]) for q in ("o", "lse")]
    return [str(one) for one in told if not one.ok]


def tensors(asked: Case, dtype: str = "bfloat16") -> Inputs[torch.Tensor]:
    return testing.tensors(asked.inputs(), dtype, "cpu")


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_source_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, dtype = CASES[name], "float16" if name == "full 64" else "bfloat16"
    x = tensors(asked, dtype)
    assert failures(asked, dtype, forward(Problem.describe(x, asked.options), x, monkeypatch), x) == []


@pytest.mark.parametrize("name", ["full 128", "causal 64"])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("times", [14.0, 60.0])
def test_large_logits_are_right_with_either_reference(name, fixed, times, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(CASES[name], b=1)
    x = tensors(asked)
    x = replace(x, q=x.q * times)
    assert failures(asked, "", forward(Problem.describe(x, asked.options), x, monkeypatch, fixed=fixed), x) == []


@pytest.mark.parametrize("name", ["lengths 128", "causal 64"])
def test_what_hidden_pairs_hold_is_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = CASES[name]
    x = tensors(asked)
    if name.startswith("lengths"):
        x.k[0, 53:], x.v[0, 53:], x.v[1, 199:] = torch.nan, torch.inf, torch.nan
    else:
        x.k[:, 200:], x.v[:, 200:] = torch.nan, -torch.inf
    clean = x.map(lambda t: torch.nan_to_num(t, posinf=0, neginf=0))
    problem = Problem.describe(x, asked.options)
    made, right = forward(problem, x, monkeypatch), forward(problem, clean, monkeypatch)
    rows = slice(None) if name.startswith("lengths") else slice(0, 200)
    torch.testing.assert_close(made.o[:, rows], right.o[:, rows], atol=0.02, rtol=0.02)
    torch.testing.assert_close(made.lse[..., rows], right.lse[..., rows])
    assert name.startswith("lengths") or made.o[:, 200:].isnan().all()


def test_values_at_the_end_of_the_range_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(CASES["causal 128"], b=1)
    x = tensors(asked)
    x = replace(x, v=torch.full_like(x.v, torch.finfo(torch.bfloat16).max))
    made = forward(Problem.describe(x, asked.options), x, monkeypatch)
    assert made.o.isfinite().all() and (made.o / x.v[0, 0, 0, 0] - 1).abs().max() < 0.01


@pytest.mark.parametrize("name", ["full 64", "causal 128", "documents 128", "wide values"])
@pytest.mark.parametrize(("times", "wide"), [(1.0, True), (60.0, True), (60.0, False)])  # at 60 blocks are done again
def test_what_rows_have_seen_before_is_merged_in(name: str, times: float, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tensors(replace(CASES[name], b=1))
    x = replace(x, q=x.q * times)
    p = replace(Problem.describe(x, CASES[name].options), wide=True)
    room = torch.randn(p.b, p.n + 3, p.h + 1, p.e)  # of which the rows are a part
    before = Partial(room[:, 1:-2, 1:], torch.randn(p.b, p.n, p.h).transpose(1, 2) + 2 * times)
    before.lse[:, :, ::3], before.o[:, ::3] = -torch.inf, torch.nan
    alone, both = forward(p, x, monkeypatch), forward(replace(p, wide=wide), x, monkeypatch, onto=before)
    right, limit = merge(before, alone), 1e-5 if wide else torch.finfo(x.q.dtype).eps / 2
    torch.testing.assert_close(both.o, right.o.to(both.o.dtype), rtol=limit, atol=limit)
    assert both.o.dtype == (torch.float32 if wide else x.q.dtype)
    torch.testing.assert_close(both.lse, right.lse, rtol=1e-5, atol=1e-5)
    shifted = before._replace(o=torch.randn(p.b, p.n, p.h, p.e + 1)[..., 1:])
    assert hopper.forward_onto(p, x, shifted, hopper.configure(p)) is None


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gives rows past the last key a weight; and one that waits for what nobody sends."""
    asked = CASES["full 128"]
    x = tensors(asked)
    problem = Problem.describe(x, asked.options)
    monkeypatch.setattr(forward_kernel, "hide", lambda x, *rest: x)
    assert failures(asked, "", forward(problem, x, monkeypatch), x) != []
    monkeypatch.undo()
    monkeypatch.setattr(numpy_gluon, "PATIENCE_S", 0.2)
    monkeypatch.setattr(forward_kernel, "release", lambda *rest: None)
    with pytest.raises(TimeoutError, match="hung at"):
        forward(problem, x, monkeypatch)


# ---- descriptions


def variant_of(d: int, e: int, mask: Mask | None, n: int) -> Variant:
    """What a forward kernel is compiled for."""
    x = Inputs(*(torch.empty(1, n, 1, size, dtype=torch.bfloat16, device="meta") for size in (d, d, e)))
    sizes = hopper.configure(Problem.describe(x, Options(mask))).forward
    return Variant(sizes, config.padded(d), config.padded(e), e, "bfloat16", "NONE")


WIDTHS = ((64, 64), (128, 128), (256, 256), (192, 128), (64, 256))
VARIANTS = {variant_of(d, e, mask, n) for d, e in WIDTHS for mask in (None, Causal()) for n in (300, 5000)}


@pytest.mark.parametrize("one", sorted(VARIANTS, key=str), ids=str)
def test_a_program_fits_a_multiprocessor(one: Variant) -> None:
    assert one.scratch_bytes <= scratch.SHARED
    assert scratch.FIRST_BARRIER <= one.Q.FIRST < one.K.FIRST < one.V.FIRST < one.VERDICT <= one.LAST <= scratch.LAST_BARRIER
    mine, producer = one.sizes.registers
    threads = one.READERS + 128  # the warp that brings tiles has a warpgroup's share of registers
    assert one.READERS * mine + 128 * producer <= one.sizes.entry * threads <= 65536
    assert mine % 8 == producer % 8 == one.sizes.entry % 8 == 0


def test_a_ring_counts_what_it_holds() -> None:
    ring = scratch.Ring(64, 128, READERS=256, FIRST=5, STAGES=2, PARTS=3)
    assert ring.SHAPE == [6, 1, 1, 64, 128] and ring.STAGE_BYTES == 3 * 64 * 128 * 2
    assert (ring.BYTES, ring.NEXT) == (2 * (3 * 64 * 128 * 2 + 8), 7)


def test_a_fixed_reference_is_chosen_only_where_every_row_sees_its_first_tile() -> None:
    def fixed(mask: Mask | None, n: int = 261, s: int = 261, **more: Any) -> bool:
        x = tensors(case("", mask, n=n, s=s, **more))
        return hopper.configure(
            Problem.describe(x, Options(mask, deterministic=more.get("deterministic", False)))
        ).forward.fixed

    assert fixed(None) and fixed(Causal()) and fixed(Causal(), s=300)
    assert fixed(Causal() & Window(254)) and not fixed(Causal() & Window(253))
    assert not fixed(Window(300, 300), n=512, s=512) and not fixed(Window(100, 300), n=382, s=382)  # keys end first
    assert not fixed(Causal(), n=128, s=255)  # the first row of a block sees keys up to a tile's end
    assert not fixed(Causal() & Window(3)) and not fixed(Lengths([5, 6])) and not fixed(None, deterministic=True)


# ---- visits


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("programs", [1, 3, 30])
@pytest.mark.parametrize("span", [1, 2, 6])
def test_every_block_is_done_once(programs: int, span: int, listed: bool) -> None:
    C: Any = SimpleNamespace(PERSISTENT=True, BLOCK_M=128, LISTED=listed)
    axes, tiles, seen = (517, 1, 3, 1, span), 5 * 6, []
    table = roster.roster(np.random.default_rng(0).integers(1, 9, tiles), programs)
    with numpy_gluon.emulated("tilewise.backends.hopper"):
        tasks = numpy_gluon.Number(tiles), numpy_gluon.Pointer.to(torch.from_numpy(table)) if listed else None
        for pid in range(programs):
            numpy_gluon.HERE.program = numpy_gluon.Program(pid, programs)
            mine = [visits.own(numpy_gluon.Number(turn), tasks, C) for turn in range(int(visits.rounds(tasks, C)))]
            seen += [tuple(map(int, visits.place(one, axes, C))) for one in mine]
    assert sorted(seen) == [(b, head, block) for b in range(2) for head in range(3) for block in range(5)]


@pytest.mark.parametrize("mask", [Causal(), Window(100, 0), Window(30, 90)], ids=str)
@pytest.mark.parametrize("n, s", [(517, 517), (300, 900), (900, 300)])
def test_lengths_of_blocks_are_right(mask: Any, n: int, s: int) -> None:
    case = Case("", 1, n, s, 1, 1, 64, 64, Options(mask))
    problem, sizes = Problem.describe(testing.tensors(case.inputs(0), "bfloat16", "cpu"), case.options), config.FORWARD[64]
    band, keep = config.band_of(problem), problem.keep()[0, 0]
    assert band is not None
    found = roster.lengths(n, s, band, sizes)
    for block, rows in enumerate(np.split(keep, range(sizes.block_m, n, sizes.block_m))):
        seen = np.flatnonzero(rows.any(0))
        assert found[block] == max(1, seen.max() // 128 - seen.min() // 128 + 1 if len(seen) else 1)


def test_programs_of_a_roster_end_together() -> None:
    found = roster.in_order(np.arange(1, 129), heads=16, span=2)
    table = roster.roster(found, 132)
    loads = np.array([sum(found[table[1 : 1 + table[0, program], program]] + roster.CHANGE) for program in range(132)])
    assert loads.max() <= 1.02 * loads.mean()


def test_surveys_of_rows_are_right() -> None:
    rng, n, s, shape = np.random.default_rng(0), 333, 500, TileShape(128, 64)
    first = rng.integers(0, s, (2, n))
    past = np.minimum(first + rng.integers(0, 90, (2, n)), s)
    sight = Sight("INTERVAL", first=torch.from_numpy(first), past=torch.from_numpy(past))
    found = looks.survey_rows(sight, s, shape)
    for b in range(2):
        for block, (lo, full_lo, full_hi, hi) in enumerate(found[b].tolist()):
            rows = range(block * 128, min(n, block * 128 + 128))
            for tile in range(-(-s // 64)):
                keys = [(max(first[b, r], tile * 64), min(past[b, r], tile * 64 + 64)) for r in rows]
                some, every = any(a < z for a, z in keys), all((a, z) == (tile * 64, tile * 64 + 64) for a, z in keys)
                assert not some or lo <= tile < hi
                assert not full_lo <= tile < full_hi or every


# ---- refusals


def reasons(asked: Case, dtype: str = "bfloat16") -> str:
    return "; ".join(refusals.reasons_of(Problem.describe(tensors(asked, dtype), asked.options)))


def test_what_it_does_not_do_it_refuses() -> None:
    rows = np.r_[0:200, 300:361]
    assert reasons(CASES["everything"]) == ""
    assert "float32" in reasons(CASES["full 64"], "float32")
    assert "bias" in reasons(replace(CASES["full 64"], bias="s"))
    assert "pairs" in reasons(replace(CASES["full 64"], options=Options(Where(np.ones((261, 261), bool)))))
    assert "drops" in reasons(replace(CASES["full 64"], options=Options(dropout=Dropout(0.1, seed=1))))
    assert "axis d: 300" in reasons(replace(CASES["full 64"], d=300))
    assert "multiple of 8" in reasons(replace(CASES["full 64"], e=12))
    far = Options(positions=(Positions.of(rows), Positions(261)))
    assert "follow each other" in reasons(replace(CASES["full 64"], options=far, alibi="h"))
    assert reasons(replace(CASES["full 64"], options=far)) == ""


def test_kernels_that_compute_something_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Run on numpy, as a GPU would: once, if they are right and a note can be kept."""
    selfcheck = import_module("tilewise.backends.hopper.selfcheck")
    gpu, runs, real = SimpleNamespace(name="numpy", multi_processor_count=3), [], selfcheck.run
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(selfcheck, "run", lambda *given: runs.append(given) or real(*given))
    put_on_the_cpu(monkeypatch)
    assert asked_anew(selfcheck) == "" == asked_anew(selfcheck) and len(runs) == 1
    (note,) = tmp_path.iterdir()
    note.write_text("something else")
    for name in ("o", "lse", "dq", "dk", "dv"):
        monkeypatch.setattr(selfcheck, "run", lambda *given, name=name: spoiled(name, *real(*given)))
        assert asked_anew(selfcheck) == f"its kernels compute a wrong {name} on cpu"
    full = iter([torch.OutOfMemoryError("no room")])
    monkeypatch.setattr(selfcheck, "differences", lambda device: [] if (error := next(full, None)) is None else throw(error))
    note.write_bytes(b"\xff\xfe")
    assert "no room" in asked_anew(selfcheck) and selfcheck.broken("cpu") == ""  # what passes is not remembered
    note.write_text("something else")
    monkeypatch.setattr(selfcheck, "differences", lambda device: 1 / 0)
    assert "ZeroDivisionError" in asked_anew(selfcheck) and note.read_text() == "something else"
    monkeypatch.setattr(refusals, "_device", lambda device: ())
    problem = replace(Problem.describe(tensors(CASES["full 64"]), Options()), device="cpu")
    assert "ZeroDivisionError" in refusals.why_not(problem, True)[0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert refusals.why_not(problem, True) == ()
    selfcheck._broken.cache_clear()


def test_the_look_is_unseen_by_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first plan may be made inside of any."""
    trial, seen = import_module("tilewise.backends.trial"), []

    def look(x: torch.Tensor) -> torch.Tensor:
        with trial.unseen_by_others():
            (given, do), made = trial.small("float32", 5), torch.ones(3)
            seen.append(type(given.q) is torch.Tensor and float(do.double().numpy().sum()) != 0 and made.tolist() == [1, 1, 1])
        return x * 2

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(3))
    assert seen == [True, True]


def throw(error: Exception) -> Any:
    raise error


def asked_anew(selfcheck: Any) -> str:
    selfcheck._broken.cache_clear()
    return selfcheck.broken("cpu")


def spoiled(name: str, made: Partial, grads: Inputs[torch.Tensor]) -> tuple[Partial, Inputs[torch.Tensor]]:
    """Results of which one is 5 % too large."""
    if name in ("o", "lse"):
        return made._replace(**{name: getattr(made, name) * 1.05}), grads
    return made, replace(grads, **{name[1]: getattr(grads, name[1]) * 1.05})


def test_it_runs_on_a_hopper_with_a_triton_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_checked", lambda device: ())
    problem = Problem.describe(tensors(CASES["full 64"]), Options())
    assert any("Hopper" in reason for reason in refusals.why_not(problem, True))
    there = replace(problem, device="cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for known, text in (("3.6.0", ""), ("3.9.1", ""), ("3.5.1", "tested with triton"), ("4.0.0", "tested with triton")):
        refusals._device.cache_clear()
        monkeypatch.setattr(refusals, "version", lambda name, known=known: known)
        assert text in "; ".join(refusals.why_not(there, True)) and bool(text) == bool(refusals.why_not(there, True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    refusals._device.cache_clear()
    assert "8.0" in refusals.why_not(there, True)[0]
    refusals._device.cache_clear()


def test_it_comes_first_and_hands_over() -> None:
    assert backends.ORDER[0] == "hopper"
    plan = backends.make_plan(Problem.describe(tensors(CASES["full 64"]), Options()))
    assert plan.refused[0][0] == "hopper" and plan.backend != "hopper"
