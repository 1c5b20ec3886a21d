"""Attention over many GPUs against the same kernel on one of them, causal and grouped:

    torchrun --nproc-per-node 2 -m tilewise.bench.ring --json FILE [--tokens 8192 32768] [--method auto]

Rates are TFLOP/s a GPU over visible pairs, 4·d a pair and head forward and 3.5 times that with backward, from the slowest
rank's median. `one` is a sequence of as many tokens as a GPU holds on one GPU, `whole` all tokens on one GPU; `simulated` is
what the simulator says of the same plan beforehand."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
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


def measure(call: Callable[..., Tensor], x: list[Tensor], backward: bool) -> tuple[float, float]:
    """The slowest rank's median seconds of a call, and the spread there."""
    q, k, v = (t.detach().requires_grad_(backward) for t in x[:3])

    def once() -> Any:
        o = call(q, k, v)
        return torch.autograd.grad(o, (q, k, v), x[3]) if backward else o

    clock = Clock(x[0].device.type)
    warm_up(once, clock)
    dist.barrier()
    seconds = clock.laps(once, CALLS)
    found = torch.tensor([median(seconds), spread(seconds)], device=x[0].device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found[0]), float(found[1])


def compare(shape: Shape, tokens: int, backward: bool, method: str, dtype: torch.dtype) -> dict[str, Any]:
    """One row: rates of the ring and of one GPU."""
    world, device = dist.get_world_size(), _device()

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return api.attention(q, k, v, mask=Causal())

    def together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring.attention(q, k, v, mask=Causal(), layout="zigzag", method=method)

    row: dict[str, Any] = {"tokens": tokens, "ranks": world, "pass": "forward+backward" if backward else "forward"}
    runs = (("one", alone, tokens, 1), ("whole", alone, tokens * world, 1), ("ring", together, tokens, world))
    for name, call, rows, gpus in runs:
        seconds, wide = measure(call, shape.tensors(rows, device, dtype), backward)
        row[f"{name}_tflops"] = shape.flops(rows * gpus, backward) / gpus / seconds / 1e12
        row[f"{name}_seconds"], row[f"{name}_spread"] = seconds, wide
    row |= forecast(shape, tokens * world, world, backward, method, dtype)
    return row | {f"ring_over_{name}": row["ring_tflops"] / row[f"{name}_tflops"] for name in ("one", "whole")}


def forecast(shape: Shape, tokens: int, world: int, backward: bool, method: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the simulator says of it: the method, seconds, and the efficiency over one GPU with all tokens."""
    q, k, v, _ = shape.tensors(tokens, torch.device("meta"), dtype)
    problem = Problem.describe(Inputs(q, k, v), Options(Causal()))
    best = choose(
        problem, world, backward=backward, layout="zigzag", method=None if method == "auto" else method_named(method)
    ).best
    return {"moved": str(best.method), "simulated_seconds": best.total_s, "simulated_over_whole": best.efficiency}


def main(arguments: list[str]) -> None:
    """Measure, print on the first rank, and keep."""
    parser = argparse.ArgumentParser(prog="tilewise.bench.ring", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="a GPU")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 4, 128], metavar=("H", "G", "D"))
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(arguments)
    dist.init_process_group("nccl" if _device().type == "cuda" else "gloo")
    rows = []
    for tokens in options.tokens:
        for backward in (False, True):
            row = compare(Shape(*options.heads), tokens, backward, options.method, getattr(torch, options.dtype))
            rows.append(row)
            if dist.get_rank() == 0:
                print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    if options.json is not None and dist.get_rank() == 0:
        said = {"heads": options.heads, "dtype": options.dtype, "method": options.method, "mask": "causal", "layout": "zigzag"}
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
