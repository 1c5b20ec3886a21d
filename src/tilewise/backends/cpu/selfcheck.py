"""A look at what this computer's kernels compute, before any plan relies on them: small problems against the definition. Once a
machine: what was found in order is noted beside the compiled kernels."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...mask import Causal, Window
from ...problem import Inputs, Options, Partial, Problem
from . import store
from .backward_call import backward
from .choose import best
from .config import configure
from .forward_call import forward

ROWS = (53, 1)
"""Query rows of the problems: enough for every kind of tile, and one for decode."""


@lru_cache
def broken(dtype: str) -> str:
    """Why kernels for inputs of this dtype cannot be used here; empty where they can."""
    target = best(dtype)
    if target is None:
        return "this processor has neither AVX-512, AVX2 with FMA and F16C, nor NEON"
    note = f"checked-{dtype}"
    if store.read(note, target) == note.encode():
        return ""
    try:
        wrong = [name for n in ROWS for name in differences(small(dtype, n))]
    except Exception as error:  # whatever a strange machine or a strange LLVM does
        return f"its kernels failed on this computer: {type(error).__name__}: {error}"
    if wrong:
        return f"its kernels compute a wrong {', '.join(dict.fromkeys(wrong))} on this computer"
    store.keep(note, target, note.encode())
    return ""


def small(dtype: str, n: int) -> tuple[Inputs[Tensor], Tensor]:
    """q, k, v and do of a problem with ragged ends everywhere."""
    generator = torch.Generator("cpu").manual_seed(n)
    shapes = (1, n, 4, 37), (1, 307, 2, 37), (1, 307, 2, 21), (1, n, 4, 21)
    drawn = [torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) for shape in shapes]
    q, k, v, do = (t.to(getattr(torch, dtype)) for t in drawn)
    return Inputs(q, k, v), do


def differences(given: tuple[Inputs[Tensor], Tensor]) -> list[str]:
    """What comes out other than it should: o, lse, and the gradients of q, k and v."""
    x, do = given
    problem = Problem.describe(x, Options(Causal() & Window(left=211)))
    config = configure(problem)
    made = forward(problem, x, config)
    grads = backward(problem, x, made, Partial(do, None), config, ("q", "k", "v"))
    mine = {"o": made.o, "lse": made.lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    most = float(torch.finfo(x.q.dtype).eps ** 0.75)  # far above rounding, far below a mistake
    right = definition(problem, x, do)
    errors = {name: np.linalg.norm(mine[name].double().numpy() - right[name]) for name in right}
    return [name for name, error in errors.items() if not error <= most * np.linalg.norm(right[name])]


def definition(problem: Problem, x: Inputs[Tensor], do: Tensor) -> dict[str, np.ndarray]:
    """o, lse, dq, dk and dv from all scores at once, in float64."""
    q, do = (t.double().numpy()[0] for t in (x.q, do))
    k, v = (np.repeat(t.double().numpy()[0], problem.group, axis=1) for t in (x.k, x.v))
    s = np.einsum("nhd,shd->hns", q, k) * problem.score.scale
    s = np.where(problem.keep()[0], s, -np.inf)
    m = s.max(-1, keepdims=True)
    lse = m + np.log(np.exp(s - m).sum(-1, keepdims=True))
    p = np.exp(s - lse)
    o = np.einsum("hns,she->nhe", p, v)
    ds = p * (np.einsum("nhe,she->hns", do, v) - np.einsum("nhe,nhe->hn", do, o)[..., None]) * problem.score.scale

    def of_group(gradient: np.ndarray) -> np.ndarray:
        return gradient.reshape(len(gradient), problem.g, problem.group, -1).sum(2)

    dk, dv = np.einsum("hns,nhd->shd", ds, q), np.einsum("hns,nhe->she", p, do)
    found = {"o": o, "dq": np.einsum("hns,shd->nhd", ds, k), "dk": of_group(dk), "dv": of_group(dv)}
    return {"lse": lse[None, :, :, 0], **{name: a[None] for name, a in found.items()}}
