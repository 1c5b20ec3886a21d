"""What is asked, once and for all: a frozen description that every layer below reads. Validation lives here and in the values
that it is made of; above it, only what must be known before a description can be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import numpy as np

from ._errors import DtypeError, OptionError, ShapeError
from ._typing import A, Array, Shaped
from .arrays import check_integers, check_number
from .dropout import Dropout
from .mask import Full, Mask
from .positions import Dense, Layout, Positions
from .ragged import Packed, Ragged
from .score import Score

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""The dtypes attention is defined on, with their bytes."""

NAMES = ("q", "k", "v", "bias", "alibi", "sink")
"""The inputs, in the order in which operators carry them."""


@dataclass
class Inputs(Generic[A]):
    """The arrays of a call, all NumPy or all torch; also its gradients, under the same names.

    Shapes  q "b n h d" · k "b s g d" · v "b s g e" · bias broadcasts to "b h n s" · alibi "h" or "b h" · sink "h"
    """

    q: A
    k: A
    v: A
    bias: A | None = None
    alibi: A | None = None
    sink: A | None = None

    def present(self) -> list[tuple[str, A]]:
        """The name and array of each input that was given."""
        named = [(name, getattr(self, name)) for name in NAMES]
        return [(name, x) for name, x in named if x is not None]

    def map(self, change: Callable[[A], Any]) -> Inputs[Any]:
        """`change` of each input that was given, under the same names."""
        return Inputs(**{name: change(x) for name, x in self.present()})


class Partial(NamedTuple):
    """Attention over some set of keys, finished: o "b n h e", lse "b h n" = natural log of the sum of exp(logits).

    Partials over disjoint keys merge: see `merge`. A row that saw no key has o = 0, lse = -inf.
    """

    o: Array
    lse: Array


@dataclass(frozen=True)
class Options:
    """Everything a caller may choose beside the arrays. `positions` holds those of q and of k; `ragged` packs."""

    mask: Mask | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: Dropout | None = None
    positions: tuple[Positions, Positions] | None = None
    ragged: Ragged | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.mask is not None and not isinstance(self.mask, Mask):
            raise DtypeError(f"mask must be a tilewise mask such as Causal() or Where(table), got {type(self.mask).__name__}")
        for name, number in (("scale", self.scale), ("softcap", self.softcap)):
            if number is not None:
                check_number(name, number)
        pair = self.positions
        if pair is not None and not (
            isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, Positions) for x in pair)
        ):
            raise DtypeError(f"positions must be a pair of Positions, of q and of k, got {pair!r}")
        if self.ragged is not None and not isinstance(self.ragged, Ragged):
            got = type(self.ragged).__name__
            raise DtypeError(f"ragged must be a tilewise Ragged such as Ragged.from_lengths([3, 5]), got {got}")


@dataclass(frozen=True)
class Problem:
    """Frozen description of one attention call. Axes: b batch, n query rows, s key rows, h query heads, g key heads,
    d head size, e value head size; query head x reads key head x // (h // g)."""

    b: int
    n: int
    s: int
    h: int
    g: int
    d: int
    e: int
    dtype: str
    device: str
    mask: Mask
    score: Score
    dropout: Dropout | None
    layout: Layout
    deterministic: bool = False
    wide: bool = False
    """o and the gradients of q, k and v in the dtype of lse, not the inputs: parts of sums are not rounded early."""

    @classmethod
    def describe(cls, inputs: Inputs, options: Options = Options()) -> Problem:
        """The problem that these arrays and options pose, or a `ValueError` / `TypeError` naming the axis and both
        shapes. Looks at shapes and dtypes only; `check_values` looks inside masks, positions and offsets."""
        check_dtypes(inputs)
        check_shapes(inputs)
        (b, n, h, d), (_, s, g, e) = inputs.q.shape, inputs.v.shape
        mask = Full() if options.mask is None else options.mask
        layout = layout_of(options, mask, (b, n, s))
        mask.check((layout.ragged.sequences if isinstance(layout, Packed) else b, h, n, s))
        score = Score(
            d**-0.5 if options.scale is None else options.scale,
            options.softcap,
            None if inputs.bias is None else tuple(inputs.bias.shape),
            None if inputs.alibi is None else tuple(inputs.alibi.shape),
            inputs.sink is not None,
        )
        dropout = options.dropout if options.dropout is not None and options.dropout.rate > 0 else None
        mask = mask.bind(layout.starts if isinstance(layout, Dense) else None, h)
        sizes = {"b": b, "n": n, "s": s, "h": h, "g": g, "d": d, "e": e}
        where = {"dtype": dtype_name(inputs.q), "device": device_name(inputs.q), "layout": layout}
        return cls(**sizes, **where, mask=mask, score=score, dropout=dropout, deterministic=options.deterministic)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.h // self.g

    @property
    def itemsize(self) -> int:
        """Bytes of one element of q, k, v and o."""
        return DTYPES[self.dtype]

    @property
    def lse_itemsize(self) -> int:
        """Bytes of one element of lse: float32, or float64 for float64 inputs."""
        return max(self.itemsize, 4)

    def keep(self) -> np.ndarray:
        """Every visible pair by the definition, bool, broadcastable to "b h n s": for oracles and pictures only."""
        q, kv = self.layout.queries(slice(0, self.b), slice(0, self.n)), self.layout.keys(slice(0, self.b), slice(0, self.s))
        i, j = q.position[:, None, :, None], kv.position[:, None, None, :]
        mine, theirs = q.sequence[:, None, :, None], kv.sequence[:, None, None, :]
        return np.asarray(self.mask.keep(i, j, mine, np.arange(self.h)[None, :, None, None])) & (mine == theirs)

    def check_values(self) -> None:
        """Raise where the numbers inside masks, positions or offsets make no sense. Reads them from the device."""
        self.mask.check_values()
        if isinstance(self.layout, Packed):
            self.layout.ragged.check_values(self.n, self.s)
        if isinstance(self.layout, Dense):
            self.layout.q.check_values("q")
            self.layout.kv.check_values("k")


def layout_of(options: Options, mask: Mask, sizes: tuple[int, int, int]) -> Layout:
    """Where rows sit: as given, packed, or q's last row at k's last row (its first at the first for top-left)."""
    b, n, s = sizes
    if options.ragged is not None:
        if options.positions is not None:
            raise OptionError("packed sequences have positions of their own: ragged= and positions= do not go together")
        if b != 1:
            raise ShapeError(f"axis b: a packed problem has one batch entry, got {b}")
        check_integers("q_offsets", options.ragged.q_offsets)
        check_integers("kv_offsets", options.ragged.kv_offsets)
        if mask.align == "top-left":
            raise OptionError("Causal(align='top-left') does not go with packed sequences, which are aligned bottom-right")
        return Packed(options.ragged, n, s)
    if options.positions is None:
        return Dense(b, Positions(n, start=0 if mask.align == "top-left" else s - n), Positions(s))
    if mask.align == "top-left":
        raise OptionError("Causal(align='top-left') says where rows sit, and so does positions=: give one of them")
    q, kv = options.positions
    for side, have, axis, want in (("q", q, "n", n), ("k", kv, "s", s)):
        if have.count != want:
            raise ShapeError(f"axis {axis}: positions of {side} count {have.count} rows where {side} has {want}")
        for array, axes in ((have.start, 1), (have.rows, 2)):
            check_integers(f"positions of {side}", array)
            shape = tuple(getattr(array, "shape", ()))
            if len(shape) == axes and shape[:1] not in ((1,), (b,)):
                raise ShapeError(f"axis b: positions of {side} {shape} do not fit a batch of {b}")
    return Dense(b, q, kv)


def dtype_name(x: Shaped) -> str:
    return str(x.dtype).removeprefix("torch.")


def device_name(x: Shaped) -> str:
    return str(getattr(x, "device", "cpu"))


def check_dtypes(inputs: Inputs) -> None:
    """Floating point throughout; q, k and v of one dtype; everything on one device."""
    for name, x in inputs.present():
        if str(getattr(x, "layout", "torch.strided")) != "torch.strided" or getattr(x, "is_nested", False):
            raise DtypeError(f"{name} must be a dense tensor, got layout {x.layout}")
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise DtypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if dtype_name(x) not in DTYPES:
            hint = "; a boolean mask goes in mask=Where(table)" if name == "bias" and dtype_name(x) == "bool" else ""
            raise DtypeError(f"{name} must be one of {', '.join(DTYPES)}, got {dtype_name(x)} of shape {tuple(x.shape)}{hint}")
        if str(getattr(x, "device", "cpu")) != str(getattr(inputs.q, "device", "cpu")):
            raise DtypeError(f"q {tuple(inputs.q.shape)} is on {inputs.q.device} but {name} {tuple(x.shape)} is on {x.device}")
    for name, x in (("k", inputs.k), ("v", inputs.v)):
        if dtype_name(x) != dtype_name(inputs.q):
            raise DtypeError(
                f"q {tuple(inputs.q.shape)} is {dtype_name(inputs.q)} but {name} {tuple(x.shape)} is {dtype_name(x)}"
            )


def check_shapes(inputs: Inputs) -> None:
    """q "b n h d", k "b s g d", v "b s g e", bias → "b h n s", alibi "h" | "b h", sink "h"; h % g == 0."""
    q, k, v = (tuple(x.shape) for x in (inputs.q, inputs.k, inputs.v))
    for name, shape, axes in (("q", q, "b n h d"), ("k", k, "b s g d"), ("v", v, "b s g e")):
        if len(shape) != 4:
            raise ShapeError(f"{name} must have the four axes '{axes}', got {len(shape)}: {shape}")
    for axis, at, one, other in (("b", 0, q, k), ("b", 0, q, v), ("s", 1, k, v), ("g", 2, k, v), ("d", 3, q, k)):
        if one[at] != other[at]:
            names = ("k", "v") if one is k else ("q", "k") if other is k else ("q", "v")
            raise ShapeError(f"axis {axis}: {names[0]} {one} has {one[at]} but {names[1]} {other} has {other[at]}")
    for axis, name, shape, at in (("h", "q", q, 2), ("g", "k", k, 2), ("d", "q", q, 3), ("e", "v", v, 3)):
        if shape[at] < 1:
            raise ShapeError(f"axis {axis}: {name} {shape} must have at least one")
    if q[2] % k[2] != 0:
        raise ShapeError(f"axis h: the {q[2]} query heads of q {q} cannot be shared evenly by the {k[2]} key heads of k {k}")
    full = {"b": q[0], "h": q[2], "n": q[1], "s": k[1]}
    for name, x, choices in (
        ("bias", inputs.bias, ("b h n s", "h n s", "n s", "s", "")),
        ("alibi", inputs.alibi, ("b h", "h")),
        ("sink", inputs.sink, ("h",)),
    ):
        if x is not None:
            check_broadcast(name, tuple(x.shape), choices, full)


def check_broadcast(name: str, shape: tuple[int, ...], choices: tuple[str, ...], full: dict[str, int]) -> None:
    """`shape` has one of the choices of axes; bias and a batch axis may be 1, other axes are whole."""
    axes = next((c.split() for c in choices if len(c.split()) == len(shape)), None)
    if axes is None:
        raise ShapeError(f"{name} must have axes {' or '.join(map(repr, choices))}, got {shape}")
    for axis, size in zip(axes, shape, strict=True):
        if size != full[axis] and not (size == 1 and (name == "bias" or axis == "b")):
            whole = tuple(full[a] for a in axes)
            raise ShapeError(f"axis {axis}: {name} {shape} does not broadcast to {whole} '{' '.join(axes)}'")
