"""What is measured: a case is a problem by name, a task one pass of it with the tensors that everybody starts from. The lists
of cases are in `catalog`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..ops import lse_dtype
from ..problem import Inputs, Options, Problem
from ..ragged import Ragged
from ..tiles import visible_pairs

PAIRS = 2**21
"""Query-key pairs, over batch and heads, of the largest case that is checked whole."""

NUMBERS = 2**23
"""Numbers in the larger of q and k, every head with keys of its own, of such a case."""

QKV = ("q", "k", "v")

PLAIN = Options()

CALLS = ("call", "recorded", "step")

UNITS = {"forward": "TFLOP/s", "backward": "TFLOP/s", "decode": "GB/s", **dict.fromkeys(CALLS, "calls/s")}
"""Every pass and what it is measured in: a forward; a backward; a forward with few query rows; and where what takes time is
the call itself, a forward, a forward that autograd records, and a forward with its backward."""

Tensors = Inputs[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One problem and the passes that are timed on it. Axes as everywhere: b n s h g d e; `bias` names the axes it has
    ("b h n s", a size of 1 as "1"), `needs` the inputs whose gradient a backward computes."""

    name: str
    b: int
    n: int
    s: int
    h: int
    g: int
    d: int
    e: int
    dtype: str = "float32"
    options: Options = PLAIN
    bias: str = ""
    alibi: bool = False
    sink: bool = False
    needs: tuple[str, ...] = QKV
    passes: tuple[str, ...] = ("forward", "backward")
    group: str = "main"

    @property
    def pairs(self) -> int:
        """Query-key pairs, hidden ones included, over batch and heads."""
        return self.b * self.h * self.n * self.s

    @property
    def small(self) -> bool:
        """True where a definition that stores every score can check all of it, in about a second."""
        return self.pairs <= PAIRS and self.b * self.h * max(self.n, self.s) * max(self.d, self.e) <= NUMBERS

    def inputs(self, device: str, seed: int = 0) -> Tensors:
        """q, k, v, bias and sink normally distributed, and the slopes that ALiBi models have, in float32 as they have them."""
        generator = torch.Generator(device).manual_seed(seed)
        sizes = {"b": self.b, "h": self.h, "n": self.n, "s": self.s, "1": 1}

        def draw(*shape: int) -> torch.Tensor:
            x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            return x.to(getattr(torch, self.dtype))

        slopes = 2 ** (-8 * torch.arange(1, self.h + 1, device=device, dtype=torch.float32) / self.h)
        return Inputs(
            draw(self.b, self.n, self.h, self.d),
            draw(self.b, self.s, self.g, self.d),
            draw(self.b, self.s, self.g, self.e),
            draw(*(sizes[axis] for axis in self.bias.split())) if self.bias else None,
            slopes if self.alibi else None,
            draw(self.h) if self.sink else None,
        )

    def problem(self, x: Tensors) -> Problem:
        """The problem that these inputs pose."""
        return Problem.describe(x, self.options)

    def reduced(self) -> Case:
        """The same case, made small: two batch entries and key heads, then shorter sides."""
        case = self
        if not case.small:
            g = min(case.g, 2)
            case = replace(case, b=min(case.b, 2), h=g * (case.h // case.g), g=g)
        while not case.small and max(case.n, case.s) > 1:
            case = case.resized(-(-case.n // 2), -(-case.s // 2))
        return case

    def resized(self, n: int, s: int) -> Case:
        """The same case with other sides; packed sequences end where the sides do."""
        packed, options = self.options.ragged, self.options
        if packed is not None:
            cut = Ragged.from_offsets(np.minimum(packed.q_offsets, n), np.minimum(packed.kv_offsets, s))
            options = replace(options, ragged=cut)
        return replace(self, n=n, s=s, options=options)


def upstream(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """do "b n h e" in the case's dtype and dlse "b h n" in that of lse: what backward starts from."""
    generator = torch.Generator(device).manual_seed(2)
    do = torch.randn(case.b, case.n, case.h, case.e, generator=generator, device=device)
    dlse = torch.randn(case.b, case.h, case.n, generator=generator, device=device)
    dtype = getattr(torch, case.dtype)
    return do.to(dtype), dlse.to(lse_dtype(dtype))


@dataclass(frozen=True)
class Task:
    """One pass of one case, and the tensors that everybody starts from."""

    case: Case
    name: str
    problem: Problem
    x: Tensors
    do: torch.Tensor

    @classmethod
    def of(cls, case: Case, name: str, device: str) -> Task:
        x = case.inputs(device)
        return cls(case, name, case.problem(x), x, upstream(case, device)[0])

    @property
    def gradients(self) -> bool:
        """True where the inputs need gradients."""
        return self.name in ("backward", "recorded", "step")

    def without_dropout(self) -> Task:
        """The same task with nothing dropped: which pairs are dropped is everybody's own choice, the rest is not."""
        case = replace(self.case, options=replace(self.case.options, dropout=None))
        return replace(self, case=case, problem=replace(self.problem, dropout=None))

    @property
    def work(self) -> float:
        """What one call does, in `unit`·seconds: operations of the visible pairs (two products forward, five backward, as
        no pass can do with fewer), for decode the bytes of k and v, and 1 where calls are counted."""
        p = self.problem
        if self.unit == "calls/s":
            return 1.0
        if self.name == "decode":
            return p.b * p.s * p.g * (p.d + p.e) * p.itemsize / 1e9
        sizes = (p.d + p.e) if self.name == "forward" else (3 * p.d + 2 * p.e)
        return 2 * visible_pairs(p) * sizes / 1e12

    @property
    def unit(self) -> str:
        return UNITS[self.name]
