"""Runs to look at: random numbers of a shape, a row of logits given as they are, and the ones that a page shows by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._errors import OptionError
from ..mask import parse
from ..problem import Inputs, Options
from ..tiles import TileShape
from . import trace
from .trace import Trace

ROW = (1.0, 3.0, 2.0, 5.0)
"""The row of logits that every explanation here begins with, in blocks of two."""


class Sizes(NamedTuple):
    """Query rows, key rows, query heads, key heads, head sizes of keys and of values."""

    n: int
    s: int
    h: int
    g: int
    d: int
    e: int


@dataclass(frozen=True)
class Run:
    """A trace under the name that a page's address has for it; `mask` is its text, `source` where its numbers come from."""

    name: str
    mask: str
    source: str
    trace: Trace


def draw(sizes: Sizes, seed: int = 0) -> Inputs[np.ndarray]:
    """Standard normal q, k and v."""
    rng, (n, s, h, g, d, e) = np.random.default_rng(seed), sizes
    return Inputs(rng.normal(size=(1, n, h, d)), rng.normal(size=(1, s, g, d)), rng.normal(size=(1, s, g, e)))


def row(logits: Sequence[float], block: int = 2) -> Run:
    """One query whose logits are these; its values are 10, 20, 30, ..."""
    if not logits or not all(np.isfinite(logits)):
        raise OptionError(f"a row needs one or more finite logits, got {list(logits)}")
    s = len(logits)
    k, v = np.reshape(np.asarray(logits, float), (1, s, 1, 1)), np.arange(1.0, s + 1).reshape(1, s, 1, 1) * 10
    made = trace.run(Inputs(np.ones((1, 1, 1, 1)), k, v), Options(scale=1.0), TileShape(1, block))
    return Run("row", "full", ", ".join(f"{x:g}" for x in logits), made)


def random(name: str, mask: str, sizes: Sizes, shape: TileShape, dtype: str = "float16", backward: bool = False) -> Run:
    """A run on random numbers under a mask given as text, which is parsed."""
    return Run(name, mask, "seed 0", trace.run(draw(sizes), Options(parse(mask)), shape, dtype, backward))


def default() -> list[Run]:
    """64 × 64 causal, forward and backward; the same numbers without a mask; grouped heads with ragged edges; the row."""
    square, grouped, shape = Sizes(64, 64, 1, 1, 16, 16), Sizes(20, 28, 4, 2, 8, 8), TileShape(16, 16)
    return [
        random("causal", "causal", square, shape, backward=True),
        random("full", "full", square, shape),
        random("grouped", "causal", grouped, shape),
        row(ROW),
    ]
