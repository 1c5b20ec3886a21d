"""Nothing is timed before it is right: outputs and gradients against the float64 definition, within the budget that
`testing` sets: twice the error of the same computation done eagerly in the inputs' dtype, plus rounding."""

from __future__ import annotations

import math

from .. import cases as conformance
from .._errors import Unsupported
from ..problem import Options, Partial
from ..testing import Result, ask, judge
from .cases import Case, upstream

QUANTITIES = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv"), "decode": ("o", "lse")}
"""What each pass computes."""


def verify(case: Case, device: str, backend: str | None = None) -> dict[str, Result]:
    """For each pass of a case, at its reduced size, the quantity that came closest to its budget or furthest beyond.
    An implementation that raises is infinitely wrong; one that refuses raises `Unsupported`."""
    small = case.reduced()
    x = small.inputs(device, seed=1)
    grads = Partial(*upstream(small, device))
    asked = conformance.Case(case.name, options=Options(small.mask, softcap=small.softcap))
    try:
        results = {result.quantity: result for result in judge(asked, x, grads, ask(asked, x, grads, backend))}
    except Unsupported:
        raise
    except Exception as error:
        return {
            name: Result(case.name, case.dtype, "raised", math.inf, 0.0, f"{type(error).__name__}: {error}")
            for name in case.passes
        }
    return {name: max((results[q] for q in QUANTITIES[name]), key=_overrun) for name in case.passes}


def _overrun(result: Result) -> float:
    """Error over budget; what is not a number is beyond any."""
    ratio = result.error / result.budget if result.budget else math.inf
    return math.inf if math.isnan(ratio) else ratio
