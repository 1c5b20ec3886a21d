"""The gradients, from (o, lse) alone: what the kernels of backward are given, and the order in which they run. What these
kernels do not make, triton's do: gradients of slopes and of wider heads, and once more, with care, blocks into which what
hidden pairs hold has leaked."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...positions import Dense
from ...problem import NAMES, Inputs, Partial, Problem
from ...tiles import TileShape
from .. import triton
from ..made import made_of
from ..reads import axes_of, blocks, readable
from ..sight import Sight, banded, kind_of
from ..tape import Tape, repeat
from ..triton.backward_pass import ROWS, nothing, run_dk_dv, run_dq, sink_gradient
from ..triton.call import Call
from .backward_ends import delta_kernel, dq_kernel
from .backward_program import backward_kernel
from .backward_variant import PART, REGISTERS, Variant, Wide, block_m
from .config import Config, padded
from .forward_pass import LEAST, score_of
from .launch import launch, launch_plain, tiles
from .looks import looked_at, settled, visits_of_keys
from .roster import CHANGE_OF_KEYS, in_turn, roster, steps
from .versions import VERSION

NARROW = 128
"""Columns of q, k or v whose gradients fit in the registers of one warpgroup."""

ROOM = 32 * 2**20
"""Bytes of L2 for what heads that go together read and add to."""

WAVE = 128
"""Programs that run together, about."""

STAY = VERSION < (3, 7)
"""Whether programs may stay: a later Triton than what this was measured with keeps a stage where it costs a step more."""

SHORT = 64
"""Steps of a block of keys, on average, up to which programs stay: what a change of programs takes is little beside more."""


class Stage(NamedTuple):
    """One call's tensors, q, k, v, o and do in a form that descriptors can read."""

    problem: Problem
    x: Inputs[Tensor]
    o: Tensor
    do: Tensor
    lse: Tensor
    dlse: Tensor | None
    sight: Sight
    config: Config
    tape: Tape


def backward(
    problem: Problem, x: Inputs[Tensor], saved: Partial, grads: Partial, config: Config, needs: Sequence[str]
) -> Inputs[Tensor]:
    """Gradients of Σ do∘o + Σ dlse∘lse for the inputs named in `needs`; others are not read."""
    p = problem
    if 0 in (p.b, p.n, p.s, p.h):
        return nothing(p, x, grads, needs)
    if "alibi" in needs:
        return triton.backward(p, x, saved, grads, other(p, config), needs)
    lse, dlse = saved.lse.contiguous(), None if grads.lse is None else grads.lse.contiguous()
    do = grads.o.to(x.q.dtype)
    given = {"q": x.q, "k": x.k, "v": x.v, "alibi": x.alibi, "o": saved.o, "do": do, "lse": lse, "dlse": dlse}

    def record(tape: Tape) -> None:
        q, k, v, o, upstream = (readable(t) for t in (x.q, x.k, x.v, saved.o, do))
        run(Stage(p, Inputs(q, k, v, alibi=x.alibi), o, upstream, lse, dlse, looked_at(p, config, q), config, tape))

    found = repeat(config.known, "backward", given, record)
    grad = {"q": found["dq"], "k": found["dk"], "v": found["dv"]}
    if "sink" in needs and x.sink is not None:
        grad["sink"] = sink_gradient(x.sink, lse, found["stats"])
    return Inputs(*[grad[name] if name in needs else getattr(x, name) for name in NAMES])  # type: ignore[arg-type]


def other(problem: Problem, config: Config) -> Any:
    """The sizes of triton's kernels for a problem."""
    return config.known.setdefault("triton", triton.configure(problem))


def run(at: Stage) -> None:
    """All launches; dq, dk, dv and stats are on the tape then."""
    p, tape = at.problem, at.tape
    C = variant(p)
    stats = tape.room("stats", (2, p.b, p.h, blocks(p.n, ROWS) * ROWS), torch.float32, at.do)
    counts = tape.room("counts", (p.b, p.h, blocks(p.n, C.M), 2), torch.int32, at.do)
    sums = tape.room("sums", (p.b * p.h, blocks(p.n, C.M), C.M // PART * C.PIECES * C.PIECE, 32), torch.float32, at.do)
    delta(at, C, stats, counts)
    dk, dv, key_notes = dk_dv(at, C, stats, sums, counts)
    dq, row_notes = finished(at, C, sums, counts)
    if C.MASK != "NONE":
        mend(at, stats, (dq, row_notes), (dk, dv, key_notes))


def variant(problem: Problem) -> Variant:
    """What the main kernel is compiled for."""
    p, score = problem, problem.score
    width, plain = padded(max(p.d, p.e)), score.alibi is None and score.softcap is None and score.scale >= LEAST
    starts = p.layout.starts if isinstance(p.layout, Dense) else None
    kind = "NONE" if kind_of(p) == "NONE" else "BAND" if starts is not None and banded(p.mask) else "ROWS"
    make = Wide if width > NARROW else Variant
    return make(
        width, block_m(width, plain and kind != "ROWS"), kind, plain, score.alibi is not None, score.softcap is not None, p.wide
    )


def delta(at: Stage, C: Variant, stats: Tensor, counts: Tensor) -> None:
    """What ds needs of each row, and counters at 0."""
    p, lines, whole = at.problem, stats.shape[3], at.problem.e == C.WIDTH
    steps = [[stride * t.element_size() // 16 for stride in axes_of(t)[1][:3]] for t in (at.o, at.do)]
    args = (
        at.o, *steps[0], at.do, *steps[1], at.lse, at.dlse, stats, counts, p.n, p.h, counts.shape[2], lines, p.b * p.h, p.e,
        PART, C.WIDTH, whole,
    )  # fmt: skip
    kinds = (at.o.dtype, at.do.dtype, at.dlse is None, C.WIDTH, whole)
    launch_plain(delta_kernel, p.b * p.h * lines // PART, args, C.WIDTH // 32, kinds, at.tape)


def dk_dv(at: Stage, C: Variant, stats: Tensor, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """dk, dv, notes of what is not finite in 64 of their rows; and the sums of dq."""
    p, x, tape, made = at.problem, at.x, at.tape, made_of(at.problem, at.x.q)
    dk, dv = (tape.room(name, (p.b, p.s, p.g, size), made, at.do) for name, size in (("dk", p.d), ("dv", p.e)))
    notes = None
    if C.MASK != "NONE":
        notes = tape.room("keys' notes", (p.b * p.g * blocks(p.s, PART),), torch.int8, at.do)
    lines = stats.view(2, p.b * p.h, -1, C.M).transpose(1, 2)
    keys, heads, many = blocks(p.s, C.N), p.b * p.g, span(p, C)
    leave = (None, None) if p.wide else (tiles(dk, PART, C.LEAVES), tiles(dv, PART, C.LEAVES))
    C, mine = staying(at, C)
    args = (
        tiles(x.q, C.M, C.WIDTH), tiles(x.k, C.N, C.WIDTH), tiles(x.v, C.N, C.WIDTH), tiles(at.do, C.M, C.WIDTH),
        tiles(lines, 1, C.M).moved(stats), tiles(sums.transpose(1, 2), C.PIECE, 32).moved(sums), *leave,
        dk, dv, counts, notes, *mask(at, C), *score(at), p.n, p.s, p.h, p.g, p.group, p.d, p.e, heads, keys, many,
        blocks(heads, many), turns(p, C), heads * keys, mine,
    )  # fmt: skip
    kinds = (x.q.dtype, None if x.alibi is None else x.alibi.dtype)
    programs = at.config.programs if C.PERSISTENT else heads * keys
    launch(backward_kernel, programs, args, C, REGISTERS, kinds, tape, C.PERSISTENT)
    return dk, dv, notes


def staying(at: Stage, C: Variant) -> tuple[Variant, Tensor | None]:
    """The variant whose programs stay, and the roster that it needs, where blocks of keys differ in length, are so short that
    it pays, and are all seen by somebody; else the given one. (Those that are alike follow each other best by themselves.)"""
    p, programs = at.problem, at.config.programs
    keys, heads = blocks(p.s, C.N), p.b * p.g
    if not STAY or C.WIDTH > NARROW or C.WIDE or C.MASK != "BAND" or heads * keys <= programs:
        return C, None
    found = steps(p.n, p.s, (at.sight.left, at.sight.right), TileShape(C.M, C.N))
    if found.min() == 0 or found.mean() * p.group > SHORT:
        return C, None
    order = in_turn(found * p.group, heads, span(p, C), turns(p, C))
    mine = settled("roster of keys", at.config, at.do, lambda: roster(order, programs, CHANGE_OF_KEYS))
    if mine is None:
        at.tape.whole = False
    at.tape.hold(mine)
    return replace(C, PERSISTENT=mine is not None), mine


def finished(at: Stage, C: Variant, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor | None]:
    """dq of its sums, and notes of what is not finite in 64 rows."""
    p, tape, made, whole = at.problem, at.tape, made_of(at.problem, at.x.q), at.problem.d == C.WIDTH
    dq = tape.room("dq", (p.b, p.n, p.h, p.d), made, at.do)
    many = p.b * p.h * blocks(p.n, PART)
    notes = None if C.MASK == "NONE" else tape.room("rows' notes", (many,), torch.int8, at.do)
    sizes = (PART, C.M, C.WIDTH, C.PIECES, whole)
    args = (sums, counts, dq, notes, float(p.score.scale), p.n, p.h, counts.shape[2], p.d, *sizes)
    launch_plain(dq_kernel, many, args, 8, (made, notes is None, *sizes), tape)
    return dq, notes


def mend(at: Stage, stats: Tensor, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor, Tensor]) -> None:
    """Run blocks again that were noted: a product multiplies, and what a hidden pair holds may be NaN."""
    p, tape = at.problem, at.tape
    call = Call.of(p, at.x, other(p, at.config))
    run_dq(call, call.careful(p.b * p.h * blocks(p.n, PART), PART), at.do, stats, (rows[0], None, rows[1]), tape)
    run_dk_dv(call, call.careful(p.b * p.g * blocks(p.s, PART), PART), at.do, stats, keys, tape)


def mask(at: Stage, C: Variant) -> tuple[Any, ...]:
    """first_ptr … seen_b in the kernel's parameter list."""
    p, sight = at.problem, at.sight
    if sight.first is None:
        return None, None, 0, sight.left, sight.right, None, 0, None, 0
    visits, seen = visits_of_keys(p, sight, at.config, TileShape(C.M, C.N), at.do)
    at.tape.hold(sight.first, sight.past, visits, seen)
    many = len(sight.first) > 1
    steps = [t.stride(0) if many else 0 for t in (sight.first, visits, seen)]
    return sight.first, sight.past, steps[0], sight.left, sight.right, visits, steps[1], seen, steps[2]


def score(at: Stage) -> tuple[Any, ...]:
    """scale … ahead in the kernel's parameter list."""
    scale, cap, slopes, slopes_b, _, ahead = score_of(at.problem, at.x, None)
    return scale, cap, slopes, slopes_b, ahead


def span(problem: Problem, C: Variant) -> int:
    """Heads of a section (see `backward_walk`): where these go in turn as many as stay in a GPU's L2, and no more than half of
    all; else two waves of programs, that neither have to wait for each other much, nor end with long ones."""
    p = problem
    if not turns(p, C):
        return min(p.b * p.g, max(1, 2 * WAVE // blocks(p.s, C.N)))
    return min(blocks(p.b * p.g, 2), max(1, ROOM // (p.n * bytes_of_row(p, C))))


def turns(problem: Problem, C: Variant) -> int:
    """1 if sections go up and down in turn: L2 keeps the rows that a wave of programs passes until the next block of keys
    comes."""
    return int(WAVE * C.N * bytes_of_row(problem, C) <= ROOM)


def bytes_of_row(problem: Problem, C: Variant) -> int:
    """What programs read and add to of a query row of all heads of a group."""
    return problem.group * C.WIDTH * (2 * problem.itemsize + 4)
