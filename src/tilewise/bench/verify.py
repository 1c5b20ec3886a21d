"""Nothing is timed before it is right: outputs and gradients against the float64 definition, within the budget that
`testing` sets: twice the error of the same computation done eagerly in the inputs' dtype, plus rounding. All of a case that
was made smaller, and some rows of the case as it is timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .. import cases as conformance
from .. import testing
from .._errors import Unsupported
from ..positions import Positions
from ..problem import Inputs, Options, Partial
from ..ragged import Ragged
from ..testing import Answer, Result
from .cases import PAIRS, UNITS, Case, Tensors, upstream

OUTPUTS = ("o", "lse")
QUANTITIES = dict.fromkeys(UNITS, OUTPUTS) | {"backward": ()}
"""Outputs that each pass computes; those that do `backward` also have gradients."""


def verify(case: Case, device: str, backend: str | None = None) -> dict[str, Result]:
    """For each pass of a case, the quantity that came closest to its budget or furthest beyond, over all of the reduced case
    and a sample of the whole one. An implementation that raises is infinitely wrong; one that refuses raises `Unsupported`."""
    try:
        results = whole(case.reduced(), device, backend)
        if not case.small:
            results += sample(case, device, backend)
    except Unsupported:
        raise
    except Exception as error:
        return {
            name: Result(case.name, case.dtype, "raised", math.inf, 0.0, f"{type(error).__name__}: {error}")
            for name in case.passes
        }
    return {name: max((r for r in results if _belongs(r, name)), key=_overrun) for name in case.passes}


def whole(case: Case, device: str, backend: str | None) -> list[Result]:
    """Every quantity of a case, all of it."""
    x, grads, asked = case.inputs(device, seed=1), Partial(*upstream(case, device)), _asked(case, case.options)
    return testing.judge(asked, x, grads, testing.ask(asked, x, grads, backend))


@dataclass(frozen=True)
class Sample:
    """Some query rows of one batch entry, and the query heads of one key head. `options` pose the problem of those alone."""

    b: slice
    rows: np.ndarray
    h: slice
    g: slice
    options: Options

    @classmethod
    def of(cls, case: Case) -> Sample:
        """The last entry and heads, which large offsets reach, but the first where dropout counts them; rows at random, or the
        last ones of each packed sequence."""
        first, group = case.options.dropout is not None, case.h // case.g
        b = slice(0, 1) if first else slice(case.b - 1, case.b)
        h = slice(0, group) if first else slice(case.h - group, case.h)
        count = min(case.n, max(1, PAIRS // 2 // (case.s * group)))
        packed = case.options.ragged
        if packed is None:
            chosen = np.random.default_rng(0).choice(case.n, count, replace=False)
            rows = np.sort(chosen)
            mask = case.options.mask
            start = 0 if mask is not None and mask.align == "top-left" else case.s - case.n
            options = replace(case.options, positions=(Positions.of(start + rows), Positions(case.s)))
        else:
            ends, lengths = packed.q_offsets[1:], np.diff(packed.q_offsets)
            taken = np.minimum(lengths, max(1, count // max(1, len(lengths))))
            rows = np.concatenate([np.arange(end - some, end) for end, some in zip(ends, taken, strict=True)])
            options = replace(case.options, ragged=Ragged.from_lengths(taken, np.diff(packed.kv_offsets)))
        return cls(b, rows, h, slice(h.start // group, h.start // group + 1), options)

    def inputs(self, x: Tensors) -> Tensors:
        """Their part of the inputs, or of the gradients of these."""
        cut: dict[str, Callable[[Tensor], Tensor]] = {
            "q": lambda t: t[self.b, self.rows][:, :, self.h],
            "k": lambda t: t[self.b, :, self.g],
            "v": lambda t: t[self.b, :, self.g],
            "bias": self._bias,
            "alibi": lambda t: t[..., self.h] if t.dim() == 1 else t[self.b, self.h],
            "sink": lambda t: t[self.h],
        }
        return Inputs(**{name: cut[name](t) for name, t in x.present()})

    def partial(self, o: Tensor, lse: Tensor) -> Partial:
        """Their part of outputs "b n h e" and "b h n", or of the gradients of these."""
        return Partial(o[self.b, self.rows][:, :, self.h], lse[self.b, self.h][:, :, self.rows])

    def _bias(self, t: Tensor) -> Tensor:
        t = t.view(*[1] * (4 - t.dim()), *t.shape)
        t = t if t.shape[0] == 1 else t[self.b]
        t = t if t.shape[1] == 1 else t[:, self.h]
        return t if t.shape[2] == 1 else t[:, :, self.rows]


def sample(case: Case, device: str, backend: str | None) -> list[Result]:
    """Every quantity of the case as it is timed, at some rows of it. Gradients come in at those rows alone, so what comes out
    is a problem of just these rows; every other row's share must be exactly 0."""
    part, x = Sample.of(case), case.inputs(device, seed=3)
    do, dlse = (torch.zeros_like(t) for t in upstream(case, device))
    given = part.partial(*upstream(case, device))
    at = torch.as_tensor(part.rows, device=device)
    do[part.b.start, :, part.h].index_copy_(0, at, given.o[0])
    dlse[part.b.start, part.h].index_copy_(1, at, given.lse[0])
    leaves = x.map(lambda t: t.requires_grad_())
    o, lse = testing.call(_asked(case, case.options), leaves, backend)
    named = [name for name, _ in leaves.present()]
    found = Inputs(**dict(zip(named, torch.autograd.grad((o, lse), [t for _, t in leaves.present()], (do, dlse)), strict=True)))
    ours = part.inputs(found)
    results = testing.judge(_asked(case, part.options), part.inputs(x), given, Answer.of(part.partial(o, lse), ours))
    strays = {name: int(t.count_nonzero() - dict(ours.present())[name].count_nonzero()) for name, t in found.present()}
    return results + [
        Result(case.name, case.dtype, f"d{name}", math.inf, 0.0, f"d{name} has {count} numbers where it should be 0")
        for name, count in strays.items()
        if count
    ]


def _asked(case: Case, options: Options) -> conformance.Case:
    return conformance.Case(case.name, options=options)


def _belongs(result: Result, name: str) -> bool:
    gradient = result.quantity.startswith("d")
    return name in ("backward", "step") if gradient else result.quantity in QUANTITIES[name]


def _overrun(result: Result) -> float:
    """Error over budget; what is not a number is beyond any."""
    ratio = result.error / result.budget if result.budget else math.inf
    return math.inf if math.isnan(ratio) else ratio
