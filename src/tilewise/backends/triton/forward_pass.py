"""o and lse: one program a block of query rows of one head, whose state folds over the key tiles that its rows can see."""

# Kernels are in Triton's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Inputs, Partial, Problem
from ..made import made_of, unseen, wide
from ..reads import blocks
from ..tape import Tape, repeat
from .call import Call
from .config import Config
from .launch import launch, rows
from .steps import (
    LOOK,
    absorb,
    absorb_sink,
    block_of_rows,
    broken,
    finish,
    kept,
    kernel,
    load,
    logits,
    note,
    noted,
    product,
    scaled,
    some_noted,
    store,
    unit_of,
    weigh,
    zeros,
)
from .walk import count_of, hide, tile_of, widened


def forward(problem: Problem, x: Inputs[Tensor], config: Config) -> Partial:
    """Exact attention: one kernel, and where pairs are hidden one that looks for blocks that hidden NaN has reached."""
    p = problem
    if 0 in (p.b, p.n, p.s, p.h):
        return unseen(p, x)
    sink = None if x.sink is None else x.sink.contiguous()
    given = {"q": x.q, "k": x.k, "v": x.v, "bias": x.bias, "alibi": x.alibi, "sink": sink}
    made = repeat(config.known, "forward", given, lambda tape: _forward(Call.of(p, x, config), sink, tape))
    return Partial(made["o"], made["lse"])


def _forward(call: Call, sink: Tensor | None, tape: Tape) -> None:
    """The launches of `forward`."""
    p, x, main, hides = call.problem, call.x, call.config.forward, call.config.hides
    o, lse = tape.room("o", (p.b, p.n, p.h, p.e), made_of(p, x.q), x.q), tape.room("lse", (p.b, p.h, p.n), wide(x.q), x.q)
    notes = tape.room("notes", (p.b * p.h * blocks(p.n, main.block_m),), torch.int8, x.q) if hides else None
    for sizes, grid in call.passes(main, p.b * p.h, p.n, "M", again=hides):
        q, k, v = rows(x.q, sizes.block_m), rows(x.k, sizes.block_n), rows(x.v, sizes.block_n)
        by_rows, _ = call.lists(sizes)
        tape.hold(*call.kept(by_rows))
        args = (*q, *k, *v, o, lse, notes, sink, *call.options(sizes), *call.tail(by_rows), p.b)
        launch(forward_kernel, grid, args, (call.variant(sizes, hides),), sizes, call.kinds, tape)


@triton.jit
def sweep(state, q, rows, keys, b, key_head, options, visits, n, s, C: tl.constexpr, FULL: tl.constexpr):
    """The state after all visited tiles of one kind, FULL or PARTIAL."""
    m, l, acc = state
    i, first, past, row = rows
    score, positions, drop, mask = options
    unit = unit_of(score, C)
    for t in tl.range(0, count_of(visits, FULL), num_stages=C.STAGES):
        col = tile_of(t, visits, C, FULL) * C.BLOCK_N
        j = (col + tl.arange(0, C.BLOCK_N))[None, :]
        k = load(keys[0], b, key_head, col, C.BLOCK_N, C.D0, C.D1)
        x = logits(product(q, k, C.D1, C), score, positions, (row, col), i, j, n, s, C)
        if not FULL:
            x = hide(x, mask, first, past, i, j, n, s, C)
        m, l, p, alpha = absorb(m, l, x, unit, C)
        if C.DROPOUT:
            p = tl.where(kept(drop, positions, (row, col), i, j, n, s, C), p * drop[2], 0.0)
        v = load(keys[1], b, key_head, col, C.BLOCK_N, C.E0, C.E1)
        acc = weigh(p, v, scaled(acc, alpha, C.E1), x != float("-inf"), C.E1, C)
    return m, l, acc


@triton.jit
def fold(q, rows, keys, b, key_head, options, visits, n, s, C: tl.constexpr):
    """The state after every tile that the rows see: FULL ones, then those that the mask cuts or the last key ends in."""
    m, l = tl.full([C.BLOCK_M], float("-inf"), C.ACC), tl.zeros([C.BLOCK_M], C.ACC)
    state = (m, l, zeros(C.BLOCK_M, C.E0, C.E1, C.ACC))
    if C.APART:
        state = sweep(state, q, rows, keys, b, key_head, options, visits, n, s, C, True)
    else:
        visits = widened(visits)
    return sweep(state, q, rows, keys, b, key_head, options, visits, n, s, C, False)


@triton.jit
def o_block(at, block, slabs, out, sink_ptr, given, lists, sizes, C: tl.constexpr):
    """One block of query rows of one head, from q to o and lse."""
    n, s, h, group = sizes
    o_ptr, lse_ptr, broken_ptr = out
    b, head, options, i, rows, visits = block_of_rows(at, block, given, lists, sizes, C)
    q = load(slabs[0], b, head, block * C.BLOCK_M, C.BLOCK_M, C.D0, C.D1)
    m, l, acc = fold(q, rows, (slabs[1], slabs[2]), b, head // group, options, visits, n, s, C)
    if C.HIDES and not C.CAREFUL:
        note(broken_ptr, at, block, n, broken(acc, C.E1), C.BLOCK_M)
    if sink_ptr is not None:
        m, l, acc = absorb_sink(m, l, acc, tl.load(sink_ptr + head).to(C.ACC), C)
    o, lse = finish(m, l, acc, C)
    store(o_ptr, o, ((b.to(tl.int64) * n + i) * h + head) * C.E, i < n, C.E, C.E0, C.E1)
    tl.store(lse_ptr + at.to(tl.int64) * n + i, lse, mask=i < n)


@kernel
def forward_kernel(
    q0, q1, k0, k1, v0, v1, o_ptr, lse_ptr, broken_ptr, sink_ptr,
    scale: tl.float64, softcap: tl.float64, bias_ptr, bias_b: tl.int64, bias_h: tl.int64, bias_n: tl.int64, bias_s: tl.int64,
    alibi_ptr, alibi_b: tl.int64, seed_ptr, threshold: tl.uint32, factor: tl.float64,
    i_ptr, j_ptr, r_ptr, i_b: tl.int64, j_b: tl.int64,
    first_ptr, past_ptr, row_b: tl.int64, left: tl.int32, right: tl.int32,
    table_ptr, table_b: tl.int64, table_h: tl.int64, table_n: tl.int64, table_s: tl.int64,
    order_ptr, count_ptr, list_b: tl.int64, list_h: tl.int64, width: tl.int64,
    n: tl.int32, s: tl.int32, h: tl.int32, group: tl.int32, b: tl.int32, C: tl.constexpr,
):  # fmt: skip
    """Grid: b·h·⌈n / BLOCK_M⌉ programs. The blocks of a head follow each other, the last first: under a causal mask it has
    most to do. A CAREFUL kernel has any grid, and runs again the blocks that were noted as broken."""
    given = (
        scale, softcap, bias_ptr, bias_b, bias_h, bias_n, bias_s, alibi_ptr, alibi_b, seed_ptr, threshold, factor,
        i_ptr, j_ptr, r_ptr, i_b, j_b, first_ptr, past_ptr, row_b, left, right, table_ptr, table_b, table_h, table_n, table_s,
    )  # fmt: skip
    lists, sizes = (order_ptr, count_ptr, list_b, list_h, width), (n, s, h, group)
    slabs, out = ((q0, q1), (k0, k1), (v0, v1)), (o_ptr, lse_ptr, broken_ptr)
    blocks, pid = tl.cdiv(n, C.BLOCK_M), tl.program_id(0)
    if C.CAREFUL:
        notes = b * h * tl.cdiv(n, C.NOTED)
        for first in range(pid, notes, tl.num_programs(0) * LOOK):
            if some_noted(broken_ptr, first, notes):
                for one in range(LOOK * (C.NOTED // C.BLOCK_M)):
                    at, block, again = noted(broken_ptr, first, one, notes, n, C.BLOCK_M, C)
                    if again:
                        o_block(at, block, slabs, out, sink_ptr, given, lists, sizes, C)
    else:
        o_block(pid // blocks, blocks - 1 - pid % blocks, slabs, out, sink_ptr, given, lists, sizes, C)
