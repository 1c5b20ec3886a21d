"""A call of the backward kernel: what it is told, the same for all calls on tensors of one layout but for the addresses; and
what is left to add up when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...positions import Dense
from ...problem import NAMES, Inputs, Partial, Problem
from ...tiles import TileShape
from ..made import made_of
from ..remember import remember
from . import amx_backward, threads
from .arguments import LINE
from .arithmetic import LOG2_E
from .backward_kernel import BLOCK, MATRICES, PANEL, REACH, SUMS_BYTES
from .backward_steps import STRIP, odd_row
from .config import Config
from .forward_call import options, seeded
from .kernels import kernel
from .prepared import ALONE, Prepared, float32, rowwise, steps
from .sight import Sight, look
from .target import Target, l2_bytes

Tensors = dict[str, Tensor]

FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}

NOTHING = torch.zeros((), **FLOAT).expand(1, 1, 1)
"""What a gradient of lse is where there is none: 0 for every "b h n", since its distances are 0."""

ROWS = 48
"""Query rows of a block: with more, tiles at the edge of a mask waste more; with fewer, each brings less work along."""

KEYS = 256
"""The most keys of a block: with fewer, query rows come by more often."""

SHARE = 0.6
"""The part of a second-level cache that a block of keys and all that meets it may fill."""


def sizes(problem: Problem, target: Target) -> TileShape:
    """Rows and keys of a block: as many keys as the cache has room for, in blocks of one size."""
    if target.amx:
        return amx_backward.sizes(problem)
    p, panel = problem, PANEL * target.lanes
    rows = min(ROWS, _filled(max(p.n, 1), STRIP))
    room = SHARE * l2_bytes() / 4 - rows * (2 * p.d + p.e)
    keys = int(room / (3 * p.d + 2 * p.e + 2 * rows)) // panel * panel
    keys = min(max(keys, panel), KEYS)
    blocks = -(-max(p.s, 1) // keys)
    return TileShape(rows, _filled(-(-max(p.s, 1) // blocks), panel if blocks > 1 else target.lanes))


def scratch(problem: Problem, shape: TileShape, target: Target) -> tuple[dict[str, int], int]:
    """Where the matrices of a thread lie and how long their rows are, in the kernel's words; and the bytes of all of them."""
    if target.amx:
        return amx_backward.scratch(problem, shape)
    (rows, keys), lanes, p = shape, target.lanes, problem
    key_row, d_row, e_row = (odd_row(columns, lanes) for columns in (keys + lanes, p.d, p.e))
    length = {
        "kt": _filled(p.d, lanes) * key_row, "vt": _filled(p.e, lanes) * key_row,
        **dict.fromkeys(("k", "dk"), (keys + STRIP) * d_row), "dv": (keys + STRIP) * e_row,
        **dict.fromkeys(("q", "dq"), (rows + STRIP) * d_row), "do": (rows + STRIP) * e_row,
        **dict.fromkeys(("p", "ds"), (rows + STRIP) * key_row), "sums": rows * SUMS_BYTES,
    }  # fmt: skip
    words, end = {"key_row": key_row, "d_row": d_row, "e_row": e_row}, 0
    for name in MATRICES:
        words[f"{name}_at"] = end
        end += _filled(length[name], LINE)
    return words, end


def hides(problem: Problem) -> bool:
    """Whether some pair may be hidden: by the mask, by packing, or by a bias of −inf."""
    p = problem
    return p.mask.kind != "NONE" or not isinstance(p.layout, Dense) or p.score.bias is not None


def workspace_bytes(problem: Problem, target: Target) -> int:
    """What a thread keeps beside inputs, outputs and gradients."""
    return scratch(problem, sizes(problem, target), target)[1]


def reach(sight: Sight, s: int, shape: TileShape) -> Tensor:
    """What blocks of rows see, in the order of `REACH`: int64 "b row_blocks 6"."""
    first, past = (x.numpy().astype(np.int64) for x in (sight.first, sight.past))
    nothing = first >= past
    first, past = np.where(nothing, s, first), np.where(nothing, 0, past)
    starts = np.arange(0, first.shape[1], shape.block_m)
    least_first, least_past = (np.minimum.reduceat(x, starts, axis=1) for x in (first, past))
    most_first, most_past = (np.maximum.reduceat(x, starts, axis=1) for x in (first, past))
    begin, end = least_first // shape.block_n, -(-most_past // shape.block_n)
    found = np.stack([begin, end, least_first, most_first, least_past, most_past], -1)
    assert found.shape[-1] == len(REACH)
    return torch.from_numpy(found)


def backward(
    problem: Problem, x: Inputs[Tensor], saved: Partial, grads: Partial, config: Config, needs: Sequence[str]
) -> Inputs[Tensor]:
    """Gradients of Σ do∘o + Σ dlse∘lse for the inputs named in `needs`; others are not read.

    dv = pᵀ·do    dp = do·vᵀ    ds = p∘(dp − delta + dlse)    dq = scale·ds·k    dk = scale·dsᵀ·q    delta = rowsum(do∘o)
    """
    p = problem
    with torch.no_grad():
        shape = remember(config.known, "backward", x.q, lambda: sizes(p, config.target))
        tensors = given(p, x, saved, grads)
        add_results(tensors, p, x, needs, shape)
        if p.b and p.n:
            available = threads.available()
            key = ("backward", available, *needs, *[t.stride() for t in tensors.values()])
            prepared = remember(config.known, key, tensors["q"], lambda: prepare(p, tensors, config, needs, available))
            (prepared if p.dropout is None else seeded(prepared, p)).run(tensors.values())
        found = {name: FINISH[name](p, x, tensors) for name in needs}
        return Inputs(*[found.get(name, getattr(x, name)) for name in NAMES])


def given(problem: Problem, x: Inputs[Tensor], saved: Partial, grads: Partial) -> Tensors:
    """What the kernel reads, in the dtypes that it is compiled for."""
    o, do = (rowwise(t.to(made_of(problem, x.q))) for t in (saved.o, grads.o))
    lse, dlse = saved.lse.to(torch.float32), NOTHING if grads.lse is None else grads.lse.to(torch.float32)
    made = {"q": rowwise(x.q), "k": rowwise(x.k), "v": rowwise(x.v), "o": o, "do": do, "lse": lse, "dlse": dlse}
    if x.bias is not None:
        made["bias"] = float32("bias", x.bias)
    if x.alibi is not None:
        made["alibi"] = float32("alibi", x.alibi)
    return made


def add_results(made: Tensors, problem: Problem, x: Inputs[Tensor], needs: Sequence[str], shape: TileShape) -> None:
    """What the kernel writes. dq: in float32, since blocks of keys add to it · stats: see the kernel · turn: counters
    of the row tasks that are done and of the blocks of keys that each block of rows has met · dbias: the bias gradient with all
    its axes, if tiles of ds add up in it · sums "b h n 2": Σ_j ds and Σ_j ds·|i − j|."""
    p, dtype = problem, made["o"].dtype
    empty = torch.empty if p.n else torch.zeros  # nobody writes where there are no rows
    columns, final = p.d if "q" in needs else 0, dtype == torch.float32  # what is copied anyway has rows side by side
    made["dq"] = torch.empty((p.b, p.n, p.h, columns) if final else (p.b, p.h, p.n, columns), **FLOAT)
    made["dq"] = made["dq"] if final else made["dq"].transpose(1, 2)
    made["dk"] = empty((p.b, p.s, p.g, p.d if "k" in needs else 0), dtype=dtype, device="cpu")
    made["dv"] = empty((p.b, p.s, p.g, p.e if "v" in needs else 0), dtype=dtype, device="cpu")
    made["stats"] = torch.empty((3, p.b, p.h, p.n), **FLOAT)
    made["turn"] = torch.zeros(1 + p.b * p.h * -(-p.n // shape.block_m), dtype=torch.int64, device="cpu")
    bias = four_axes(x.bias) if x.bias is not None and "bias" in needs else None
    if bias is not None and bias[3] == p.s:
        made["dbias"] = torch.zeros(bias, **FLOAT)
    if "alibi" in needs or (bias is not None and bias[3] != p.s):
        made["sums"] = torch.zeros((p.b, p.h, p.n, 2), **FLOAT)


def four_axes(x: Tensor) -> tuple[int, ...]:
    """The sizes of a bias along b, h, n and s."""
    return (1,) * (4 - x.dim()) + tuple(x.shape)


def prepare(problem: Problem, tensors: Tensors, config: Config, needs: Sequence[str], available: int) -> Prepared:
    """Work out what tensors of this layout need."""
    p, target, shape = problem, config.target, config.known["backward"]
    sight: Sight = remember(config.known, "sight", tensors["q"], lambda: look(p))
    seen = reach(sight, p.s, shape)
    places, size = scratch(p, shape, target)
    dbias = tensors.get("dbias")
    together = p.b * p.g if dbias is not None and dbias.shape[:2] != (p.b, p.h) else 1
    row_blocks, key_blocks = seen.shape[1], -(-p.s // shape.block_n)
    row_tasks = p.b * p.h * row_blocks
    key_tasks = p.b * p.g // together * key_blocks if set(needs) - {"sink"} else 0
    alone = 2 * p.b * p.h * p.n * p.s * (3 * p.d + 2 * p.e) <= ALONE
    count = 1 if alone else min(available, max(row_tasks, key_tasks))
    added = options(p, tensors, sight)
    scored = "sums" in tensors or dbias is not None or any(added[name] for name in SCORED)
    apart = len(sight.first) > 1
    words: dict[str, Any] = {
        **added, **places, **addresses(tensors, dbias), "b": p.b, "n": p.n, "s": p.s, "h": p.h, "g": p.g, "group": p.group,
        "d": p.d, "e": p.e, "rows": shape.block_m, "keys": shape.block_n, "row_blocks": row_blocks, "row_tasks": row_tasks,
        "key_tasks": key_tasks, "together": together, "scale_f32": p.score.scale, "log2_scale_f32": p.score.scale * LOG2_E,
        "scratch_ptr": 0, "scratch_bytes": size, "hides": int(hides(p)),
        "scored": int(scored), "summed": int("sums" in tensors), **{f"{name}_needed": int(name in needs) for name in "qkv"},
        "first_ptr": sight.first.data_ptr(), "past_ptr": sight.past.data_ptr(), "row_b": 4 * p.n * apart,
        "reach_ptr": seen.data_ptr(), "reach_b": 8 * seen.stride(0) * apart,
    }  # fmt: skip
    pointers = tuple(BLOCK.place[f"{name}_ptr"] // 8 for name in tensors)
    address = kernel("backward", p, target).address("backward")
    return Prepared(address, bytes(BLOCK.filled(words)), BLOCK, pointers, size, count, (seen, *sight.held))


SCORED = ("bias", "alibi", "capped", "table", "dropout")
"""Options that make more of a score than scale·q·k, or hide more than an interval does."""

AXES = {
    **dict.fromkeys(("q", "o", "do", "dq"), "bnh"), **dict.fromkeys(("k", "v", "dk", "dv"), "bsg"),
    **dict.fromkeys(("lse", "dlse"), "bhn"), **dict.fromkeys(("stats", "turn"), ""),
}  # fmt: skip
"""The axes whose distances the kernel is told."""


def addresses(tensors: Tensors, dbias: Tensor | None) -> dict[str, int]:
    """The words of tensors: no address yet, and distances; those of axes along which dbias is shared are 0."""
    words = {name: word for tensor, axes in AXES.items() for name, word in steps(tensor, tensors[tensor], axes).items()}
    for axis, name in enumerate("bhn"):
        words[f"dbias_{name}"] = 4 * dbias.stride(axis) if dbias is not None and dbias.shape[axis] > 1 else 0
    return words | {"sums_ptr": 0, "dbias_ptr": 0, "dbias": int(dbias is not None)}


# ---- what is left to do when the kernel is done


def _finish_bias(problem: Problem, x: Inputs[Tensor], tensors: Tensors) -> Tensor:
    """Tiles that have added up, or the sums of rows where all keys share a number."""
    assert x.bias is not None
    whole = tensors["dbias"] if "dbias" in tensors else _summed(tensors["sums"][..., :1], four_axes(x.bias))
    return whole.reshape(x.bias.shape).to(x.bias.dtype)


def _finish_alibi(problem: Problem, x: Inputs[Tensor], tensors: Tensors) -> Tensor:
    """A slope takes the distance of every pair off its logit."""
    assert x.alibi is not None
    batch = x.alibi.shape[0] if x.alibi.dim() == 2 else 1
    return -_summed(tensors["sums"][..., 1], (batch, problem.h, 1)).reshape(x.alibi.shape).to(x.alibi.dtype)


def _finish_sink(problem: Problem, x: Inputs[Tensor], tensors: Tensors) -> Tensor:
    """A sink is a key without a value: its dp is 0."""
    assert x.sink is not None
    lse = tensors["lse"].double()
    weights = torch.exp(x.sink.double()[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    return _summed(weights * -tensors["stats"][0].double(), (1, problem.h, 1)).reshape(x.sink.shape).to(x.sink.dtype)


FINISH: dict[str, Any] = {
    "q": lambda problem, x, tensors: tensors["dq"].to(tensors["o"].dtype, memory_format=torch.contiguous_format),
    "k": lambda problem, x, tensors: tensors["dk"],
    "v": lambda problem, x, tensors: tensors["dv"],
    "bias": _finish_bias,
    "alibi": _finish_alibi,
    "sink": _finish_sink,
}
"""From what the kernel has written to the gradient of each input."""


def _summed(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sums along the axes of which `shape` has 1, always in one order, which torch with several threads does not promise."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return torch.from_numpy(x.numpy().sum(axes, dtype=np.float64, keepdims=True))


def _filled(size: int, step: int) -> int:
    """`size`, filled up to a multiple of `step`."""
    return -(-size // step) * step
