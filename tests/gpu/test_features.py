"""Every feature × dtype × head size against the float64 definition, gradients and lse included, in sizes off every tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tilewise import testing
from tilewise._errors import Unsupported
from tilewise.cases import Case
from tilewise.dropout import Dropout
from tilewise.mask import Causal, Chunked, Documents, Lengths, Mask, Prefix, Where, Window
from tilewise.ops import lse_dtype
from tilewise.positions import Positions
from tilewise.problem import Inputs, Options, Partial
from tilewise.ragged import Ragged

N, S = 193, 331
DTYPES = ("bfloat16", "float16", "float32", "float64")
HEADS = (
    (16, 16), (32, 32), (40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256),
    (512, 512),
)  # fmt: skip


def case(name: str, mask: Mask | None = None, **more) -> Case:
    """Two entries, two query heads that share a key head; options by name, the rest as in `Case`."""
    names = ("scale", "softcap", "dropout", "positions", "ragged")
    options = Options(mask, **{key: more.pop(key) for key in names if key in more})
    return Case(name, **{"b": 2, "n": N, "s": S, "h": 2, "g": 1, "options": options, **more})


_IDS = np.repeat([0, 1, -1, 2, 3], [61, 2, 37, 1, 230])
_TABLE = np.random.default_rng(7).random((2, 1, N, S)) < 0.6
_TABLE[1, 0, 5] = False
_RAGGED = Ragged.from_lengths([0, 1, 67, 0, 90, 2, 33], [3, 5, 131, 0, 140, 1, 33])
_ROWS = np.r_[100:197, 300:396], np.r_[0:165, 230:396]

CASES = (
    case("full"),
    case("as many key heads", g=2),
    case("multi-query", b=1, h=5),
    case("grouped", Causal(), b=1, h=6, g=2),
    case("several tiles", Causal(), b=1, n=521, s=1031, h=1),
    case("one query", Causal(), n=1, s=1031, h=4, g=2),
    case("a few queries", Causal(), n=5, s=1031, h=4, g=1),
    case("one key", s=1),
    case("causal", Causal()),
    case("causal, n = s", Causal(), n=S),
    case("causal, more queries than keys", Causal(), n=S, s=N),
    case("causal, top-left", Causal("top-left")),
    case("window", Window(41, 23)),
    case("window, causal", Causal() & Window(97)),
    case("window, self only", Window(0, 0)),
    case("window, rows hidden", Window(40, 40), n=S, s=77),
    case("prefix", Prefix(170)),
    case("prefix by entry", Prefix([3, 231])),
    case("documents", Causal() & Documents(_IDS)),
    case("documents by entry", Documents(np.stack([_IDS, np.arange(S) // 50])) & Causal(), n=S),
    case("chunked", Chunked(48) & Causal()),
    case("lengths", Lengths([S, 77])),
    case("lengths, padded left, one empty", Causal() & Lengths([131, 0], [200, S])),
    case("where function", Where(lambda b, h, i, j: (i * 7 + j * 3 + h + b) % 5 != 0)),
    case("where function, blocks", Where(lambda b, h, i, j: (i // 64 + j // 64) % 2 == 0) & Causal()),
    case("where table, a row hidden", Where(_TABLE) & Causal()),
    case("positions, strided", Causal(), positions=(Positions(N, 2, 4), Positions(S, 1, 4))),
    case("positions, zigzag", Causal() & Window(201), positions=tuple(map(Positions.of, _ROWS))),
    case("positions by entry", Causal(), positions=(Positions(N, np.array([3, 138])), Positions(S))),
    case("scale", scale=0.05),
    case("huge logits", Causal(), size=30.0),
    case("softcap", Causal(), softcap=2.5, size=2.0),
    case("alibi", Causal(), alibi="h"),
    case("alibi by entry", Window(99, 99), alibi="b h"),
    case("bias", bias="b h n s"),
    case("bias, one for all entries", Causal(), bias="1 h n s"),
    case("bias by head", Causal(), bias="h n s"),
    case("bias by key", bias="b 1 1 s"),
    case("bias by query", Causal(), bias="h n 1", softcap=3.0),
    case("sink", Causal() & Window(77), sink=True),
    case("sink, rows hidden", Causal(), n=S, s=N, sink=True),
    case("dropout", Causal(), dropout=Dropout(0.3, seed=2**40 + 5)),
    case("everything", Causal() & Window(131), scale=0.2, softcap=4.0, dropout=Dropout(0.2, seed=3), bias="h 1 s",
         alibi="b h", sink=True),
    case("packed", Causal(), ragged=_RAGGED, b=1, n=N, s=313),
    case("packed, rows past the end", Window(50, 50), ragged=_RAGGED, b=1, n=N + 9, s=S),
    case("packed, everything", Chunked(60) & Causal(), ragged=_RAGGED, b=1, s=S, bias="h n s", alibi="h", sink=True, scale=0.3,
         softcap=5.0, dropout=Dropout(0.1, seed=9)),
)  # fmt: skip
CORE = ("causal", "grouped", "everything")
"""Features that meet every dtype and head size; the others meet every dtype at one size, and every tenth size in bfloat16."""


def head_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def last_axis_strided(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]


def odd_rows(x: Tensor) -> Tensor:
    """Rows whose distance is no multiple of 16 bytes, NaN between them."""
    return torch.nn.functional.pad(x, (0, 3), value=torch.nan)[..., : x.shape[-1]]


def odd_start(x: Tensor) -> Tensor:
    """Memory that starts one element past an aligned address."""
    return torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape)


def backwards_heads(x: Tensor) -> Tensor:
    """Heads far apart and rows close together, as in a cache "h b n d"."""
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def one_for_all(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (head_first, last_axis_strided, odd_rows, odd_start, backwards_heads, one_for_all)
}


@dataclass(frozen=True)
class Feature:
    """A case, and how its tensors lie in memory, which gradients come in ("o", "lse" or both), and the dtype of its extras."""

    case: Case
    layout: str = ""
    upstream: str = "both"
    wide_extras: bool = False

    def inputs(self, dtype: str, device: str) -> Inputs[Tensor]:
        x = testing.tensors(self.case.inputs(), dtype, device)
        if self.layout:
            x = replace(x, **{name: LAYOUTS[self.layout](getattr(x, name)) for name in ("q", "k", "v")})
        extras = {name: t.float() for name, t in x.present() if name not in ("q", "k", "v") and dtype != "float64"}
        return replace(x, **extras) if self.wide_extras else x

    def grads(self, x: Inputs[Tensor]) -> Partial:
        do, dlse = (torch.from_numpy(a).to(x.q.device) for a in self.case.upstream())
        do, dlse = do.to(x.q.dtype), dlse.to(lse_dtype(x.q.dtype))
        if self.upstream == "expanded":  # what o.sum() sends
            return Partial(do[:1, :1, :1, :1].expand_as(do), dlse[:1, :1, :1].expand_as(dlse))
        return Partial(do * (self.upstream != "lse"), dlse * (self.upstream != "o"))


_MANY = case("many", Causal() & Window(131), bias="h n s", alibi="h", sink=True)
FEATURES: dict[str, Feature] = {
    **{c.name: Feature(c) for c in CASES},
    **{name.replace("_", " "): Feature(case(name, Causal()), layout=name) for name in LAYOUTS},
    **{f"gradient of {u} alone": Feature(case(u, Causal(), n=S, s=N), upstream=u) for u in ("o", "lse")},
    "gradients of one number": Feature(case("sum", Causal()), upstream="expanded"),
    "extras in float32": Feature(_MANY, wide_extras=True),
}


def triples(depth: str) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Which feature meets which dtype and head size."""
    for number, name in enumerate(FEATURES):
        for dtype in DTYPES:
            for at, head in enumerate(HEADS):
                some = head == (64, 64) or (dtype == "bfloat16" and (head == (128, 128) or at % 6 == number % 6))
                if depth == "all" or name in CORE or some:
                    yield name, dtype, head


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "head" in metafunc.fixturenames:
        chosen = list(triples(str(metafunc.config.getoption("--depth", "pairs"))))
        names = [f"{name}-{dtype}-{d}" + ("" if d == e else f"/{e}") for name, dtype, (d, e) in chosen]
        metafunc.parametrize(("feature", "dtype", "head"), chosen, ids=names)


def test_feature(feature: str, dtype: str, head: tuple[int, int], backend: str, device: str, hold) -> None:
    d, e = head
    asked = FEATURES[feature]
    asked = replace(asked, case=replace(asked.case, d=d, e=e))
    x = asked.inputs(dtype, device)
    grads = asked.grads(x)
    try:
        mine = testing.ask(asked.case, x, grads, backend)
    except Unsupported as error:
        pytest.skip(f"refused: {'; '.join(error.reasons)}")
    hold(feature, f"{d}" if d == e else f"{d}/{e}", testing.judge(asked.case, x, grads, mine))
