"""The algorithm. Attention over any set of keys is a state (m, l, acc), and states merge: the tile loop, split-KV decode
and ring attention are this one file at different grain.

Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", section 3; Dao 2023, FlashAttention-2,
algorithm 1. True -inf marks a hidden logit, and `pivot` keeps a row that has seen nothing from computing inf − inf."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class State(NamedTuple):
    """Unfinished rows. m "rows": running max · l "rows": running sum of exp(s − m) · acc "rows e": Σ exp(s − m)·v."""

    m: np.ndarray
    l: np.ndarray  # noqa: E741 - the paper's ℓ
    acc: np.ndarray


def empty(rows: int, e: int) -> State:
    """The state of no keys, neutral: merge(empty, x) == x."""
    return State(np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, e)))


def absorb(state: State, s: np.ndarray, v: np.ndarray, drop: np.ndarray | float = 1.0) -> State:
    """`state` after a tile of logits s "rows cols" (-inf where hidden) and values v "cols e"; `drop` scales the weights.

    >>> state = empty(rows=1, e=1)
    >>> for block in ([1.0, 3.0], [2.0, 5.0]):
    ...     state = absorb(state, np.array([block]), np.ones((2, 1)))
    ...     print(f"m={state.m[0]:.0f} ℓ={state.l[0]:.3f}")
    m=3 ℓ=1.135
    m=5 ℓ=1.203
    """
    m = np.maximum(state.m, s.max(axis=1, initial=-np.inf))
    alpha, p = np.exp(state.m - pivot(m)), np.exp(s - pivot(m)[:, None])
    acc = alpha[:, None] * state.acc + weigh(p * drop, v, ~np.isneginf(s))
    return State(m, alpha * state.l + p.sum(axis=1), acc)


def merge(a: State, b: State) -> State:
    """The state of two disjoint sets of keys, in any order."""
    m = np.maximum(a.m, b.m)
    x, y = np.exp(a.m - pivot(m)), np.exp(b.m - pivot(m))
    return State(m, x * a.l + y * b.l, x[:, None] * a.acc + y[:, None] * b.acc)


def finish(state: State) -> tuple[np.ndarray, np.ndarray]:
    """o "rows e" and lse "rows": o = acc / l, lse = m + log l. A row that saw nothing gives 0 and -inf."""
    l = np.where(state.l == 0, 1, state.l)  # noqa: E741
    return state.acc / l[:, None], np.where(state.l == 0, -np.inf, state.m + np.log(l))


def pivot(m: np.ndarray) -> np.ndarray:
    """What to subtract before exp: the running max, or 0 where the row has seen nothing."""
    return np.where(np.isneginf(m), 0, m)


def weigh(p: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """p @ v over seen pairs only: a hidden row of v, NaN and inf included, is not read (select, not multiply)."""
    bad = ~np.isfinite(v).all(axis=1)
    if not bad.any():
        return p @ v
    with np.errstate(invalid="ignore"):  # 0·inf of a seen pair is NaN, as it should be
        dirty = sum(np.where(seen[:, [c]], p[:, [c]] * v[c], 0) for c in np.flatnonzero(bad))
        return p[:, ~bad] @ v[~bad] + dirty
