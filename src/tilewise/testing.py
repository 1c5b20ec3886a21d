"""How right an answer has to be, for us and for any backend to come: the oracle is `reference.plain` in float64, the budget
comes from data, and no tolerance is picked by hand.

    error ≤ 2·(error of the same computation done eagerly in the input dtype) + eps·magnitude

in L2 over the whole array, where `magnitude` is the size of the sums before anything cancels: what one rounding is a share
of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import api
from .cases import CASES, Case
from .problem import Inputs, Options, Partial, Problem
from .reference import plain

DTYPES = ("float32", "float64", "bfloat16", "float16")


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


def count(backend: str, dtypes: Sequence[str] | None = None, select: str = "") -> int:
    """How many results `conformance` yields at most: for progress."""
    return sum(5 + bool(c.bias) + bool(c.alibi) + c.sink for c in _selected(select)) * len(dtypes or DTYPES)


def conformance(
    backend: str | None, device: str = "cpu", dtypes: Sequence[str] | None = None, select: str = ""
) -> Iterator[Result]:
    """Every named case, forward and gradients, on a backend: one result a quantity. `select`: part of a case's name."""
    for dtype in dtypes or DTYPES:
        for case in _selected(select):
            yield from check(case, dtype, backend, device)


def check(case: Case, dtype: str = "float32", backend: str | None = None, device: str = "cpu") -> list[Result]:
    """One case on one backend, through the public functions."""
    x, upstream = tensors(case.inputs(), dtype, device), tensors(Inputs(*case.upstream(), np.zeros(0)), dtype, device)
    grads = Partial(upstream.q, upstream.k.to(torch.float64 if dtype == "float64" else torch.float32))
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
        wide = torch.float64 if x.q.dtype == torch.float64 else torch.float32
        do, dlse = torch.randn(b, n, h, e, generator=rng), torch.randn(b, h, n, generator=rng)
        grads = Partial(do.to(x.q.device, x.q.dtype), dlse.to(x.q.device, wide))
    case = Case("given", options=options)
    failed = [result for result in judge(case, x, grads, ask(case, x, grads, backend)) if not result.ok]
    if failed:
        raise AssertionError("\n".join(map(str, failed)))


def judge(case: Case, x: Inputs[Tensor], grads: Partial, mine: Answer) -> list[Result]:
    """Hold an answer to the budget: against the definition in float64, and against the eager computation's own error."""
    exact = Inputs(**{name: _float64(t) for name, t in x.present()})
    problem = Problem.describe(exact, case.options)
    do, dlse = _float64(grads.o), _float64(grads.lse)
    with np.errstate(invalid="ignore", over="ignore"):
        right = Answer.of(plain.attention(problem, exact), plain.gradients(problem, exact, do, dlse))
    rough = eager(problem, x, grads)
    size = magnitudes(problem, exact, do, dlse)
    dtype = str(x.q.dtype).removeprefix("torch.")
    eps = {name: torch.finfo(torch.float32 if name == "lse" and x.q.element_size() < 4 else x.q.dtype).eps for name in size}
    return [
        compare((case.name, dtype, name), mine.arrays[name], right.arrays[name], rough.arrays[name], eps[name] * size[name])
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
    leaves = Inputs(**{name: t.detach().requires_grad_() for name, t in x.present()})
    o, lse = call(case, leaves, backend)
    found = torch.autograd.grad((o, lse), [t for _, t in leaves.present()], (grads.o, grads.lse))
    return Answer.of(Partial(o, lse), Inputs(**dict(zip([n for n, _ in leaves.present()], found, strict=True))))


def call(case: Case, x: Inputs[Tensor], backend: str | None = None) -> Partial:
    """`attention_with_lse` with a case's options; packed ones through the same entrance, as a batch of one."""
    o, drop = case.options, case.options.dropout
    rate, seed = (drop.rate, torch.tensor(drop.seed)) if drop is not None else (0.0, None)
    return api.compute(x, o, o.scale, (rate, seed), backend)


def agree(a: Tensor, b: Tensor) -> bool:
    """Equal but for the order of their sums: within 16 roundings in L2, infinities and NaN in the same places."""
    eps = torch.finfo(a.dtype).eps
    a, b = a.detach().double(), b.detach().double().to(a.device)
    finite = b.isfinite()
    if a.shape != b.shape or not torch.equal(a.isfinite(), finite) or not torch.equal(a[a.isinf()], b[b.isinf()]):
        return False
    return bool((a[finite] - b[finite]).norm() <= 16 * eps * b[finite].norm())


def tensors(x: Inputs[np.ndarray], dtype: str, device: str) -> Inputs[Tensor]:
    """The arrays rounded to `dtype` on `device`."""
    return Inputs(**{name: torch.from_numpy(np.array(a)).to(device, getattr(torch, dtype)) for name, a in x.present()})


def eager(problem: Problem, x: Inputs[Tensor], grads: Partial) -> Answer:
    """The same attention as one would write it in torch: every score at once, in the input dtype, gradients by autograd."""
    leaves = Inputs(**{name: t.detach().requires_grad_() for name, t in x.present()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        o, lse, *_ = _dense(problem, leaves)
        seen = [t for _, t in leaves.present()]
        usable = torch.where(lse.isinf(), 0, lse)
        found = torch.autograd.grad((o, usable), seen, (grads.o.to(o.dtype), grads.lse.to(lse.dtype)), allow_unused=True)
    filled = [torch.zeros_like(t) if f is None else f for t, f in zip(seen, found, strict=True)]
    return Answer.of(Partial(o, lse), Inputs(**dict(zip([n for n, _ in leaves.present()], filled, strict=True))))


def magnitudes(problem: Problem, x: Inputs[np.ndarray], do: np.ndarray, dlse: np.ndarray) -> dict[str, float]:
    """The L2 norm of every quantity with absolute values in place of signed terms, so that nothing cancels.

    Gradients recompute p = exp(s − lse) from an lse that was rounded once, which moves p by eps·|lse| of itself.
    """
    t = Inputs(**{name: torch.from_numpy(np.array(a)) for name, a in x.present()})
    o, lse, p, dropped = _dense(problem, t)
    q, k, v = (_spread(problem, a.abs()) for a in (t.q, t.k, t.v))
    g, gl = torch.from_numpy(np.abs(do)).transpose(1, 2), torch.from_numpy(np.abs(dlse))
    again = p * (1 + torch.where(lse.isinf(), 0, lse.abs()))[..., None]
    total = (g * o.abs().transpose(1, 2)).sum(-1) + gl
    ds = again * ((g @ v.transpose(-1, -2)) * dropped + total[..., None])
    scale = abs(problem.score.scale)
    sizes = {
        "o": p * dropped @ v,
        "lse": torch.where(lse.isinf(), 0, lse.abs()) + scale * (q * k.amax(2, keepdim=True).expand_as(q[:, :, :1])).sum(-1)
        if problem.s
        else lse * 0,
        "dq": scale * ds @ k,
        "dk": scale * ds.transpose(-1, -2) @ q,
        "dv": (again * dropped).transpose(-1, -2) @ g,
        "dbias": ds,
        "dalibi": (ds * _distance(problem)).sum((-1, -2)),
        "dsink": total.sum((0, 2)),
    }
    present = {"o", "lse", *(f"d{name}" for name, _ in x.present())}
    return {name: float(torch.nan_to_num(a, posinf=0, neginf=0).norm()) for name, a in sizes.items() if name in present}


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
