"""Attention over many GPUs against the same kernel on one of them, causal and grouped:

    torchrun --nproc-per-node 2 -m tilewise.bench.ring --json FILE [--tokens 8192 32768] [--method auto] [--backend triton]

Rates are TFLOP/s a GPU over visible pairs, 4·d a pair and head forward and 3.5 times that with backward, from the slowest
rank's median burst of calls that nobody waits for in between; `alone` is one call by itself, waited for. `one` is a sequence
of as many tokens as a GPU holds on one GPU, `whole` all tokens on one GPU; `simulated` is what the simulator says of the same
plan beforehand."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import api
from ..mask import Causal
from ..problem import Inputs, Options, Problem
from ..ring import api as ring
from ..ring.choose import choose, method_named
from .report import now, provenance, write
from .timing import Clock, median, spread, warm_up

CALLS = 12
"""Calls in one burst."""

BURSTS = 3
"""Bursts of each contender; the median one counts."""


class Shape(NamedTuple):
    """Sizes of a model's attention."""

    h: int
    g: int
    d: int

    def flops(self, tokens: int, backward: bool) -> float:
        """Of causal attention over so many tokens."""
        return 4 * self.d * self.h * tokens * (tokens + 1) / 2 * (3.5 if backward else 1)

    def tensors(self, tokens: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v and do of this many tokens."""
        return [torch.randn(1, tokens, x, self.d, device=device, dtype=dtype) for x in (self.h, self.g, self.g, self.h)]


class Timing(NamedTuple):
    """Seconds of a call in bursts of them, the median burst, and the spread of bursts; `alone`: of one call that nothing goes
    before, from its first instruction to its last result. All of the slowest rank."""

    seconds: float
    spread: float
    alone: float


def measure(contenders: dict[str, Callable[[], Any]], clock: Clock, device: torch.device) -> dict[str, Timing]:
    """Contenders take turns; ranks begin each burst, and each single call, together."""
    bursts: dict[str, list[float]] = {name: [] for name in contenders}
    single: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        warm_up(call, clock)
    for _ in range(BURSTS):
        for name, call in contenders.items():
            dist.barrier()
            bursts[name].append(sum(clock.laps(call, CALLS)) / CALLS)
            dist.barrier()
            clock.sync()
            start = time.perf_counter()
            call()
            clock.sync()
            single[name].append(time.perf_counter() - start)
    figures = [[median(bursts[name]), spread(bursts[name]), median(single[name])] for name in contenders]
    found = torch.tensor(figures, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {name: Timing(*row) for name, row in zip(contenders, found.tolist(), strict=True)}


def compare(shape: Shape, tokens: int, backward: bool, method: str, dtype: torch.dtype, backend: str | None) -> dict[str, Any]:
    """One row: rates of the ring and of one GPU."""
    world, device = dist.get_world_size(), _device()
    named = method if method == "auto" else method_named(method)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return api.attention(q, k, v, mask=Causal(), backend=backend)

    def together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring.attention(q, k, v, mask=Causal(), layout="zigzag", method=named, backend=backend)

    runs = {"one": (alone, tokens, 1), "whole": (alone, tokens * world, 1), "ring": (together, tokens, world)}
    calls = {name: bound(call, shape.tensors(rows, device, dtype), backward) for name, (call, rows, _) in runs.items()}
    row: dict[str, Any] = {"tokens": tokens, "ranks": world, "pass": "forward+backward" if backward else "forward"}
    for name, found in measure(calls, Clock(device.type), device).items():
        _, rows, gpus = runs[name]
        row[f"{name}_tflops"] = shape.flops(rows * gpus, backward) / gpus / found.seconds / 1e12
        row |= {f"{name}_seconds": found.seconds, f"{name}_spread": found.spread, f"{name}_alone_seconds": found.alone}
    row |= forecast(shape, tokens * world, world, backward, method, dtype)
    return row | {f"ring_over_{name}": row["ring_tflops"] / row[f"{name}_tflops"] for name in ("one", "whole")}


def bound(call: Callable[..., Tensor], x: list[Tensor], backward: bool) -> Callable[[], Any]:
    """A call with its tensors, and its gradients where they are asked for."""
    q, k, v = (t.detach().requires_grad_(backward) for t in x[:3])

    def once() -> Any:
        o = call(q, k, v)
        return torch.autograd.grad(o, (q, k, v), x[3]) if backward else o

    return once


def forecast(shape: Shape, tokens: int, world: int, backward: bool, method: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the simulator says of it: the method, seconds, and the efficiency over one GPU with all tokens."""
    q, k, v, _ = shape.tensors(tokens, torch.device("meta"), dtype)
    problem = Problem.describe(Inputs(q, k, v), Options(Causal()))
    given = None if method == "auto" else method_named(method)
    best = choose(problem, world, backward=backward, layout="zigzag", method=given).best
    return {"moved": str(best.method), "simulated_seconds": best.total_s, "simulated_over_whole": best.efficiency}


def main(arguments: list[str]) -> None:
    """Measure, print on the first rank, and keep."""
    parser = argparse.ArgumentParser(prog="tilewise.bench.ring", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="a GPU")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 4, 128], metavar=("H", "G", "D"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", help="of all that is measured; else what a plan chooses")
    options = parser.parse_args(arguments)
    on_gpu = _device().type == "cuda"
    more: dict[str, Any] = {}
    if on_gpu:  # messages go before the rest of a kernel that is running
        more = {"device_id": _device(), "pg_options": dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)}
    dist.init_process_group("nccl" if on_gpu else "gloo", **more)
    rows = []
    for tokens in options.tokens:
        for backward in (False, True):
            asked = options.method, getattr(torch, options.dtype), options.backend
            row = compare(Shape(*options.heads), tokens, backward, *asked)
            rows.append(row)
            if dist.get_rank() == 0:
                print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    if options.json is not None and dist.get_rank() == 0:
        said = {"heads": options.heads, "dtype": options.dtype, "method": options.method, "mask": "causal", "layout": "zigzag"}
        said["backend"] = options.backend or "as planned"
        command = shlex.join(
            ["torchrun", "--nproc-per-node", str(dist.get_world_size()), "-m", "tilewise.bench.ring", *arguments]
        )
        write(options.json, {**provenance(command, now()), **said, "rows": rows})
    dist.destroy_process_group()


def _device() -> torch.device:
    """This rank's own GPU, or the host where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    main(sys.argv[1:])
