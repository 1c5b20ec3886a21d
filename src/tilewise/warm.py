"""Compiling ahead: the pause of a first call, at a time of one's own choosing."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import backends
from .api import plan as plan_of
from .backends.plan import Plan
from .problem import Inputs
from .request import EXTRAS


@dataclass(frozen=True)
class Warmth:
    """What `warmup` has done; print it."""

    plan: Plan
    kernels: tuple[str, ...]
    """Names of the kernels that are ready, one for each of their launches."""
    seconds: float

    def __str__(self) -> str:
        p = self.plan.problem
        where = f"{self.plan.backend} on {p.device}, {p.dtype}, d={p.d} e={p.e}, mask {p.mask.kind}"
        if not self.kernels:
            return f"{where}: nothing to compile"
        counts = Counter(name.removesuffix("_kernel") for name in self.kernels)
        names = ", ".join(name + (f" ×{count}" if count > 1 else "") for name, count in counts.items())
        return f"{where}: {names} ready after {self.seconds:.1f} s"


def warmup(
    q: Tensor, k: Tensor, v: Tensor, *, backward: bool = True, device: torch.device | str | None = None, **options: Any
) -> Warmth:
    """Compile and load every kernel that a later `attention` on tensors like these would need, so that a server's first
    request, or a first training step, does not wait for a compiler. Takes the options of `attention`, and `ragged` as
    `attention_with_lse` does.

    Reads nothing of q, k and v but shapes and dtypes: kernels run on tensors of a few rows. Kernels are compiled for head
    sizes, dtypes, the sort of mask (none, a band around the diagonal, other intervals, a table) and which of the other options
    there are, never for b, n, s or h: one call serves every length and batch. Call it under the same autocast, and with the
    same `torch.set_float32_matmul_precision`.

    backward    also what the gradients of q, k and v need, and of a bias, slopes or a sink that require one
    device      where the tensors will be; with it q, k and v, and a bias, may be on device "meta" and cost no memory
    Memory      next to none
    Returns     a `Warmth` to print: what is ready, and after how many seconds; a backend without kernels has nothing to do

    >>> q = torch.empty(8, 4096, 16, 64, device="meta")
    >>> print(warmup(q, q, q, device="cpu", backend="torch"))
    torch on cpu, float32, d=64 e=64, mask NONE: nothing to compile
    """
    start = time.perf_counter()
    names = [name for name in EXTRAS if options.get(name) is not None]
    tensors = {"q": q, "k": k, "v": v, **{name: options.pop(name) for name in names}}
    x = Inputs(**{name: _like(t, device, cast=name in "qkv") for name, t in tensors.items()})
    plan = plan_of(x.q, x.k, x.v, **{name: getattr(x, name) for name in names}, **options)
    warm = getattr(backends.load(plan.backend), "warm", None)
    if warm is None:
        return Warmth(plan, (), time.perf_counter() - start)
    if options.get("ragged") is not None:
        x.q, x.k, x.v = x.q[None], x.k[None], x.v[None]
    needs = ["q", "k", "v", *(name for name in names if tensors[name].requires_grad)] if backward else []
    kernels = warm(plan.problem, x, plan.config, needs)
    return Warmth(plan, tuple(kernels), time.perf_counter() - start)


def _like(x: Any, device: torch.device | str | None, cast: bool) -> Any:
    """A tensor of the same shape and dtype over the memory of one element, on `device`; as autocast there would have it."""
    if not isinstance(x, Tensor):
        return x  # for `plan` to refuse
    where, dtype = torch.device(x.device if device is None else device), x.dtype
    if cast and where.type != "meta" and torch.is_autocast_enabled(where.type) and dtype.is_floating_point:
        dtype = dtype if dtype == torch.float64 else torch.get_autocast_dtype(where.type)
    return torch.empty((), dtype=dtype, device=where).expand(x.shape)
