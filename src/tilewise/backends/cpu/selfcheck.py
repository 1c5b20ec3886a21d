"""A look at what this computer's kernels compute, before any plan relies on them: small problems against the definition. Once a
machine: what was found in order is noted beside the compiled kernels."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from ...problem import Inputs, Partial, Problem
from ..trial import OPTIONS, small, unseen_by_others, wrong
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
        with unseen_by_others():
            found = [name for n in ROWS for name in differences(small(dtype, n))]
    except Exception as error:  # whatever a strange machine or a strange LLVM does
        return f"its kernels failed on this computer: {type(error).__name__}: {error}"
    if found:
        return f"its kernels compute a wrong {', '.join(dict.fromkeys(found))} on this computer"
    store.keep(note, target, note.encode())
    return ""


def differences(given: tuple[Inputs[Tensor], Tensor]) -> list[str]:
    """What comes out other than it should."""
    x, do = given
    problem = Problem.describe(x, OPTIONS)
    config = configure(problem)
    made = forward(problem, x, config)
    return wrong(given, made, backward(problem, x, made, Partial(do, None), config, ("q", "k", "v")))
