"""Gradients by the Hopper backend's own kernels: each variant against the float64 definition, and the same bits from every
run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise import testing
from tilewise.cases import Case
from tilewise.mask import Causal, Chunked, Documents, Lengths, Prefix, Window
from tilewise.positions import Positions
from tilewise.problem import Options
from tilewise.ragged import Ragged

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

_IDS = np.repeat([0, 1, 2, 3], [137, 1, 262, 117])
_ROWS = np.sort(np.random.default_rng(3).choice(1000, 517, replace=False))[None]
SIZES = ((64, 64), (128, 128), (80, 48), (256, 256), (192, 128))


def _case(name: str, mask: Any = None, n: int = 517, s: int = 517, **more: Any) -> Case:
    options = Options(mask, **{key: more.pop(key) for key in ("softcap", "positions", "ragged") if key in more})
    return Case(name, **{"b": 2, "n": n, "s": s, "h": 4, "g": 2, "options": options, **more})


CASES = (
    _case("full", n=211, s=333),
    _case("several blocks", n=2111, s=2333, b=1),
    _case("causal", Causal(), n=300, s=411),
    _case("causal, more queries", Causal(), n=411, s=300),
    _case("long, causal", Causal(), n=4099, s=4099, b=1),
    _case("window", Window(100, 0), n=1100, s=1100),
    _case("window, both", Window(41, 23), n=700, s=900),
    _case("documents", Documents(_IDS) & Causal()),
    _case("lengths", Lengths([53, 509])),
    _case("prefix", Prefix([7, 200])),
    _case("chunked", Chunked(50)),
    _case("gaps", Causal() & Window(61), s=997, positions=(Positions.of(_ROWS), Positions(997)), b=1),
    _case("packed", Causal(), ragged=Ragged.from_lengths([100, 150, 3, 47], [120, 150, 30, 0]), n=333, s=411, b=1),
    _case("softcap", Causal(), softcap=5.0),
    _case("alibi", Causal(), alibi="h"),
    _case("sink", Causal(), n=331, s=193, sink=True),
)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("d, e", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case: Case, d: int, e: int, dtype: str) -> None:
    for result in testing.check(replace(case, d=d, e=e), dtype, "hopper", "cuda"):
        assert result.ok, result


@pytest.mark.parametrize("d", (64, 128, 256))
def test_every_run_gives_the_same_bits(d: int) -> None:
    q, k, v, do = (torch.randn(1, 4096, 8, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = tw.attention(*leaves, mask=Causal(), backend="hopper")
    first = torch.autograd.grad(o, leaves, do, retain_graph=True)
    for _ in range(30):
        again = torch.autograd.grad(o, leaves, do, retain_graph=True)
        assert all(map(torch.equal, first, again))
