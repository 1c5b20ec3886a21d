"""What is warmed up is all that a call needs, and reads nothing. No test needs a GPU: Triton's interpreter runs the kernels."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import backends
from tilewise.cases import CASES, Case
from tilewise.problem import Inputs, Partial, Problem

pytest.importorskip("triton")
offline = import_module("tilewise.backends.triton.offline")
interpreted = pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="Triton's interpreter is off")

TRITON: Any = backends.load("triton")


def launches(jobs: list[Any]) -> set[str]:
    """What is compiled for some launches: everything but grids and arguments."""
    return {repr((job.name, *job.rest[2:])) for job in jobs}


def made(case: Case, dtype: str) -> tuple[Problem, Inputs[Tensor], Partial]:
    x, (do, dlse) = case.inputs(), case.upstream()
    x = x.map(lambda array: torch.from_numpy(array).to(getattr(torch, dtype)))
    wide = torch.float64 if dtype == "float64" else torch.float32
    return Problem.describe(x, case.options), x, Partial(torch.from_numpy(do).to(x.q), torch.from_numpy(dlse).to(wide))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_warmed_up_is_all_that_a_call_launches(case: Case) -> None:
    problem, x, grads = made(case, "float32")
    sizes, needs = TRITON.configure(problem), [name for name, _ in x.present()]
    with offline.recorded() as called:
        out = TRITON.forward(problem, x, sizes)
        for dlse in (None, grads.lse):
            TRITON.backward(problem, x, out, Partial(grads.o, dlse), sizes, needs)
    with offline.recorded() as warmed:
        TRITON.warm(problem, x, sizes, needs)
    assert launches(called) <= launches(warmed)
    assert bool(called) == bool(warmed)


def test_what_is_not_warmed_up_is_noticed() -> None:
    """The test above can fail: what a band launches is not all that a table does."""
    [band], [table] = ([case for case in CASES if case.name == name] for name in ("causal", "where function"))
    seen = []
    for case in (band, table):
        problem, x, _ = made(case, "float32")
        with offline.recorded() as jobs:
            TRITON.warm(problem, x, TRITON.configure(problem), ["q", "k", "v"])
        seen.append(launches(jobs))
    assert not seen[1] <= seen[0]


@interpreted
def test_warming_up_reads_nothing_and_says_what_is_ready() -> None:
    q = torch.empty(2, 70, 4, 16, device="meta")
    k = torch.empty(2, 90, 2, 16, device="meta")
    slopes = torch.ones(4, requires_grad=True)
    warm = tw.warmup(q, k, k, mask=tw.Causal(), alibi=slopes, device="cpu", backend="triton")
    assert str(warm).startswith("triton on cpu, float32, d=16 e=16, mask INTERVAL: forward ×2, delta ×2, dq ×4, dk_dv ×4 ready")
    assert warm.plan == tw.plan(*(torch.empty(t.shape) for t in (q, k, k)), mask=tw.Causal(), alibi=slopes, backend="triton")
    forward = tw.warmup(q, k, k, device="cpu", backend="triton", backward=False)
    assert forward.kernels == ("forward_kernel",)


@interpreted
def test_warming_up_packed_sequences() -> None:
    q = torch.empty(70, 4, 16)
    warm = tw.warmup(q, q, q, ragged=tw.Ragged.from_lengths([30, 40]), backend="triton", backward=False)
    assert warm.kernels[-1] == "forward_kernel"


def test_where_there_are_no_kernels_there_is_nothing_to_warm_up() -> None:
    q = torch.randn(2, 5, 4, 16)
    assert str(tw.warmup(q, q, q, backend="torch")).endswith("mask NONE: nothing to compile")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tw.warmup(q, q, q, backend="torch").plan.problem.dtype == "bfloat16"
    with pytest.raises(tw.ShapeError, match="axis d"):
        tw.warmup(q, torch.randn(2, 5, 4, 17), q)
    with pytest.raises(tw.DtypeError, match="q must be a torch tensor"):
        tw.warmup(None, q, q)  # pyright: ignore[reportArgumentType]
