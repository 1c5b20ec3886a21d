"""What the ranks of a ring compute, merge and add, on one device without the others: every rank's part of a plan one after the
other, where a message is a copy, against the whole sequence in one call, and against what the simulator says of that work.

    python -m tilewise.bench.ring_work --json FILE [--ranks 2 8] [--tokens 8192 32768] [--method direct]

`work_over_whole` is the efficiency of a ring whose communication is wholly hidden."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import api
from ..mask import Causal
from ..problem import Inputs, Options, Partial, Problem
from ..ring.choose import method_named, sides_named
from ..ring.kernel import Kernel
from ..ring.local import attend, backward_shares, forward_shares, results
from ..ring.schedule import make_plan
from ..ring.simulate import simulate
from .report import now, provenance, write
from .ring import CALLS, Shape, bound
from .timing import Clock, median, spread, warm_up


def compare(shape: Shape, tokens: int, world: int, backward: bool, method: str, device: str) -> dict[str, Any]:
    """One row: the work of all ranks, and the whole in one call."""
    x = shape.tensors(tokens * world, torch.device(device), torch.bfloat16)
    problem = Problem.describe(Inputs(*x[:3]), Options(Causal()))
    sides, how = sides_named("zigzag", problem, world), method_named(method)
    plans = [make_plan(problem, *sides, how, backward=way) for way in ((False, True) if backward else (False,))]
    kernel = Kernel(problem)
    qkv = x[0], x[1], x[2]
    saved = attend(plans[0], kernel, qkv)
    grads = Partial(x[3], torch.zeros_like(saved.lse))
    given = [backward_shares(plan, qkv, saved, grads) if plan.backward else forward_shares(plan, qkv) for plan in plans]
    whole = bound(partial(api.attention, mask=Causal()), x, backward)

    def work() -> None:
        for plan, mine in zip(plans, given, strict=True):
            results(plan, kernel, mine)

    row: dict[str, Any] = {"tokens": tokens, "ranks": world, "pass": "forward+backward" if backward else "forward"}
    clock = Clock(x[0].device.type)
    for name, call in (("whole", whole), ("work", work)):
        warm_up(call, clock)
        seconds = clock.laps(call, CALLS)
        row[f"{name}_seconds"], row[f"{name}_spread"] = median(seconds), spread(seconds)
        row[f"{name}_tflops"] = shape.flops(tokens * world, backward) / median(seconds) / 1e12
    forecasts = [simulate(plan) for plan in plans]
    alone, busy = (
        sum(float(size(one)) for one in forecasts) for size in (lambda one: one.alone_s, lambda one: one.busy_s.sum())
    )
    measured = {"work_over_whole": row["work_tflops"] / row["whole_tflops"]}
    return row | measured | {"simulated_over_whole": alone / busy, "simulated_work_seconds": busy}


def main(arguments: list[str]) -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(prog="tilewise.bench.ring_work", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="a rank")
    parser.add_argument("--method", default="direct")
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 4, 128], metavar=("H", "G", "D"))
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args(arguments)
    rows = []
    for world in asked.ranks:
        for tokens in asked.tokens:
            for backward in (False, True):
                rows.append(compare(Shape(*asked.heads), tokens, world, backward, asked.method, asked.device))
                print(
                    "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()), flush=True
                )
    if asked.json is not None:
        said = {"heads": asked.heads, "dtype": "bfloat16", "method": asked.method, "mask": "causal", "layout": "zigzag"}
        command = shlex.join(["python", "-m", "tilewise.bench.ring_work", *arguments])
        write(asked.json, {**provenance(command, now()), **said, "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
