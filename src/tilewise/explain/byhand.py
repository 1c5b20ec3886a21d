"""The row of logits that the page follows from its first block to the merge of its halves, and its pictures as they begin."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..softmax import State, absorb, empty, finish, merge
from . import tour
from .facts import number
from .trace import Step

WIDE, HIGH, FLOOR = 460, 200, 235
"""Of the bars of logits: how wide they are in all, how high the highest is, and where they stand."""

LONGEST = 330
"""The longest bar of ℓ."""

WEIGHTS = 420
"""The bar of both halves' weights."""


def row() -> dict[str, Any]:
    """1, 3 | 2, 5: every number that the page says of it."""
    made = tour.row(tour.ROW).trace
    s, v = made.s[0], made.inputs.v[0, :, 0]
    once = absorb(empty(1, 1), s, v)
    halves = [absorb(empty(1, 1), s[:, part], v[part]) for part in (slice(0, 2), slice(2, 4))]
    return {
        "steps": [_step(old, new, t) for t, (old, new) in enumerate(zip([None, *made.steps[:-1]], made.steps, strict=True))],
        "l": f"{once.l[0]:.3f}",
        "lse": number(made.result.lse[0, 0, 0]),
        "p": " ".join(f"{x:.3f}" for x in made.p[0, 0]),
        "o": number(made.result.o[0, 0, 0, 0]),
        "naive": number(np.exp(s).sum()),
        "merge": _merged(*halves),
        "bars": _bars(),
        "lines": _lines(made.steps),
        "sums": _sums(made.steps),
    }


def _numbers(old: Step | None, new: Step) -> tuple[float, float, float, float]:
    """Of the row after a block: m, α, what is left of the old ℓ, and ℓ."""
    assert new.after is not None
    m, total, alpha = (float(x[0]) for x in new.after)
    before = 0.0 if old is None or old.after is None else float(old.after.l[0])
    return m, alpha, alpha * before, total


def _cells(t: int) -> tuple[float, ...]:
    """The logits of a block."""
    return tour.ROW[2 * t : 2 * t + 2]


def _step(old: Step | None, new: Step, t: int) -> dict[str, str]:
    """A line of the table of blocks."""
    m, alpha, kept, total = _numbers(old, new)
    words = {"kept": f"{kept:.3f}", "sum": f"{total - kept:.3f}", "l": f"{total:.3f}"}
    return {"cells": ", ".join(f"{x:g}" for x in _cells(t)), "m": number(m), "alpha": number(alpha), **words}


def _merged(a: State, b: State) -> dict[str, Any]:
    """lse of each half and of both, and how much each weighs."""
    parts = [float(finish(x)[1][0]) for x in (a, b)]
    whole = float(finish(merge(a, b))[1][0])
    weights = [float(np.exp(x - whole)) for x in parts]
    words = {"l1": number(parts[0]), "l2": number(parts[1]), "l": number(whole)}
    return words | {"w": " ".join(f"{w:.3f}" for w in weights), "share": round(WEIGHTS * weights[0], 1)}


def _bars() -> list[dict[str, Any]]:
    """A bar a logit, coloured by its block."""
    wide, unit = WIDE / len(tour.ROW), HIGH / max(tour.ROW)
    return [
        {"x": wide * t + 8, "w": wide - 16, "y": FLOOR - x * unit, "h": x * unit, "value": number(x), "block": f"b{t // 2}"}
        for t, x in enumerate(tour.ROW)
    ]


def _lines(steps: tuple[Step, ...]) -> list[dict[str, Any]]:
    """The running max over each block."""
    half, unit = WIDE // 2, HIGH / max(tour.ROW)
    tops = [_numbers(None, step)[0] for step in steps]
    return [{"x": half * t + 2, "w": half - 4, "y": FLOOR - m * unit, "value": number(m)} for t, m in enumerate(tops)]


def _sums(steps: tuple[Step, ...]) -> list[dict[str, Any]]:
    """ℓ after each block as a bar of parts: what is left of the old one, and what each logit adds."""
    found = [_numbers(old, new) for old, new in zip([None, *steps[:-1]], steps, strict=True)]
    unit, bars = LONGEST / max(total for *_, total in found), []
    for t, (m, _, kept, _) in enumerate(found):
        at = 0.0
        for tone, size in (("kept", kept), *((f"logit b{t}", float(np.exp(x - m))) for x in _cells(t))):
            bars.append({"tone": tone, "x": round(at * unit, 1), "y": 30 * t, "w": round(size * unit, 1)})
            at += size
    return bars
