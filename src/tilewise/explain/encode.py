"""A trace as JSON: integers for bytes, six digits for statistics, float16 in base64 for matrices, each matrix once, and of n×s
matrices only the tiles that were visited: what was never computed is not in the file."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..cost.stored import price, steps
from ..mask import Tile
from .trace import Step, Trace


@dataclass
class Arrays:
    """Matrices by their text, so that runs on the same numbers share them."""

    texts: dict[str, int] = field(default_factory=dict)

    def add(self, x: np.ndarray) -> dict[str, Any]:
        """A matrix "heads rows columns" as a reference to its text."""
        return {"shape": list(x.shape), "data": self._keep(x)}

    def add_tiles(self, x: np.ndarray, trace: Trace, hidden: float) -> dict[str, Any]:
        """A matrix "h n s" as its visited tiles, head by head and row by row of tiles; `hidden` is what all else holds."""
        tiles = [x[head, visit.i, visit.j].ravel() for head in range(len(x)) for visit in trace.visits()]
        parts = {"shape": list(x.shape), "data": self._keep(np.concatenate([*tiles, np.zeros(0)]))}
        return parts | {"hidden": None if np.isinf(hidden) else hidden}

    def _keep(self, x: np.ndarray) -> int:
        text = base64.b64encode(np.ascontiguousarray(x, "<f2").tobytes()).decode()
        return self.texts.setdefault(text, len(self.texts))


def dump(value: Any) -> str:
    """JSON that may stand inside a <script>: nothing in it can close one. Keys are sorted, so equal values are equal texts."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def digits(x: Iterable[float]) -> list[float | int | None]:
    """Six significant digits; None for −inf, which JSON does not have."""
    return [None if v == -np.inf else int(v) if v == int(v) else float(f"{v:.6g}") for v in map(float, x)]


def encode(trace: Trace, arrays: Arrays) -> dict[str, Any]:
    """Everything of a trace that a page shows."""
    p, x = trace.problem, trace.inputs
    matrices = {"q": x.q, "k": x.k, "v": x.v, "O": trace.result.o}
    squares = {"S": (trace.s, -np.inf)}
    orders: dict[str, Any] = {
        "flash2": {"fwd": _steps(trace.steps), "bwd": []},
        "flash1": {"fwd": _steps(trace.keys_outside), "bwd": []},
        "standard": {"fwd": _kernels(trace, False), "bwd": []},
    }
    if trace.backward is not None:
        grads = trace.backward.grads
        matrices |= {"dq": grads.q, "dk": grads.k, "dv": grads.v}
        squares |= {"P": (trace.p, 0.0), "dS": (np.nan_to_num(trace.backward.ds), 0.0)}
        orders["flash2"]["bwd"] = _steps(trace.backward.steps)
        orders["flash1"]["bwd"] = _steps(trace.backward.keys_outside)
        orders["standard"]["bwd"] = _kernels(trace, True)
    return {
        "problem": {axis: getattr(p, axis) for axis in ("n", "s", "d", "e", "h", "g", "dtype")}
        | {"block_m": trace.shape.block_m, "block_n": trace.shape.block_n, "scale": p.score.scale},
        "tiles": ["".join(Tile(kind).name[0] for kind in row) for row in trace.kinds],
        "orders": orders,
        "states": _states(trace),
        "lse": [digits(row) for row in trace.result.lse[0]],
        "arrays": {name: arrays.add(matrix[0].transpose(1, 0, 2)) for name, matrix in matrices.items()}
        | {name: arrays.add_tiles(matrix, trace, hidden) for name, (matrix, hidden) in squares.items()},
        "error": float(f"{trace.error:.3g}"),
    }


def _steps(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Steps by what is not 0 or empty of them; `part` stands where it changes."""
    made, part = [], ""
    for step in steps:
        where: dict[str, Any] = {"i": step.i, "j": step.j} if step.tiled else {"name": step.part}
        if step.head:
            where["head"] = step.head
        if step.part != part:
            part = where["part"] = step.part
        made.append(where | _counts(step.load, step.store, step.flops, step.exponentials))
    return made


def _counts(load: dict[str, int], store: dict[str, int], flops: int, exponentials: int) -> dict[str, Any]:
    counts = {"load": load, "store": store, "flops": flops, "exps": exponentials}
    return {name: count for name, count in counts.items() if count}


def _kernels(trace: Trace, backward: bool) -> list[dict[str, Any]]:
    """Standard attention of the same problem, a step for each kernel, as the cost model has it."""
    made = []
    for step in steps(trace.problem, backward=backward):
        one = price(trace.problem, step)
        load = {name: moved.read for name, moved in one.tensors.items() if moved.read}
        store = {name: moved.write for name, moved in one.tensors.items() if moved.write}
        made.append({"part": "standard", "name": step.name, **_counts(load, store, one.flops, one.exponentials)})
    return made


def _states(trace: Trace) -> list[list[list[dict[str, Any] | None]]]:
    """head → i → j → m, ℓ and α of each row after that tile; None where the tile is skipped."""
    rows, cols = trace.kinds.shape
    made: list = [[[None] * cols for _ in range(rows)] for _ in range(trace.problem.h)]
    for step in trace.steps:
        if step.after is not None:
            made[step.head][step.i][step.j] = {name: digits(x) for name, x in step.after._asdict().items()}
    return made
