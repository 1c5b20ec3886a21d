"""FlashAttention by its authors and torch's entrance to it for packed sequences: packages that may not be here, imported only
when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ...ragged import Packed
from ..cases import Task
from .masks import Band, band
from .peer import Attention, Peer

HALF = ("float16", "bfloat16")


@cache
def missing(module: str) -> str:
    """Why a package cannot be used here; empty where it can."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # a library built for another torch or driver can fail in any way
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return ""


def absent(module: str, device: str) -> str:
    return "needs CUDA" if device != "cuda" else missing(module)


def of(name: str, module: str, unbounded: int | None, gradients: bool = True) -> Peer:
    """`flash_attn_func` and `flash_attn_varlen_func` of a module; `unbounded` is its word for a window without limit."""

    def why_not(task: Task) -> Iterator[str]:
        yield from _refusals(task)
        if task.gradients and not gradients:
            yield "computes no gradients"
        if task.problem.score.sink and not _takes(module, "flash_attn_func", "learnable_sink"):
            yield "has no sink"
        if "sink" in task.case.needs:
            yield "a gradient of the sink is not measured"

    def prepare(task: Task) -> Attention:
        p, found = task.problem, import_module(module)
        seen = band(p)
        assert seen is not None
        window = tuple(unbounded if side is None else side for side in seen)
        options: dict[str, Any] = {"softmax_scale": p.score.scale, "causal": seen.causal, "window_size": window}
        if seen.causal and seen.left is None:
            options["window_size"] = (unbounded, unbounded)
        options |= {"softcap": p.score.softcap} if p.score.softcap is not None else {}

        def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
            more = {} if sink is None else {"learnable_sink": sink}
            return _first(found.flash_attn_func(q, k, v, **options, **more))

        if not isinstance(p.layout, Packed):
            return run
        q_offsets, kv_offsets, *longest = _offsets(p.layout, p.device)
        sizes = dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True))
        options |= {"cu_seqlens_q": q_offsets, "cu_seqlens_k": kv_offsets, **sizes}
        return lambda q, k, v: _first(found.flash_attn_varlen_func(q[0], k[0], v[0], **options))[None]

    return Peer(name, why_not, prepare, layout="b n h d", absent=lambda device: absent(module, device))


def packed(name: str, module: str) -> Peer:
    """torch's `varlen_attn`, for packed sequences."""

    def why_not(task: Task) -> Iterator[str]:
        yield from _refusals(task)
        if not isinstance(task.problem.layout, Packed):
            yield "is for packed sequences"
        if task.problem.score.softcap is not None:
            yield "has no softcap"
        if task.problem.score.sink:
            yield "has no sink"

    def prepare(task: Task) -> Attention:
        p, run = task.problem, import_module(module).varlen_attn
        seen = band(p)
        assert seen is not None and isinstance(p.layout, Packed)
        options: dict[str, Any] = _limits(seen, run)
        if p.g != p.h:
            options["enable_gqa"] = True
        sequences = _offsets(p.layout, p.device)
        return lambda q, k, v: run(q[0], k[0], v[0], *sequences, **options)[None]

    return Peer(name, why_not, prepare, layout="b n h d", absent=lambda device: absent(module, device))


def _refusals(task: Task) -> Iterator[str]:
    """What none of them can do."""
    p = task.problem
    if p.dtype not in HALF:
        yield "takes half precision only"
    if band(p) is None:
        yield "its masks are causal and windows"
    for name in ("bias", "alibi"):
        if getattr(task.x, name) is not None:
            yield f"has no {name}"
    if p.dropout is not None:
        yield "has no dropout"


def _takes(module: str, function: str, parameter: str) -> bool:
    return not missing(module) and parameter in signature(getattr(import_module(module), function)).parameters


def _limits(seen: Band, run: Any) -> dict[str, Any]:
    """The band in the words of this torch: a window, or in older ones causal alone."""
    if "window_size" in signature(run).parameters:
        return {"window_size": tuple(-1 if side is None else side for side in seen)}
    if seen.left is not None or seen.right not in (None, 0):
        raise NotImplementedError("this torch has no windows for packed sequences")
    return {"is_causal": seen.causal}


def _offsets(layout: Packed, device: str) -> tuple[Tensor, Tensor, int, int]:
    """Offsets of q and k as int32 on the device, and the longest sequence of each."""
    sides = [torch.as_tensor(x) for x in (layout.ragged.q_offsets, layout.ragged.kv_offsets)]
    q, kv = (x.to(device, torch.int32) for x in sides)
    longest = [int(x.diff().max()) if len(x) > 1 else 0 for x in sides]
    return q, kv, longest[0], longest[1]


def _first(found: Any) -> Tensor:
    """o, where lse comes along."""
    return found[0] if isinstance(found, tuple) else found
