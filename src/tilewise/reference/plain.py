"""The definition of attention and of its gradients, float64, no options, every score at once. It is the oracle: its
arithmetic is its own, it reads masks only through `keep`, and takes from a problem just where rows sit and which pairs
dropout keeps."""

from __future__ import annotations

import numpy as np

from ..problem import Inputs, Partial, Problem


def attention(problem: Problem, x: Inputs[np.ndarray]) -> Partial:
    """o[i] = Σ_j p[i, j]·v[j] with p = softmax_j(s) and lse[i] = log Σ_j exp(s[i, j]), over the pairs that the mask keeps.

    Shapes  x: "b n h d", "b s g d", "b s g e" → o "b n h e", lse "b h n", float64
    """
    s, _ = _scores(problem, x)
    p, lse, _ = _softmax(problem, x, s)
    o = _product(p * dropout_factor(problem), _heads(problem, x.v), ~np.isneginf(s))
    return Partial(o.transpose(0, 2, 1, 3), lse)


def gradients(problem: Problem, x: Inputs[np.ndarray], do: np.ndarray, dlse: np.ndarray) -> Inputs[np.ndarray]:
    """The gradients of Σ do∘o + Σ dlse∘lse by every input present. do "b n h e", dlse "b h n".

    ds = p∘(dp − delta + dlse) with dp = do·vᵀ (dropped where p was) and delta = Σ_j p∘dp, then back through the logit.
    """
    s, slope = _scores(problem, x)
    keep = ~np.isneginf(s)
    p, _, p_sink = _softmax(problem, x, s)
    drop, do = dropout_factor(problem), np.asarray(do, np.float64).transpose(0, 2, 1, 3)
    q, k, v = _heads(problem, x.q), _heads(problem, x.k), _heads(problem, x.v)
    dp = np.where(keep, do @ v.swapaxes(-1, -2), 0) * drop
    delta = (p * dp).sum(-1, keepdims=True)
    ds = np.where(keep, p * (dp - delta + dlse[..., None]) * slope, 0)
    dq = problem.score.scale * _product(ds, k, keep)
    dk = problem.score.scale * _product(ds.swapaxes(-1, -2), q, keep.swapaxes(-1, -2))
    dv = _product((p * drop).swapaxes(-1, -2), do, keep.swapaxes(-1, -2))
    return Inputs(
        dq.transpose(0, 2, 1, 3),
        _groups(problem, dk),
        _groups(problem, dv),
        None if x.bias is None else _reduce(ds, x.bias.shape),
        None if x.alibi is None else _reduce((-ds * distance(problem)).sum((2, 3)), x.alibi.shape),
        None if x.sink is None else (p_sink * (dlse - delta[..., 0])).sum((0, 2)),
    )


def _heads(problem: Problem, x: np.ndarray) -> np.ndarray:
    """ "b rows heads d" → "b h rows d" in float64, each key head repeated for the query heads that read it."""
    x = np.asarray(x, np.float64).transpose(0, 2, 1, 3)
    return x if x.shape[1] == problem.h else np.repeat(x, problem.group, axis=1)


def _groups(problem: Problem, x: np.ndarray) -> np.ndarray:
    """The inverse for gradients: "b h rows d" → "b rows g d", summed over each group."""
    b, _, rows, d = x.shape
    return x.reshape(b, problem.g, problem.group, rows, d).sum(2).transpose(0, 2, 1, 3)


def distance(problem: Problem) -> np.ndarray:
    """|i − j| in positions, "b 1 n s"."""
    i = problem.layout.queries(slice(0, problem.b), slice(0, problem.n)).position
    j = problem.layout.keys(slice(0, problem.b), slice(0, problem.s)).position
    return np.abs(i[:, None, :, None] - j[:, None, None, :]).astype(np.float64)


def _scores(problem: Problem, x: Inputs[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Logits "b h n s", -inf where hidden, and their derivative by what softcap was applied to."""
    z = problem.score.scale * (_heads(problem, x.q) @ _heads(problem, x.k).swapaxes(-1, -2))
    if x.bias is not None:
        z = z + np.asarray(x.bias, np.float64)
    if x.alibi is not None:
        slopes = np.asarray(x.alibi, np.float64)
        z = z - (slopes if slopes.ndim == 2 else slopes[None])[:, :, None, None] * distance(problem)
    cap = problem.score.softcap
    s, slope = (z, np.ones_like(z)) if cap is None else (cap * np.tanh(z / cap), 1 / np.cosh(np.clip(z / cap, -300, 300)) ** 2)
    return np.where(problem.keep(), s, -np.inf), slope


def _softmax(problem: Problem, x: Inputs[np.ndarray], s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p "b h n s", lse "b h n", and the sink's probability "b h n" (0 without one)."""
    sink = np.full(problem.h, -np.inf) if x.sink is None else np.asarray(x.sink, np.float64)
    sink = np.broadcast_to(sink[None, :, None], s.shape[:3])
    top = np.maximum(s.max(-1, initial=-np.inf), sink)
    top = np.where(np.isneginf(top), 0, top)
    weights, extra = np.exp(s - top[..., None]), np.exp(sink - top)
    total = weights.sum(-1) + extra
    safe = np.where(total == 0, 1, total)
    p = np.where(np.isneginf(s), 0, weights / safe[..., None])
    return p, np.where(total == 0, -np.inf, top + np.log(safe)), extra / safe


def dropout_factor(problem: Problem) -> np.ndarray:
    """What each probability is multiplied by: 0 where dropped, 1 / (1 − rate) where kept, "b h n s"."""
    if problem.dropout is None:
        return np.ones((1, 1, 1, 1))
    q = problem.layout.queries(slice(0, problem.b), slice(0, problem.n))
    j = problem.layout.keys(slice(0, problem.b), slice(0, problem.s)).position
    h = np.arange(problem.h)[None, :, None, None]
    keep = problem.dropout.keep(q.sequence[:, None, :, None], h, q.position[:, None, :, None], j[:, None, None, :])
    return keep * problem.dropout.scale


def _product(weights: np.ndarray, x: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """weights @ x over kept pairs only: where a hidden row of x holds NaN or inf it is not read."""
    if np.isfinite(x).all():
        return weights @ x
    pairs = np.broadcast_to(keep, weights.shape)[..., None]
    with np.errstate(invalid="ignore"):  # 0·inf of a kept pair is NaN, as it should be
        return np.where(pairs, weights[..., None] * x[..., None, :, :], 0).sum(-2)


def _reduce(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes along which an input of `shape` was broadcast."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(a for a, size in enumerate(shape) if size == 1 and x.shape[a] != 1), keepdims=True)
