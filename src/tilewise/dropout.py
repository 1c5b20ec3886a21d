"""Dropout whose pattern depends on (seed, b, h, i, j) alone: the same on every backend, tile size, split and device.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3) with key =
seed and counter = (j // 4, i, h, b); its four words belong to four neighbouring keys. i and j are positions, b is the
sequence and h the query head, so a kernel or a ring shard that knows its positions knows its pattern."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ._errors import OptionError
from .arrays import check_number

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF


def philox(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Four random uint32 words (as uint64 arrays) for four counter words and two key words."""
    c0, c1, c2, c3 = (np.asarray(c).astype(np.uint64) for c in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        a, b = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1 = (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0), b & np.uint64(WORD)
        c2, c3 = (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1), a & np.uint64(WORD)
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def check_rate(rate: float) -> None:
    """Raise unless `rate` is a number in [0, 1)."""
    check_number("dropout", rate)
    if not 0 <= rate < 1:
        raise OptionError(f"dropout must lie in [0, 1), got {rate}")


@dataclass(frozen=True)
class Dropout:
    """Each probability is dropped with chance `rate`; what is kept grows by 1 / (1 − rate).

    >>> Dropout(0.5, seed=7).keep(0, 0, 0, np.arange(8)).astype(int)
    array([1, 1, 0, 0, 0, 1, 0, 1])
    """

    rate: float
    seed: Any
    """64 bits: a number, or a tensor of one element that a device holds."""
    head: int = 0
    """Which head of the pattern head 0 is: a call with some heads of a model drops what the model would."""

    def __post_init__(self) -> None:
        check_rate(self.rate)

    @property
    def key(self) -> tuple[int, int]:
        """The seed's low and high 32 bits."""
        seed = int(self.seed)
        return seed & WORD, (seed >> 32) & WORD

    @property
    def threshold(self) -> int:
        """A pair is kept where its random word is at least this."""
        return round(self.rate * (WORD + 1))

    @property
    def scale(self) -> float:
        """How much a kept probability grows."""
        return 1 / (1 - self.rate)

    def keep(self, b: np.ndarray | int, h: np.ndarray | int, i: np.ndarray | int, j: np.ndarray | int) -> np.ndarray:
        """True where the pair survives; arguments broadcast."""
        b, h, i, j = np.broadcast_arrays(*(np.asarray(x, dtype=np.int64) for x in (b, h, i, j)))
        h = h + self.head
        words = philox(tuple(c & WORD for c in (j >> 2, i, h, b)), self.key)
        return np.choose(j & 3, words) >= self.threshold
