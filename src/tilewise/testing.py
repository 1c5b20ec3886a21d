"""How right an answer has to be, for us and for any backend to come: the oracle is `reference.plain` in float64, the budget
comes from data, and no tolerance is picked by hand.

    error ≤ 2·(error of the same computation done eagerly in the input dtype) + rounding

in L2 over the whole array, where `rounding` is what one rounding of every term (`roundings`) and of every partial sum
(`chained`) comes to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import api, backends
from .cases import CASES, Case
from .ops import lse_dtype
from .problem import DTYPES, Inputs, Options, Partial, Problem
from .reference import plain

REORDERED = 16
"""Roundings by which two orders of the same sums may differ: each rounds the logit, exp, the sums of p and of p·v, and the
quotient, and a derivative does it again."""


@dataclass(frozen=True)
class Result:
    """One quantity of one case. `error` and `budget` are relative to the L2 norm of the right answer."""

    case: str
    dtype: str
    quantity: str
    error: float
    budget: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.budget  # a NaN error is not


@dataclass(frozen=True)
class Answer:
    """o, lse and the gradient of every input present, by name, as float64 arrays."""

    arrays: dict[str, np.ndarray]

    @classmethod
    def of(cls, partial: Partial, grads: Inputs) -> Answer:
        named = {"o": partial.o, "lse": partial.lse, **{f"d{name}": x for name, x in grads.present()}}
        return cls({name: _float64(x) for name, x in named.items()})


def dtypes_of(backend: str | None, device: str = "cpu") -> tuple[str, ...]:
    """The dtypes that a backend computes in at all; every one where none is named."""
    return tuple(name for name in DTYPES if backend is None or not _refused(name, backend, device))


def _refused(dtype: str, backend: str, device: str) -> bool:
    """Whether a backend refuses the simplest problem of this dtype, and float32's not."""

    def reasons(name: str) -> tuple[str, ...]:
        x = torch.empty(1, 1, 1, 1, dtype=getattr(torch, name), device=device)
        return backends.load(backend).why_not(Problem.describe(Inputs(x, x, x)), True)

    return bool(reasons(dtype)) and not reasons("float32")


def count(dtypes: Sequence[str] | None = None, select: str = "") -> int:
    """How many results `conformance` yields at most: for progress."""
    return sum(5 + bool(c.bias) + bool(c.alibi) + c.sink for c in _selected(select)) * len(dtypes or DTYPES)


def conformance(
    backend: str | None, device: str = "cpu", dtypes: Sequence[str] | None = None, select: str = ""
) -> Iterator[Result]:
    """Every named case, forward and gradients, on a backend: one result a quantity. `dtypes`: if none is asked for, those of
    the backend. `select`: part of a case's name."""
    for dtype in dtypes or dtypes_of(backend, device):
        for case in _selected(select):
            yield from check(case, dtype, backend, device)


def check(case: Case, dtype: str = "float32", backend: str | None = None, device: str = "cpu") -> list[Result]:
    """One case on one backend, through the public functions."""
    x, (do, dlse) = tensors(case.inputs(), dtype, device), case.upstream()
    grads = Partial(torch.from_numpy(do).to(x.q), torch.from_numpy(dlse).to(device, lse_dtype(x.q.dtype)))
    try:
        mine = ask(case, x, grads, backend)
    except Exception as error:
        return [Result(case.name, dtype, "raised", float("inf"), 0.0, f"{type(error).__name__}: {error}")]
    return judge(case, x, grads, mine)


def assert_right(x: Inputs[Tensor], options: Options, backend: str | None = None, grads: Partial | None = None) -> None:
    """Raise unless attention and its gradients on these very tensors are within budget; random (do, dlse) unless given."""
    if grads is None:
        rng = torch.Generator().manual_seed(0)
        (b, n, h, _), e = x.q.shape, x.v.shape[3]
        do, dlse = torch.randn(b, n, h, e, generator=rng), torch.randn(b, h, n, generator=rng)
        grads = Partial(do.to(x.q.device, x.q.dtype), dlse.to(x.q.device, lse_dtype(x.q.dtype)))
    case = Case("given", options=options)
    failed = [result for result in judge(case, x, grads, ask(case, x, grads, backend)) if not result.ok]
    if failed:
        raise AssertionError("\n".join(map(str, failed)))


def judge(case: Case, x: Inputs[Tensor], grads: Partial, mine: Answer) -> list[Result]:
    """Hold an answer to the budget: against the definition in float64, and against the eager computation's own error."""
    exact = x.map(_float64)
    problem = Problem.describe(exact, case.options)
    do, dlse = _float64(grads.o), _float64(grads.lse)
    with np.errstate(invalid="ignore", over="ignore"):
        right = Answer.of(plain.attention(problem, exact), plain.gradients(problem, exact, do, dlse))
    rough = eager(problem, x, grads)
    exact_eps = torch.finfo(torch.float64).eps  # the oracle rounds too
    eps = torch.finfo(x.q.dtype).eps + exact_eps, torch.finfo(grads.lse.dtype).eps + exact_eps
    rounding = roundings(problem, exact, Partial(do, dlse), eps)
    for name, terms in {
        "o": problem.s,
        "dq": problem.s,
        "dk": problem.n * problem.group,
        "dv": problem.n * problem.group,
    }.items():
        rounding[name] += chained(terms, eps[1]) * float(np.linalg.norm(np.nan_to_num(right.arrays[name], posinf=0, neginf=0)))
    dtype = str(x.q.dtype).removeprefix("torch.")
    return [
        compare((case.name, dtype, name), mine.arrays[name], right.arrays[name], rough.arrays[name], rounding[name])
        for name in right.arrays
    ]


def compare(label: tuple[str, str, str], mine: np.ndarray, right: np.ndarray, rough: np.ndarray, rounding: float) -> Result:
    """One quantity against its budget. Infinities and NaN must stand exactly where the right answer has them."""
    if mine.shape != right.shape:
        return Result(*label, float("inf"), 0.0, f"shape {mine.shape}, expected {right.shape}")
    finite = np.isfinite(right)
    if not np.array_equal(mine[~finite], right[~finite], equal_nan=True):
        return Result(*label, float("inf"), 0.0, "infinities or NaN are not where they should be")
    norm = float(np.linalg.norm(right[finite])) or 1.0
    error = float(np.linalg.norm(mine[finite] - right[finite])) / norm
    eager_error = float(np.linalg.norm(np.nan_to_num(rough[finite] - right[finite], posinf=0, neginf=0))) / norm
    return Result(*label, error, 2 * eager_error + rounding / norm)


def ask(case: Case, x: Inputs[Tensor], grads: Partial, backend: str | None) -> Answer:
    """What a backend answers to a case, by the public functions and autograd."""
    leaves = x.map(lambda t: t.detach().requires_grad_())
    o, lse = call(case, leaves, backend)
    found = torch.autograd.grad((o, lse), [t for _, t in leaves.present()], (grads.o, grads.lse))
    return Answer.of(Partial(o, lse), _named(leaves, found))


def call(case: Case, x: Inputs[Tensor], backend: str | None = None) -> Partial:
    """`attention_with_lse` with a case's options; packed ones through the same entrance, as a batch of one."""
    o, drop = case.options, case.options.dropout
    rate, seed = (drop.rate, torch.tensor(drop.seed)) if drop is not None else (0.0, None)
    return api.compute(x, o, o.scale, (rate, seed), backend)


def agree(a: Tensor, b: Tensor) -> bool:
    """Equal but for the order of their sums: within `REORDERED` roundings in L2, infinities and NaN in the same places."""
    eps = torch.finfo(a.dtype).eps
    a, b = a.detach().double(), b.detach().double().to(a.device)
    finite = b.isfinite()
    if a.shape != b.shape or not torch.equal(a.isfinite(), finite) or not torch.equal(a[a.isinf()], b[b.isinf()]):
        return False
    return bool((a[finite] - b[finite]).norm() <= REORDERED * eps * b[finite].norm())


def tensors(x: Inputs[np.ndarray], dtype: str, device: str) -> Inputs[Tensor]:
    """The arrays rounded to `dtype` on `device`."""
    return x.map(lambda a: torch.from_numpy(np.array(a)).to(device, getattr(torch, dtype)))


def eager(problem: Problem, x: Inputs[Tensor], grads: Partial) -> Answer:
    """The same attention as one would write it in torch: every score at once, in the input dtype, gradients by autograd."""
    leaves = x.map(lambda t: t.detach().requires_grad_())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        o, lse, *_ = _dense(problem, leaves)
        seen = [t for _, t in leaves.present()]
        usable = torch.where(lse.isinf(), 0, lse)
        found = torch.autograd.grad((o, usable), seen, (grads.o.to(o.dtype), grads.lse.to(lse.dtype)), allow_unused=True)
    filled = [torch.zeros_like(t) if f is None else f for t, f in zip(seen, found, strict=True)]
    return Answer.of(Partial(o, lse), _named(leaves, filled))


def roundings(problem: Problem, x: Inputs[np.ndarray], grads: Partial, eps: tuple[float, float]) -> dict[str, float]:
    """What one rounding of every term of every sum comes to, as the L2 norm of each quantity, however much the terms cancel:
    roundings are independent, so they add up as the root of a sum of squares.

    `eps` is that of the inputs and that of what accumulates. A logit s is a sum of products, whose rounding moves p by its
    size; gradients recompute p = exp(s − lse) from an lse that was rounded once, which moves p by eps·|lse| of itself.
    """
    t = tensors(x, "float64", "cpu")
    o, lse, p, dropped = _dense(problem, t)
    q, k, v, do = (_spread(problem, a) for a in (t.q, t.k, t.v, torch.from_numpy(np.array(grads.o))))
    size = torch.where(lse.isinf(), 0, lse.abs())
    scale = abs(problem.score.scale)
    terms = scale * _root_sum_square(q, k.transpose(-1, -2))
    once = p * (eps[0] + eps[1] * terms)
    again = once + p * (eps[1] * size)[..., None]
    total = (do * o.transpose(1, 2)).square().sum(-1).sqrt() + torch.from_numpy(np.abs(grads.lse))
    ds = again * (_root_sum_square(do, v.transpose(-1, -2)) * dropped + total[..., None])
    largest = scale * _root_sum_square(q, k.abs().amax(2, keepdim=True).transpose(-1, -2))[..., 0] if problem.s else 0 * size
    sizes = {
        "o": _root_sum_square(once * dropped, v),
        "lse": eps[1] * (size + largest),
        "dq": scale * _root_sum_square(ds, k),
        "dk": scale * _root_sum_square(ds.transpose(-1, -2), q),
        "dv": _root_sum_square((again * dropped).transpose(-1, -2), do),
        "dbias": ds,
        "dalibi": (ds * _distance(problem)).square().sum((-1, -2)).sqrt(),
        "dsink": eps[0] * total.square().sum((0, 2)).sqrt(),
    }
    present = {"o", "lse", *(f"d{name}" for name, _ in x.present())}
    return {name: float(torch.nan_to_num(a, posinf=0, neginf=0).norm()) for name, a in sizes.items() if name in present}


def chained(terms: int, eps: float) -> float:
    """What a chain of additions of terms of one sign rounds, as a share of their sum: a standard deviation of eps/√12 of each
    partial sum, k/N of the whole, comes to eps·√N/6."""
    return eps * terms**0.5 / 6


def _root_sum_square(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with every product squared before the sum and the root taken after it."""
    return (a.square() @ b.square()).sqrt()


def _dense(problem: Problem, x: Inputs[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, lse, the weights and what dropout multiplies them by, from all scores at once."""
    device, score = x.q.device, problem.score
    keep = torch.from_numpy(np.array(problem.keep())).to(device)
    s = _spread(problem, x.q) @ _spread(problem, x.k).transpose(-1, -2) * score.scale
    if x.bias is not None:
        s = s + x.bias.to(s.dtype)
    if x.alibi is not None:
        s = s - x.alibi[..., None, None].to(s.dtype) * _distance(problem).to(device, x.q.dtype)
    if score.softcap is not None:
        s = score.softcap * torch.tanh(s / score.softcap)
    s = s.masked_fill(~keep, -torch.inf)
    if x.sink is not None:
        s = torch.cat([s, x.sink[None, :, None, None].to(s.dtype).expand(*s.shape[:3], 1)], -1)
    hidden = (s == -torch.inf).all(-1, keepdim=True)
    p = torch.where(hidden, 0, torch.softmax(torch.where(hidden, 0, s), -1))[..., : problem.s]
    lse = torch.where(hidden, -torch.inf, torch.logsumexp(torch.where(hidden, 0, s), -1, keepdim=True))[..., 0]
    dropped = torch.from_numpy(np.array(plain.dropout_factor(problem))).to(device, x.q.dtype)
    return (p * dropped @ _spread(problem, x.v)).transpose(1, 2), lse, p, dropped


def _named(leaves: Inputs[Tensor], grads: Sequence[Tensor]) -> Inputs[Tensor]:
    """Gradients in the order of the inputs present, under their names."""
    return Inputs(**dict(zip([name for name, _ in leaves.present()], grads, strict=True)))


def _distance(problem: Problem) -> Tensor:
    return torch.from_numpy(plain.distance(problem))


def _spread(problem: Problem, x: Tensor) -> Tensor:
    """ "b rows heads d" → "b h rows d", key heads repeated for their group."""
    x = x.transpose(1, 2)
    return x if x.shape[1] == problem.h else x.repeat_interleave(problem.group, 1)


def _float64(x: Tensor | np.ndarray) -> np.ndarray:
    return x.detach().double().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x, np.float64)


def _selected(select: str) -> list[Case]:
    return [case for case in CASES if select in case.name]
