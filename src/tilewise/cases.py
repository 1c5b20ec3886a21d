"""Named problems, one list for tests, `check` and benchmarks. Sizes are primes off every block boundary, so that an axis
taken for another, or a ragged edge forgotten, cannot pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .dropout import Dropout
from .mask import Causal, Chunked, Documents, Lengths, Mask, Prefix, Where, Window
from .positions import Positions
from .problem import Inputs, Options, Partial
from .ragged import Ragged


@dataclass(frozen=True)
class Case:
    """One named problem. `bias` names the axes it has ("b h n s", a size of 1 as "1"), `alibi` those of the slopes."""

    name: str
    b: int = 2
    n: int = 37
    s: int = 53
    h: int = 6
    g: int = 3
    d: int = 19
    e: int = 11
    options: Options = field(default_factory=Options)
    bias: str = ""
    alibi: str = ""
    sink: bool = False
    size: float = 1.0
    """Standard deviation of q and k: large ones make logits that overflow a careless exponential."""

    def inputs(self, seed: int = 0) -> Inputs[np.ndarray]:
        """Standard normal arrays in float64; slopes are positive."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        sizes = {"b": self.b, "h": self.h, "n": self.n, "s": self.s, "1": 1}

        def draw(axes: str) -> np.ndarray | None:
            return rng.normal(size=[sizes[a] for a in axes.split()]) if axes else None

        slopes = draw(self.alibi)
        return Inputs(
            self.size * rng.normal(size=(self.b, self.n, self.h, self.d)),
            self.size * rng.normal(size=(self.b, self.s, self.g, self.d)),
            rng.normal(size=(self.b, self.s, self.g, self.e)),
            draw(self.bias),
            None if slopes is None else np.abs(slopes),
            draw("h") if self.sink else None,
        )

    def upstream(self, seed: int = 1) -> Partial:
        """The gradients (do, dlse) that come in from above."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        return Partial(rng.normal(size=(self.b, self.n, self.h, self.e)), rng.normal(size=(self.b, self.h, self.n)))


def _masked(mask: Mask) -> Options:
    return Options(mask)


_HOLES = np.random.default_rng(7).random((2, 1, 37, 53)) < 0.6
_HOLES[1, 0, 5] = False
_ISLANDS = Documents(np.repeat([0, 1, -1, 2, 3], [11, 2, 7, 1, 32]))
_RAGGED = Ragged.from_lengths([0, 1, 13, 0, 17, 2], [3, 5, 11, 0, 23, 1])

CASES: tuple[Case, ...] = (
    Case("full"),
    Case("full, one head", h=1, g=1, d=7, e=5),
    Case("full, multi-query", h=5, g=1),
    Case("full, as many key heads", h=3, g=3),
    Case("one query", n=1, h=4, g=2),
    Case("one key", s=1),
    Case("one of each", b=1, n=1, s=1, h=1, g=1, d=1, e=1),
    Case("no queries", n=0),
    Case("no keys", s=0),
    Case("no batch", b=0),
    Case("large head sizes", d=257, e=131, h=2, g=1),
    Case("head size 1", d=1, e=1),
    Case("causal", options=_masked(Causal())),
    Case("causal, n = s", s=37, options=_masked(Causal())),
    Case("causal, more queries than keys", n=53, s=37, options=_masked(Causal())),
    Case("causal, top-left", options=_masked(Causal("top-left"))),
    Case("causal, several tiles", b=1, n=521, s=1031, h=2, g=1, d=13, e=7, options=_masked(Causal())),
    Case("causal, one query of many keys", b=1, n=1, s=1031, h=4, g=2, options=_masked(Causal())),
    Case("window", options=_masked(Window(5, 3))),
    Case("window, causal", options=_masked(Causal() & Window(3))),
    Case("window, self only", options=_masked(Window(0, 0))),
    Case("window, some rows hidden", n=61, s=23, options=_masked(Window(4, 4))),
    Case("window, several tiles", b=1, n=1031, s=1031, h=1, g=1, d=13, e=7, options=_masked(Causal() & Window(97))),
    Case("prefix", options=_masked(Prefix(29))),
    Case("prefix by entry", options=_masked(Prefix([3, 41]))),
    Case("documents", options=_masked(Documents.from_lengths([7, 1, 19, 26]))),
    Case("documents, causal with padding", options=_masked(Causal() & _ISLANDS)),
    Case("documents by entry", n=53, options=_masked(Documents(np.stack([_ISLANDS.ids, np.arange(53) // 10])) & Causal())),
    Case("chunked, causal", options=_masked(Chunked(16) & Causal())),
    Case("lengths", options=_masked(Lengths([53, 17]))),
    Case("lengths, padded left, one empty", options=_masked(Causal() & Lengths([31, 0], [22, 53]))),
    Case("where function", options=_masked(Where(lambda b, h, i, j: (i * 7 + j * 3 + h + b) % 5 != 0))),
    Case("where function, blocks", b=1, n=521, s=521, h=2, g=1, d=13, e=7,
         options=_masked(Where(lambda b, h, i, j: (i // 128 + j // 128) % 2 == 0))),
    Case("where table, a row hidden", options=_masked(Where(_HOLES) & Causal())),
    Case("positions, strided", options=Options(Causal(), positions=(Positions(37, 2, 4), Positions(53, 1, 4)))),
    Case("positions, zigzag", options=Options(
        Causal() & Window(61), positions=(Positions.of(np.r_[16:33, 96:116]), Positions.of(np.r_[0:26, 80:107])))),
    Case("positions by entry", options=Options(Causal(), positions=(Positions(37, np.array([3, 16])), Positions(53)))),
    Case("scale", options=Options(scale=0.05)),
    Case("softcap", options=Options(Causal(), softcap=2.5), size=2.0),
    Case("alibi", alibi="h", options=_masked(Causal())),
    Case("alibi by entry", alibi="b h", options=_masked(Window(9, 9))),
    Case("bias", bias="b h n s"),
    Case("bias by head", bias="h n s", options=_masked(Causal())),
    Case("bias by key", bias="b 1 1 s"),
    Case("bias by query", bias="h n 1", options=Options(Causal(), softcap=3.0)),
    Case("sink", sink=True, options=_masked(Causal() & Window(7))),
    Case("sink, rows hidden", n=53, s=37, sink=True, options=_masked(Causal())),
    Case("dropout", options=Options(Causal(), dropout=Dropout(0.3, seed=2**40 + 5))),
    Case("huge logits", size=60.0, options=_masked(Causal())),
    Case("everything", bias="h 1 s", alibi="b h", sink=True,
         options=Options(Causal() & Window(31), 0.2, 4.0, Dropout(0.2, seed=3))),
    Case("packed", b=1, n=33, s=43, options=Options(Causal(), ragged=_RAGGED)),
    Case("packed, rows past the end", b=1, n=37, s=53, options=Options(Window(5, 5), ragged=_RAGGED)),
    Case("packed, everything", b=1, n=37, s=53, bias="h n s", alibi="h", sink=True,
         options=Options(Chunked(6) & Causal(), 0.3, 5.0, Dropout(0.1, seed=9), ragged=_RAGGED)),
)  # fmt: skip
