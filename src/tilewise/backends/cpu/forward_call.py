"""A call of the forward kernel: what it is told, the same for all calls on tensors of one layout but for the addresses. The
first call of a layout works it out, the others fill addresses in."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mask import Tile
from ...problem import Inputs, Partial, Problem
from ..made import made_of
from ..remember import remember
from . import decode_call, threads
from .amx_forward import SCORE_ROWS
from .arguments import LINE
from .arithmetic import LOG2_E
from .config import Config, rows_of_task
from .forward_kernel import BLOCK, state_bytes
from .kernels import kernel
from .pack import key_columns, value_columns
from .prepared import ALONE, Prepared, float32, rowwise, steps
from .sight import Sight, look
from .target import Target

WORD = 2**32


class Plain(NamedTuple):
    """All of a call on q, k and v alone, which the kernel reads as they are, but their addresses; of o and lse sizes and
    strides, which torch takes less time for than for sizes alone."""

    prepared: Prepared
    o: tuple[tuple[int, ...], tuple[int, ...]]
    lse: tuple[tuple[int, ...], tuple[int, ...]]
    made: torch.dtype


def forward(problem: Problem, x: Inputs[Tensor], config: Config) -> Partial:
    """o "b n h e" and lse "b h n". Calls that come again take a short way: of a small one, finding out is most."""
    q, k, v = x.q, x.k, x.v
    key = (threads.available(), q.stride(), k.stride(), v.stride())
    plain: Plain | None = config.known.get(key)
    if plain is None:
        return forward_any(problem, x, config, key)
    o = q.new_empty_strided(*plain.o, dtype=plain.made)
    lse = q.new_empty_strided(*plain.lse, dtype=torch.float32)
    plain.prepared.run((q, k, v, o, lse))
    return Partial(o, lse)


def forward_any(problem: Problem, x: Inputs[Tensor], config: Config, key: Any) -> Partial:
    """`forward` of any call; `key` is what it is known by if it is plain."""
    p, made = problem, made_of(problem, x.q)
    q, k, v = (rowwise(t) for t in (x.q, x.k, x.v))
    o = torch.empty((p.b, p.n, p.h, p.e), dtype=made, device="cpu")
    lse = torch.empty((p.b, p.h, p.n), dtype=torch.float32, device="cpu")
    if o.numel():
        extras = {name: t for name, t in (("bias", x.bias), ("alibi", x.alibi), ("sink", x.sink)) if t is not None}
        tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, **{name: float32(name, t) for name, t in extras.items()}}
        prepared = (decode_call.run if decode_call.suits(p) else run)(p, tensors, config)
        if len(prepared.pointers) == 5 and p.dropout is None and q is x.q and k is x.k and v is x.v:
            config.known[key] = Plain(prepared, (o.shape, o.stride()), (lse.shape, lse.stride()), made)
    return Partial(o, lse)


def run(problem: Problem, tensors: dict[str, Tensor], config: Config) -> Prepared:
    """Fill o and lse, which are among the tensors; by which call."""
    available = threads.available()
    key = ("forward", available, *[t.stride() for t in tensors.values()])
    prepared = remember(config.known, key, tensors["q"], lambda: prepare(problem, tensors, config, available))
    (prepared if problem.dropout is None else seeded(prepared, problem)).run(tensors.values())
    return prepared


def prepare(problem: Problem, tensors: dict[str, Tensor], config: Config, available: int) -> Prepared:
    """Work out what tensors of this layout need."""
    p, target = problem, config.target
    sight: Sight = remember(config.known, "sight", tensors["q"], lambda: look(p))
    kinds = remember(config.known, "kinds", tensors["q"], lambda: tile_kinds(p, sight, config))
    alone = 2 * p.b * p.h * p.n * p.s * (p.d + p.e) <= ALONE
    count = 1 if alone else available
    rows = rows_of_task(config, p.b * p.h, p.n, count)
    count = min(count, p.b * p.h * -(-p.n // rows))
    places, size = tiles(target, rows, config.keys, (p.d, p.e))
    words: dict[str, Any] = {
        "b": p.b, "h": p.h, "group": p.group, "n": p.n, "s": p.s, "d": p.d, "e": p.e, "rows": rows, "keys": config.keys,
        "ahead": ahead(target, rows, config.keys, p.s),
        "scale_f32": p.score.scale * LOG2_E, "d_columns": key_columns(target, p.d), "e_columns": value_columns(target, p.e),
        "scratch_bytes": size, "scratch_ptr": 0, **places,
        **steps("q", tensors["q"], "bnh"), **steps("k", tensors["k"], "bsg"), **steps("v", tensors["v"], "bsg"),
        **steps("o", tensors["o"], "bnh"), "lse_ptr": 0, "sink_ptr": 0, "sinks": int("sink" in tensors),
        "first_ptr": sight.first.data_ptr(), "past_ptr": sight.past.data_ptr(), "sight_b": 4 * p.n * (len(sight.first) > 1),
        "kind_ptr": 0 if kinds is None else kinds.data_ptr(),
        **{f"kind_{axis}": 0 if kinds is None else kinds.stride(at) for at, axis in enumerate("bhn")},
        **options(p, tensors, sight),
    }  # fmt: skip
    held = sight.held if kinds is None else (*sight.held, kinds)
    pointers = tuple(BLOCK.place[f"{name}_ptr"] // 8 for name in tensors)
    address = kernel("forward", p, target).address("forward")
    return Prepared(address, bytes(BLOCK.filled(words)), BLOCK, pointers, size, count, held)


def ahead(target: Target, rows: int, keys: int, s: int) -> int:
    """Rows to fetch with each tile of scores, so that all are there in time; see `forward_kernel.write_fetch`."""
    if s <= keys:
        return -(-target.panel // max(1, -(-s // target.rows)))
    return -(-target.rows // (rows // target.panel))


def tiles(target: Target, rows: int, keys: int, columns: tuple[int, int]) -> tuple[dict[str, int], int]:
    """Where the tiles of a task lie in a thread's scratch memory, and its bytes."""
    d, e = key_columns(target, columns[0]), value_columns(target, columns[1])
    panel, panels = 4 * target.panel, rows // target.panel
    scores = SCORE_ROWS if target.amx else keys + target.rows + 1
    sizes = {
        "q_at": panels * d * panel, "o_at": panels * e * panel, "state_at": panels * state_bytes(target),
        "p_at": scores * panel, "k_at": 4 * (keys + target.rows) * d, "v_at": 4 * keys * e,
    }  # fmt: skip
    places, at = {}, 0
    for name, size in sizes.items():
        places[name], at = at, at + -(-size // LINE) * LINE
    del places["q_at"]
    return places, at


def workspace_bytes(problem: Problem, config: Config) -> int:
    """What a thread keeps beside inputs and outputs."""
    return tiles(config.target, config.panels * config.target.panel, config.keys, (problem.d, problem.e))[1]


def options(problem: Problem, tensors: dict[str, Tensor], sight: Sight) -> dict[str, Any]:
    """The words of bias, slopes, softcap, table and dropout; 0 for what there is not."""
    p, drop, table = problem, problem.dropout, sight.table
    cap = p.score.softcap
    alibi = tensors.get("alibi")
    bias = tensors["bias"].expand(p.b, p.h, p.n, p.s).stride() if "bias" in tensors else (0,) * 4
    where = {name: t for name, t in (("i", sight.i), ("j", sight.j), ("sequence", sight.sequence)) if t is not None}
    return {
        "bias": int("bias" in tensors), "bias_ptr": 0,
        **{f"bias_{axis}": 4 * step for axis, step in zip("bhns", bias, strict=True)},
        "alibi": int(alibi is not None), "alibi_ptr": 0,
        "alibi_b": 0 if alibi is None or alibi.dim() == 1 or len(alibi) == 1 else 4 * alibi.stride(0),
        **{f"{name}_ptr": where[name].data_ptr() if where else 0 for name in ("i", "j", "sequence")},
        "i_b": 4 * p.n, "j_b": 4 * p.s, "capped": int(cap is not None), "cap_f32": (cap or 0.0) * LOG2_E,
        "table": int(table is not None), "table_ptr": 0 if table is None else table.data_ptr(),
        **{f"table_{axis}": 0 if table is None else table.stride(at) for at, axis in enumerate("bhn")},
        "dropout": int(drop is not None), "seed_low": 0, "seed_high": 0, "first_head": 0 if drop is None else drop.head,
        "threshold": 0 if drop is None else min(drop.threshold, WORD - 1), "kept_f32": 1.0 if drop is None else drop.scale,
    }  # fmt: skip


def seeded(prepared: Prepared, problem: Problem) -> Prepared:
    """The same call with this problem's seed, which no plan holds."""
    assert problem.dropout is not None
    words = prepared.block.make.from_buffer_copy(prepared.template)
    for name, word in zip(("seed_low", "seed_high"), problem.dropout.key, strict=True):
        words[prepared.block.place[name] // 8] = word
    return prepared._replace(template=bytes(words))


def tile_kinds(problem: Problem, sight: Sight, config: Config) -> Tensor | None:
    """What a point test leaves of each panel's tile with each block of keys, int8 "b h panels blocks"; None without one."""
    if sight.table is None:
        return None
    table, (n, s) = sight.table, (problem.n, problem.s)
    panel, keys = config.target.panel, config.keys
    table = table[:1] if table.stride(0) == 0 else table
    table = table[:, :1] if table.stride(1) == 0 else table
    shape = (-(-n // panel), -(-s // keys))
    some, every = (torch.empty(*table.shape[:2], *shape, dtype=torch.bool, device="cpu") for _ in range(2))
    for row in range(shape[0]):
        part = table[:, :, row * panel : (row + 1) * panel]
        for over, out in ((part.any(2), some), (part.all(2), every)):
            for column in range(shape[1]):
                block = over[..., column * keys : (column + 1) * keys]
                out[:, :, row, column] = block.any(-1) if out is some else block.all(-1)
    kinds = some.to(torch.int8) * Tile.PARTIAL + every.to(torch.int8) * (Tile.FULL - Tile.PARTIAL)
    return kinds.expand(problem.b, problem.h, *shape)
