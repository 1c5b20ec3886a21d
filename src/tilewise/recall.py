"""What earlier calls have found out: their plans, and for calls of a few plain words everything that comes before a launch. A
training step makes the same call in every layer, and a small call must not spend its time on describing itself again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .mask import Mask
from .problem import Inputs
from .request import Request, Wire, drops

Plan = Any
"""A `backends.plan.Plan`, which this file passes on and never looks into but for its problem."""


@cache
def backends() -> Any:
    """What runs, imported when something does."""
    from . import backends

    return backends


_plans: dict[Any, Plan] = {}
"""Plans of calls without arrays, by everything that they depend on."""

_lent: list[tuple[Any, Plan, list[Any]]] = []
"""Plans of calls with arrays, the latest first: what else they depend on, the plan, and the arrays as `_kept` keeps them."""

MOST_PLANS, MOST_LENT = 4096, 16


def plan_of(x: Inputs[Tensor], wire: Wire) -> Plan:
    """How a call runs. What a caller may repeat, shapes, options and arrays of the same content, is planned once, as offsets
    are from layer to layer; a point test may answer differently each time. A seed changes no plan, only its problem."""
    seeds = 1 if drops(wire.text) else 0
    arrays = wire.arrays[: len(wire.arrays) - seeds]
    shapes = [None if t is None else (t.shape, t.dtype) for t in (x.q, x.k, x.v, x.bias, x.alibi, x.sink)]
    key: Any = (wire.text, *wire.ints, *wire.floats, x.q.device, *shapes)
    unknown = "where" in wire.text or any([a.is_inference() and not a.is_cpu for a in arrays])  # noqa: C419
    plan = None if unknown else _lent_plan(key, arrays) if arrays else _plans.get(key)
    if plan is not None and not seeds:
        return plan
    if plan is None and not unknown:  # the plan's own: an owner may change an array
        arrays = [a.clone() if a.is_cpu else a for a in arrays]
        wire = wire._replace(arrays=[*arrays, *wire.arrays[len(arrays) :]])
    request = Request.decode(wire)
    if plan is None:
        plan = backends().make_plan(request.problem(x), request.backend)
        if not unknown:
            _keep(key, plan, arrays)
    return replace(plan, problem=replace(plan.problem, dropout=request.dropout())) if seeds else plan


def _lent_plan(key: Any, arrays: Sequence[Tensor]) -> Plan | None:
    """The plan of an earlier call with these arrays, which becomes the latest."""
    for at, entry in enumerate(_lent):
        known, plan, kept = entry
        if known == key and all([_same(a, b) for a, b in zip(kept, arrays, strict=True)]):  # noqa: C419
            if at:
                _lent[:] = [entry, *[other for other in _lent if other is not entry]]
            return plan
    return None


def _kept(array: Tensor) -> Any:
    """What tells an array again: its content where the host holds it; on a device, where nobody looks, a weak reference and
    how often torch has seen it change."""
    return array if array.is_cpu else (weakref.ref(array), array._version)


def _same(kept: Any, array: Tensor) -> bool:
    """Whether an array holds what a kept one did."""
    if isinstance(kept, Tensor):
        return array.is_cpu and kept.dtype == array.dtype and torch.equal(kept, array)
    return not array.is_cpu and kept[0]() is array and kept[1] == array._version


def _keep(key: Any, plan: Plan, arrays: Sequence[Tensor]) -> None:
    """Keep a plan under what it depends on."""
    if arrays:
        _lent[:] = [(key, plan, [_kept(a) for a in arrays]), *_lent[: MOST_LENT - 1]]
    else:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = plan


class Words(NamedTuple):
    """A call without any array but q, k and v, without positions of its own, dropout or packing, in its caller's words."""

    mask: Mask | None
    scale: float | None
    softcap: float | None
    backend: str | None
    deterministic: bool


class Known(NamedTuple):
    """What a call has come to before it is launched."""

    plan: Plan
    wire: Wire


_known: dict[Any, Known] = {}
"""Calls of plain words by these, and by shapes, dtypes and devices."""

PLAIN = frozenset((type(None), bool, int, float, str))


def recall(q: Tensor, k: Tensor, v: Tensor, words: Words) -> Known | None:
    """What an earlier call of these words came to; None where there was none. Anything may be asked for: what is not a plain
    call is not among those that are kept."""
    try:
        known = _known.get(_key(q, k, v, words))
        return known if known is None or PLAIN.issuperset(map(type, words[1:])) else None  # 1 is equal to what is no number
    except (AttributeError, TypeError):  # these are no tensors, or words that nobody can look up
        return None


def remember(x: Inputs[Tensor], request: Request, wire: Wire, plan: Plan) -> None:
    """Keep what a call has come to, if it is one of plain words."""
    o = request.options
    words = Words(o.mask, o.scale, o.softcap, request.backend, o.deterministic)
    if wire.arrays or request.extras or o.positions is not None or any([type(word) not in PLAIN for word in words[1:]]):  # noqa: C419
        return
    key = _key(x.q, x.k, x.v, words)
    if key is not None:
        if len(_known) >= MOST_PLANS:
            _known.clear()
        _known[key] = Known(plan, wire)


def _key(q: Tensor, k: Tensor, v: Tensor, words: Words) -> Any:
    """All that a plain call depends on; None where the mask holds arrays or functions, or is none."""
    mask, said = words.mask, None
    if mask is not None:
        if not isinstance(mask, Mask):
            return None
        text, ints, arrays = mask.encode()
        if arrays or "where" in text:
            return None
        said = (text, *ints)
    return said, words[1:], q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
