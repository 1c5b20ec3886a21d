"""A call of the decode kernel: what it is told, and how many parts its keys are split into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...problem import Problem
from ..remember import remember
from . import threads
from .arguments import LINE
from .arithmetic import LOG2_E
from .config import Config
from .decode_kernel import BLOCK, CHUNKS_AT, head_bytes, step_keys
from .kernels import kernel
from .pack import key_columns
from .prepared import ALONE, Prepared, steps
from .sight import Sight, look

PARTS = 256
"""Tasks that keys are split into if there are keys enough: more than threads anywhere, so that none waits long."""

LEAST_KEYS = 256
"""Keys of a task, at least."""


def suits(problem: Problem) -> bool:
    """Whether the decode kernel does all that a problem asks for."""
    p = problem
    extras = p.score.bias is not None or p.score.alibi is not None or p.dropout is not None or p.mask.pointwise
    return p.n == 1 and not extras


def run(problem: Problem, tensors: dict[str, Tensor], config: Config) -> Prepared:
    """Fill o and lse, which are among the tensors; by which call."""
    p, (splits, _) = problem, split(problem)
    lanes, columns = config.target.lanes, key_columns(config.target, p.e)
    tensors["partial"] = torch.empty(p.b * p.h * splits * (columns + lanes), dtype=torch.float32, device="cpu")
    tensors["counter"] = torch.zeros(p.b, dtype=torch.int64, device="cpu")
    available = threads.available()
    key = ("decode", available, *[t.stride() for t in tensors.values()])
    prepared: Prepared = remember(config.known, key, tensors["q"], lambda: prepare(p, tensors, config, available))
    prepared.run(tensors.values())
    return prepared


def split(problem: Problem) -> tuple[int, int]:
    """How many parts there are, and the keys of each: from the problem alone, for they decide how sums are rounded."""
    p = problem
    wanted = max(1, -(-PARTS // p.b))
    keys = max(LEAST_KEYS, -(-p.s // wanted))
    keys = -(-keys // LINE) * LINE
    return max(1, -(-p.s // keys)), keys


def prepare(problem: Problem, tensors: dict[str, Tensor], config: Config, available: int) -> Prepared:
    """Work out what tensors of this layout need."""
    p, target = problem, config.target
    sight: Sight = remember(config.known, "sight", tensors["q"], lambda: look(p))
    (splits, keys), columns = split(p), key_columns(target, p.e)
    size = CHUNKS_AT + p.h * head_bytes(target, p.d, columns)
    cap = p.score.softcap
    words: dict[str, Any] = {
        "b": p.b, "h": p.h, "g": p.g, "group": p.group, "d": p.d, "e": p.e, "d_columns": key_columns(target, p.d),
        "e_columns": columns, "splits": splits, "split_keys": keys, "step": step_keys(target, p.group),
        "partial_bytes": 4 * (columns + target.lanes),
        "scale_f32": p.score.scale * LOG2_E, "capped": int(cap is not None), "cap_f32": (cap or 0.0) * LOG2_E,
        **steps("q", tensors["q"], "b h"), **steps("k", tensors["k"], "bsg"), **steps("v", tensors["v"], "bsg"),
        **steps("o", tensors["o"], "b h"), "lse_ptr": 0, "sink_ptr": 0, "sinks": int("sink" in tensors),
        "first_ptr": sight.first.data_ptr(), "past_ptr": sight.past.data_ptr(), "sight_b": 4 * (len(sight.first) > 1),
        "scratch_ptr": 0, "scratch_bytes": -(-size // LINE) * LINE, "counter_ptr": 0, "partial_ptr": 0,
    }  # fmt: skip
    count = 1 if 2 * p.b * p.h * p.s * (p.d + p.e) <= ALONE else min(available, p.b * splits)
    pointers = tuple(BLOCK.place[f"{name}_ptr"] // 8 for name in tensors)
    template = bytes(BLOCK.filled(words))
    address, held = kernel("decode", p, target).address("decode"), (sight.first, sight.past)
    return Prepared(address, template, BLOCK, pointers, words["scratch_bytes"], count, held)
