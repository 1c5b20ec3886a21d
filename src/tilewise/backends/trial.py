"""A look at what a machine's kernels compute: a small problem with ragged ends everywhere, and what comes out other than by the
definition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from ..mask import Causal, Window
from ..problem import Inputs, Options, Partial, Problem

OPTIONS = Options(Causal() & Window(left=211))


@contextmanager
def unseen_by_others() -> Iterator[None]:
    """Tensors as such, whatever mode or transform the caller is in."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes(), torch.no_grad():
        yield


def small(dtype: str, n: int, columns: tuple[int, int] = (37, 21)) -> tuple[Inputs[Tensor], Tensor]:
    """q, k, v and do on the host. `columns`: d and e."""
    generator, (d, e) = torch.Generator("cpu").manual_seed(n), columns
    shapes = (1, n, 4, d), (1, 307, 2, d), (1, 307, 2, e), (1, n, 4, e)
    drawn = [torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) for shape in shapes]
    q, k, v, do = (t.to(getattr(torch, dtype)) for t in drawn)
    return Inputs(q, k, v), do


def wrong(given: tuple[Inputs[Tensor], Tensor], made: Partial, grads: Inputs[Tensor]) -> list[str]:
    """What is other than it should be: o, lse, and the gradients of q, k and v."""
    x, do = (one.map(lambda t: t.cpu()) if isinstance(one, Inputs) else one.cpu() for one in given)
    assert isinstance(x, Inputs) and isinstance(do, Tensor)
    mine = {"o": made.o, "lse": made.lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    most = float(torch.finfo(x.q.dtype).eps ** 0.75)  # far above rounding, far below a mistake
    right = definition(Problem.describe(x, OPTIONS), x, do)
    errors = {name: np.linalg.norm(mine[name].double().cpu().numpy() - right[name]) for name in right}
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
