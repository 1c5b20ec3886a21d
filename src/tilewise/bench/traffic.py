"""What attention moves, measured: standard attention in eager torch and tilewise on the same tensors, one direction at a time,
their bytes by hardware counters, their time without them, and what the cost model says beside both."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import api, cost
from ..cost import Cost, Passes
from ..cost.orders import PRODUCT
from ..mask import parse
from ..problem import Inputs, Options, Problem
from . import ncu, timing
from .report import Note
from .timing import Clock

WAYS = ("forward", "backward")

HIDDEN = 7
"""Keys at the end of each sequence that a padding mask hides."""

DROPOUT = 0.1

NAME = 120
"""Characters of a kernel's name that a record keeps."""


@dataclass(frozen=True)
class Workload:
    """One problem and one way to compute it: `who` is "tilewise", or "standard" with `passes` as `cost.Passes` reads them. A
    mask of standard attention hides the last keys; with "mask-add" in float, with the others as booleans."""

    case: str
    who: str
    passes: str = ""
    b: int = 64
    n: int = 1024
    h: int = 16
    d: int = 64
    dtype: str = "float16"
    mask: str = "full"

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.case, self.who, self.passes)))


_TRAINING: dict[str, Any] = {"b": 4, "n": 4096, "d": 128, "dtype": "bfloat16"}
_LONG: dict[str, Any] = {"b": 1, "n": 16384, "d": 128, "dtype": "bfloat16"}

WORKLOADS = (
    *(Workload("figure 2", "standard", passes) for passes in ("", "mask-add,dropout", "mask-torch,dropout")),
    Workload("figure 2", "tilewise"),
    Workload("n = 4096", "standard", **_TRAINING),
    Workload("n = 4096", "tilewise", **_TRAINING),
    Workload("n = 4096, causal", "tilewise", mask="causal", **_TRAINING),
    Workload("n = 16384", "tilewise", **_LONG),
    Workload("n = 16384, causal", "tilewise", mask="causal", **_LONG),
)
"""Figure 2's setting first, whose passes have the names of `cost.paper.STANDARD`; then longer sequences, with tensors larger
than any L2."""


@dataclass(frozen=True)
class TrafficRow:
    """One direction of one workload. Bytes over all its kernels: `dram` and `l2` counted, `model` from `cost`."""

    case: str
    name: str
    who: str
    passes: str
    ms: float
    dram_bytes: float | None
    l2_bytes: float | None
    matrix_flops: float | None
    model: dict[str, Any]
    kernels: list[dict[str, Any]] = field(default_factory=list)

    def json(self) -> dict[str, object]:
        return {("pass" if key == "name" else key): value for key, value in asdict(self).items()}


def measure(works: list[Workload], device: str, tell: Callable[[str], None]) -> Iterator[TrafficRow | Note]:
    """Every direction of every workload: timed here, counted in a process of its own. Without counters there are times and a
    note."""
    metrics, lacking = _metrics()
    for work in works:
        for way in WAYS:
            tell(f"{work.name} {way}: timing")
            try:
                ms = 1e3 * timing.median(Clock(device).laps(_warm(prepare(work, way, device)), 10))
            except RuntimeError as error:
                yield Note(work.who, work.name, way, " ".join(str(error).split())[:200])
                continue
            kernels: list[ncu.Kernel] = []
            reason = lacking
            if torch.device(device).type == "cuda":
                torch.cuda.empty_cache()  # the process that counts needs the room
            if not reason:
                tell(f"{work.name} {way}: counting")
                try:
                    kernels = ncu.count([sys.executable, "-m", __name__, json.dumps(asdict(work)), way, device], metrics)
                except ncu.Refused as error:
                    reason = str(error)
            if reason:
                yield Note("ncu", work.name, way, reason)
            yield row(work, way, ms, kernels, device)


def row(work: Workload, way: str, ms: float, kernels: list[ncu.Kernel], device: str) -> TrafficRow:
    """What was found, beside what the model says."""
    counted = {} if not kernels else {"dram": ncu.total(kernels, _dram), "l2": ncu.total(kernels, lambda x: x[ncu.L2])}
    flops = ncu.total(kernels, _matrix) or None
    shown = [{"name": one.name[:NAME], **one.metrics} for one in kernels]
    model = predict(work, way, device)
    return TrafficRow(work.case, way, work.who, work.passes, ms, counted.get("dram"), counted.get("l2"), flops, model, shown)


def predict(work: Workload, way: str, device: str) -> dict[str, Any]:
    """The cost model's counts: of standard attention as eager torch runs it, its products in large tiles, or of the kernels
    that the plan would launch, each with its own tile."""
    problem, back = describe(work, device), way == "backward"
    if work.who == "standard":
        price = cost.standard(problem, back, replace(Passes.parse(work.passes), product=True), PRODUCT)
    else:
        config = _plan(work, device).config
        shapes = {name: getattr(config, name, config).shape for name in ("forward", "dq", "dk_dv")}
        price = cost.forward(problem, shapes["forward"])
        if back:
            price = cost.delta(problem) + cost.dq(problem, shapes["dq"]) + cost.dk_dv(problem, shapes["dk_dv"])
    return model_of(price)


def model_of(price: Cost) -> dict[str, Any]:
    return {"least_bytes": price.least_bytes, "asked_bytes": price.bytes, "flops": price.flops}


def describe(work: Workload, device: str) -> Problem:
    x = torch.empty((), dtype=getattr(torch, work.dtype), device=device).expand(work.b, work.n, work.h, work.d)
    return Problem.describe(Inputs(x, x, x), Options(parse(work.mask)))


def _plan(work: Workload, device: str) -> Any:
    x = torch.empty((), dtype=getattr(torch, work.dtype), device=device).expand(work.b, work.n, work.h, work.d)
    return api.plan(x, x, x, mask=parse(work.mask))


def prepare(work: Workload, way: str, device: str) -> Callable[[], Any]:
    """A call of one direction on fresh tensors."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (work.b, work.n, work.h, work.d) if work.who == "tilewise" else (work.b, work.h, work.n, work.d)
    draw = partial(torch.randn, shape, generator=generator, device=device, dtype=torch.float32)
    q, k, v, do = (draw().to(getattr(torch, work.dtype)) for _ in range(4))
    if work.who == "tilewise":
        mask = parse(work.mask)
        run = lambda: api.attention(q, k, v, mask=mask)  # noqa: E731
    else:
        q *= work.d**-0.5
        passes = Passes.parse(work.passes)
        hidden = torch.arange(work.n, device=device) >= work.n - HIDDEN
        if passes.mask == "add":
            hidden = torch.zeros(work.n, dtype=q.dtype, device=device).masked_fill(hidden, -torch.inf)
        run = lambda: standard(q, k, v, passes, hidden)  # noqa: E731
    if way == "forward":
        return lambda: _without_grad(run)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = run()
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def _without_grad(run: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return run()


def standard(q: Tensor, k: Tensor, v: Tensor, passes: Passes, hidden: Tensor) -> Tensor:
    """Attention as eager torch runs it: a product, what `passes` name, a softmax, a product. "b h n d"; q is scaled already;
    `hidden` "n" is −inf or True where a mask hides a key."""
    s = q @ k.transpose(-1, -2)
    if passes.mask == "add":
        s += hidden
    elif passes.mask:
        s.masked_fill_(hidden, -torch.inf)
    p = torch.softmax(s, -1)
    return (torch.dropout(p, DROPOUT, train=True) if passes.dropout else p) @ v


def run_counted(work: str, way: str, device: str) -> None:
    """Make one call of a workload, given as JSON, with counting on, after others that compile and allocate with it off."""
    call = _warm(prepare(Workload(**json.loads(work)), way, device))
    Clock(device).sync()
    profiler = torch.device(device).type == "cuda"
    if profiler:
        torch.cuda.profiler.start()
    call()
    Clock(device).sync()
    if profiler:
        torch.cuda.profiler.stop()


def _warm(call: Callable[[], Any]) -> Callable[[], Any]:
    for _ in range(3):
        call()
    return call


def _metrics() -> tuple[list[str], str]:
    """What to count; or nothing, and why."""
    try:
        return ncu.metrics(), ""
    except ncu.Refused as error:
        return [], str(error)


def _dram(metrics: dict[str, float]) -> float:
    return sum(metrics[name] for name in ncu.DRAM)


def _matrix(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if name.startswith("sm__ops_path_tensor"))


if __name__ == "__main__":
    run_counted(*sys.argv[1:])
