"""A call's options as what an operator's schema can carry, text, integers, numbers and tensors, and back again. Integers stay
symbolic under torch.compile, so lengths never end up in the text and a new length needs no new graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._errors import DtypeError, OptionError
from ._typing import Array
from .arrays import is_number
from .dropout import Dropout
from .mask import Full, Mask, Where, parse
from .mask.base import Both
from .positions import Positions
from .problem import NAMES, Inputs, Options, Problem
from .ragged import Ragged

EXTRAS = NAMES[3:]


class Wire(NamedTuple):
    """An encoded request. `arrays` hold no gradients; `text` is "mask|word word ..."."""

    arrays: list[Tensor]
    ints: list[int]
    floats: list[float]
    text: str


@dataclass(frozen=True)
class Request:
    """One call's choices: the problem's options, a seed still in its tensor, which extras come along, and the backend."""

    options: Options
    rate: float = 0.0
    seed: Tensor | None = None
    extras: tuple[str, ...] = ()
    backend: str | None = None

    def encode(self) -> Wire:
        """Everything but the inputs. Arrays of masks become tensors; numbers keep their place, so `decode` finds them."""
        o = self.options
        text, ints, arrays = (Full() if o.mask is None else o.mask).encode()
        floats, words = [], list(self.extras)
        for word, number in (("scale", o.scale), ("softcap", o.softcap)):
            if number is not None:
                words.append(word)
                floats.append(float(number))
        if o.positions is not None:
            q, k = o.positions
            words += [_encode_positions("q", q, ints, arrays), _encode_positions("k", k, ints, arrays)]
        if o.ragged is not None:
            words.append("ragged")
            arrays = [*arrays, o.ragged.q_offsets, o.ragged.kv_offsets]
        if self.seed is not None:
            words.append("dropout")
            floats.append(self.rate)
            arrays = [*arrays, self.seed]
        words += ["deterministic"] if o.deterministic else []
        words += [f"backend={self.backend}"] if self.backend is not None else []
        return Wire([_tensor(a) for a in arrays], ints, floats, text + "|" + " ".join(words))

    @classmethod
    def decode(cls, wire: Wire) -> Request:
        """The inverse of `encode`."""
        text, _, rest = wire.text.partition("|")
        words = rest.split()
        ints, arrays, floats = iter(wire.ints), iter(wire.arrays), iter(wire.floats)
        mask = parse(text, ints, arrays)  # takes its own numbers first: the rest follow in the order of the words
        found: dict[str, object] = {w: next(floats) for w in words if w in ("scale", "softcap")}
        sides = [_decode_positions(w, ints, arrays) for w in words if w.startswith(("q:", "k:"))]
        ragged = Ragged(next(arrays), next(arrays)) if "ragged" in words else None
        rate, seed = (next(floats), next(arrays)) if "dropout" in words else (0.0, None)
        options = Options(
            mask,
            found.get("scale"),  # type: ignore[arg-type]
            found.get("softcap"),  # type: ignore[arg-type]
            positions=(sides[0], sides[1]) if sides else None,
            ragged=ragged,
            deterministic="deterministic" in words,
        )
        backend = next((w.partition("=")[2] for w in words if w.startswith("backend=")), None)
        return cls(options, rate, seed, extras_of(wire.text), backend)

    def tabulated(self, x: Inputs[Tensor]) -> Request:
        """This request with point tests as boolean tables: a graph can hold a tensor but no Python function. n·s bytes."""
        mask = _with_tests(self.options.mask, lambda where: _tabulate(where, x, self.options))
        return replace(self, options=replace(self.options, mask=mask))

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, extras: list[Tensor]) -> Inputs[Tensor]:
        """The inputs under their names."""
        return _under_names(self.extras, q, k, v, extras)

    def dropout(self) -> Dropout | None:
        """The pattern. A seed on the host is read; one on a device stays there, for reading it would wait."""
        if self.seed is None:
            return None
        return Dropout(self.rate, int(on_host(self.seed)) if _lies_on_host(self.seed) else self.seed)

    def problem(self, x: Inputs[Tensor]) -> Problem:
        """The problem. Looks at values, so it needs real tensors; but not at those that a device holds, for that would wait."""
        mask = _with_tests(self.options.mask, lambda where: _on_device(where, x.q))
        problem = Problem.describe(x, replace(self.options, mask=mask, dropout=self.dropout()))
        if all(_lies_on_host(a) for a in self.encode().arrays):
            problem.check_values()
        return problem


def extras_of(text: str) -> tuple[str, ...]:
    """The extras that a wire's text speaks of."""
    words = text.partition("|")[2].split()
    return tuple([word for word in words if word in EXTRAS])


def named_inputs(text: str, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor]) -> Inputs[Tensor]:
    """The inputs that a wire's text speaks of, under their names."""
    return _under_names(extras_of(text), q, k, v, extras)


def _under_names(names: Sequence[str], q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor]) -> Inputs[Tensor]:
    return Inputs(q, k, v, **dict(zip(names, extras, strict=True)))


def drops(text: str) -> bool:
    """Whether a wire's text speaks of dropout."""
    return "dropout" in text.partition("|")[2].split()


def _tensor(array: Array) -> Tensor:
    """A tensor as it is; anything else copied, so that whoever changes it later does not change a gradient to come."""
    if not isinstance(array, Tensor):
        return torch.as_tensor(np.array(array), device="cpu")
    if array.device.type == "meta":
        raise DtypeError(
            f"an array of a mask, of positions or of offsets, {tuple(array.shape)}, is on the meta device: no values"
        )
    return array


def _lies_on_host(x: Array) -> bool:
    return not isinstance(x, Tensor) or x.device.type == "cpu"


def on_host(x: Array) -> np.ndarray:
    """An array on the host, out of whatever wrappers torch.func transforms have put around it."""
    if not isinstance(x, Tensor):
        return np.asarray(x)
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    with torch._C._DisableFuncTorch():
        while functorch.is_functorch_wrapped_tensor(x):
            if functorch.is_batchedtensor(x):
                raise OptionError(
                    "vmap over an array of a mask, over positions, offsets or a seed is not supported: loop instead"
                )
            x = functorch.get_unwrapped(x)
        return x.detach().cpu().numpy()


def _encode_positions(side: str, p: Positions, ints: list[int], arrays: list[Array]) -> str:
    """A word for one side's positions, its numbers added to the lists: "q:rows", "q:start" or "q:starts"."""
    if p.rows is not None:
        arrays.append(p.rows)
        return f"{side}:rows"
    ints.extend([p.count, p.step])
    if is_number(p.start):
        ints.append(p.start)
        return f"{side}:start"
    arrays.append(p.start)
    return f"{side}:starts"


def _decode_positions(word: str, ints: Iterator[int], arrays: Iterator[Tensor]) -> Positions:
    if word.endswith(":rows"):
        return Positions.of(next(arrays))
    count, step = next(ints), next(ints)
    return Positions(count, next(ints) if word.endswith(":start") else next(arrays), step)


def _with_tests(mask: Mask | None, change: Callable[[Where], Mask]) -> Mask | None:
    """`mask` with `change` made to each of its point tests that is a function."""
    if isinstance(mask, Both):
        return Both(tuple([_with_tests(part, change) or part for part in mask.parts]))
    return change(mask) if isinstance(mask, Where) and callable(mask.test) else mask


def _tabulate(where: Where, x: Inputs[Tensor], options: Options) -> Where:
    """A function of positions asked once for all pairs, in operations that torch.compile traces."""
    if options.ragged is not None or options.positions is not None:
        raise OptionError("Where(function) with packed sequences or positions= cannot be compiled; pass a table")
    (b, n, h, _), s, device = x.q.shape, x.k.shape[1], x.q.device
    start = 0 if options.mask is not None and options.mask.align == "top-left" else s - n
    true = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    axes = (torch.arange(size, device=device) for size in (b, h, n, s))
    b_, h_, i, j = (a.view([-1 if axis == at else 1 for axis in range(4)]) for at, a in enumerate(axes))
    return Where(true & torch.as_tensor(where.test(b_, h_, i + start, j), device=device).bool())


def _on_device(where: Where, like: Tensor) -> Where:
    """A function of positions asked in torch on the device of `like`, as its author expects, and answered in NumPy, as the
    tile question wants."""

    def ask(*positions: Array) -> Array:
        keep = where.test(*(torch.as_tensor(p).to(like.device) for p in positions))
        there = any(isinstance(p, Tensor) for p in positions)
        return on_host(keep.bool()) if isinstance(keep, Tensor) and not there else keep

    return replace(where, test=ask)
