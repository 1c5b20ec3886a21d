"""The machines. Each backend is a folder that knows nothing of the others; this file only puts them in order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from .._errors import OptionError, Unsupported
from ..problem import Inputs, Partial, Problem
from .plan import Config, Plan

ORDER = ("hopper", "triton", "cpu", "torch")
"""Every backend, fastest first: the first that does not refuse runs."""


class Backend(Protocol):
    """What a backend must be: a module `tilewise.backends.<name>` with these functions."""

    def why_not(self, problem: Problem, named: bool) -> tuple[str, ...]:
        """The reasons why this backend cannot run `problem`, or will not unless `named` by the caller; empty where it runs."""
        ...

    def configure(self, problem: Problem) -> Config:
        """How to run it: sizes that change speed and memory, never the result beyond rounding."""
        ...

    def forward(self, problem: Problem, x: Inputs[Any], config: Any) -> Partial:
        """o "b n h e" in the inputs' dtype and lse "b h n" in float32 (float64 for float64)."""
        ...

    def backward(
        self, problem: Problem, x: Inputs[Any], saved: Partial, grads: Partial, config: Any, needs: Sequence[str]
    ) -> Inputs[Any]:
        """The gradients named in `needs`, recomputed from (o, lse); the other fields are not read. `grads.lse` None: zero."""
        ...


def differentiable(plan: Plan, x: Inputs[Any], named: bool) -> Partial:
    """A plan's fold as ordinary operations, for derivatives beyond the first. Only some backends have one: another's stands in,
    unless the backend was named."""
    fold = getattr(load(plan.backend), "differentiable", None)
    if fold is None and named:
        raise Unsupported(plan.backend, ["it has no form that torch.func or derivatives beyond the first can look into"])
    return (fold or load(ORDER[-1]).differentiable)(plan.problem, x)  # type: ignore[attr-defined]


def check_name(name: str) -> None:
    if name not in ORDER:
        raise OptionError(f"backend {name!r} is unknown; there are {', '.join(map(repr, ORDER))}")


@cache
def load(name: str) -> Backend:
    """The backend called `name`; its own dependencies are imported only now."""
    check_name(name)
    return import_module(f"{__name__}.{name}")  # type: ignore[return-value]


def forward(plan: Plan, x: Inputs[Any]) -> Partial:
    """Launch a plan."""
    return load(plan.backend).forward(plan.problem, x, plan.config)


def forward_onto(plan: Plan, x: Inputs[Any], onto: Partial) -> Partial | None:
    """merge(onto, what a plan gives) by one kernel, where the plan's backend has one that does both; `onto` stays as it is."""
    both = getattr(load(plan.backend), "forward_onto", None)
    return None if both is None else both(plan.problem, x, onto, plan.config)


def backward(plan: Plan, x: Inputs[Any], saved: Partial, grads: Partial, needs: Sequence[str]) -> Inputs[Any]:
    """Launch a plan's backward pass for the gradients named in `needs`."""
    return load(plan.backend).backward(plan.problem, x, saved, grads, plan.config, needs)


def absorb(into: Partial, part: Partial) -> bool:
    """into ← merge(into, part) in place, by the first backend that has a kernel for these tensors; False: none has."""
    return any(kernel(into, part) for kernel in _kernels("absorb"))


def total(o: Any, do: Any, dlse: Any) -> Any | None:
    """rowsum(do∘o) − dlse "b h n" in the dtype of dlse, by the first backend that has a kernel for it; None: none has."""
    found = (kernel(o, do, dlse) for kernel in _kernels("total"))
    return next((x for x in found if x is not None), None)


def _kernels(name: str) -> list[Any]:
    """What backends have under a name, those that have it."""
    return [found for backend in ORDER if (found := getattr(load(backend), name, None)) is not None]


def make_plan(problem: Problem, name: str | None = None) -> Plan:
    """The plan of the named backend, or of the first that does not refuse; `Unsupported` with every reason otherwise."""
    refused: list[tuple[str, tuple[str, ...]]] = []
    for candidate in ORDER if name is None else (name,):
        backend = load(candidate)
        reasons = backend.why_not(problem, name is not None)
        if not reasons:
            return Plan(candidate, problem, backend.configure(problem), tuple(refused))
        refused.append((candidate, reasons))
    raise Unsupported(name or "any", [f"{n}: {r}" if name is None else r for n, reasons in refused for r in reasons])
