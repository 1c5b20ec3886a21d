"""What is measured, by name: one list of cases for each kind of device. A case is data; adding one is adding a line."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..mask import Causal, Documents, Full, Mask, Window
from ..ops import lse_dtype
from ..problem import Inputs, Options, Problem
from ..tiles import visible_pairs

FULL = Full()

PAIRS = 2**21
"""Query-key pairs, over batch and heads, of the largest case that is checked at its own size."""

Tensors = Inputs[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One problem and the passes that are timed on it. Axes as everywhere: b n s h g d e; `passes` of "forward",
    "backward" and "decode" (a forward with few query rows, measured in bytes)."""

    name: str
    b: int
    n: int
    s: int
    h: int
    g: int
    d: int
    e: int
    dtype: str = "float32"
    mask: Mask = FULL
    softcap: float | None = None
    passes: tuple[str, ...] = ("forward", "backward")

    @property
    def pairs(self) -> int:
        """Query-key pairs, hidden ones included, over batch and heads."""
        return self.b * self.h * self.n * self.s

    def inputs(self, device: str, seed: int = 0) -> Tensors:
        """q, k and v, normally distributed."""
        generator = torch.Generator(device).manual_seed(seed)
        shapes = (self.b, self.n, self.h, self.d), (self.b, self.s, self.g, self.d), (self.b, self.s, self.g, self.e)
        make = (torch.randn(x, generator=generator, device=device, dtype=torch.float32) for x in shapes)
        return Inputs(*(x.to(getattr(torch, self.dtype)) for x in make))

    def problem(self, x: Tensors) -> Problem:
        """The problem that these inputs pose."""
        return Problem.describe(x, Options(self.mask, softcap=self.softcap))

    def reduced(self) -> Case:
        """The same case, small enough for a definition that stores every score: two key heads, then shorter sides."""
        case = self
        if case.pairs > PAIRS and case.g > 2:
            case = replace(case, h=2 * case.h // case.g, g=2)
        while case.pairs > PAIRS and max(case.n, case.s) > 1:
            case = replace(case, n=-(-case.n // 2), s=-(-case.s // 2))
        return case


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
    def work(self) -> float:
        """What one call does, in `unit`·seconds: operations of the visible pairs (two products forward, five backward, as
        no pass can do with fewer), or for decode the bytes of k and v."""
        p = self.problem
        if self.name == "decode":
            return p.b * p.s * p.g * (p.d + p.e) * p.itemsize / 1e9
        sizes = (p.d + p.e) if self.name == "forward" else (3 * p.d + 2 * p.e)
        return 2 * visible_pairs(p) * sizes / 1e12

    @property
    def unit(self) -> str:
        return "GB/s" if self.name == "decode" else "TFLOP/s"


def _cases(*cases: Case) -> dict[str, Case]:
    return {case.name: case for case in cases}


DECODE = ("decode",)

CASES: dict[str, dict[str, Case]] = {
    "cpu": _cases(
        Case("causal", 1, 2048, 2048, 8, 8, 64, 64, mask=Causal()),
        Case("full", 1, 1024, 1024, 8, 8, 64, 64),
        Case("bfloat16", 1, 2048, 2048, 8, 8, 128, 128, "bfloat16", mask=Causal()),
        Case("window", 1, 2048, 2048, 8, 2, 64, 64, mask=Causal() & Window(left=255)),
        Case("documents", 1, 2048, 2048, 8, 8, 64, 64, mask=Causal() & Documents.from_lengths([350, 750, 198, 750])),
        Case("softcap", 1, 1024, 1024, 8, 8, 64, 64, mask=Causal(), softcap=30.0),
        Case("decode", 8, 1, 4096, 8, 2, 64, 64, mask=Causal(), passes=DECODE),
    ),
    "cuda": _cases(
        Case("causal", 2, 8192, 8192, 16, 16, 128, 128, "bfloat16", mask=Causal()),
        Case("full", 2, 8192, 8192, 16, 16, 128, 128, "bfloat16"),
        Case("causal-d64", 2, 8192, 8192, 32, 32, 64, 64, "bfloat16", mask=Causal()),
        Case("float32", 1, 4096, 4096, 8, 8, 64, 64, mask=Causal()),
        Case("window", 1, 16384, 16384, 32, 8, 128, 128, "bfloat16", mask=Causal() & Window(left=1023)),
        Case(
            "documents",
            1,
            16384,
            16384,
            16,
            16,
            128,
            128,
            "bfloat16",
            mask=Causal() & Documents.from_lengths([2800, 6000, 1584, 6000]),
        ),
        Case("softcap", 1, 8192, 8192, 16, 16, 128, 128, "bfloat16", mask=Causal(), softcap=30.0),
        Case("decode", 32, 1, 16384, 32, 8, 128, 128, "bfloat16", mask=Causal(), passes=DECODE),
    ),
}
"""By kind of device; a kind that is not here takes the cases of "cpu"."""

QUICK = ("causal", "window", "decode")
"""What `--quick` measures."""
