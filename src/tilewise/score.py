"""What happens to a logit between q·k and softmax. The order, stated once: scale → bias, alibi → softcap → mask → softmax
(with sink) → dropout."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from ._errors import OptionError


@dataclass(frozen=True)
class Score:
    """s[i, j] = cap(scale·q[i]·k[j] + bias[i, j] − slope·|i − j|) with cap(x) = softcap·tanh(x / softcap).

    `bias` and `alibi` are the shapes of those inputs, None where absent; a sink is one more logit per head that takes
    probability but has no value.
    """

    scale: float
    softcap: float | None = None
    bias: tuple[int, ...] | None = None
    alibi: tuple[int, ...] | None = None
    sink: bool = False

    def __post_init__(self) -> None:
        if not isfinite(self.scale):
            raise OptionError(f"scale must be a finite number, got {self.scale}")
        if self.softcap is not None and not (self.softcap > 0 and isfinite(self.softcap)):
            raise OptionError(f"softcap must be positive and finite, or None for none, got {self.softcap}")

    def value(self, qk: np.ndarray, extra: np.ndarray | float = 0.0) -> np.ndarray:
        """The logit, from q·k and from what bias and alibi add."""
        x = self.scale * qk + extra
        return x if self.softcap is None else self.softcap * np.tanh(x / self.softcap)

    def slope(self, s: np.ndarray) -> np.ndarray:
        """d(logit) / d(scale·q·k + extra), from the logit itself: 1, or 1 − (s / softcap)²."""
        return np.ones_like(s) if self.softcap is None else 1 - (s / self.softcap) ** 2
