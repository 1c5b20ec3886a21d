"""One call of attention over many ranks: what was asked, what the ranks have agreed on, and the plans that follow. Plans are
kept, for a model asks the same of every layer."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import OptionError
from ..api import _seed
from ..backends import make_plan as make_block_plan
from ..backends import total
from ..dropout import Dropout
from ..mask import Mask, Where
from ..mask.base import Both
from ..problem import Inputs, Options, Partial, Problem
from .agree import OWN, agree, compare, fingerprint, propose
from .choose import choose, method_named
from .execute import Message, backward_given, backward_results, forward_given, forward_results, run
from .kernel import Kernel
from .layout import Named, lay_out_as_held, name_layout, private
from .owners import Owners
from .program import Method, Plan, Post
from .schedule import make_plan
from .transport import Handle, Held, Transport, begun, run_steps

PASSING = ("seed", "gradients")
"""Terms that a setting does not depend on."""

PLAIN = (NoneType, int, float, str, torch.dtype)
"""Types whose equal values mean the same."""

MOST_SETTINGS = 64
"""So many calls of different kinds are remembered."""


@dataclass(frozen=True)
class Asked:
    """What a caller says beside tensors. `layout` and `method` by name or as values; `wire`: the dtype in which gradients of
    keys and values travel, None for the one that they are kept in."""

    mask: Mask | None
    layout: Named | tuple[Owners, Owners]
    method: str | Method = "auto"
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int | Tensor | None = None
    backend: str | None = None
    wire: torch.dtype | None = None


class Shards(NamedTuple):
    """A rank's tensors: q "b n h d", k "b s g d", v "b s g e", and alibi "h" or "b h" and sink "h" of the whole model."""

    q: Tensor
    k: Tensor
    v: Tensor
    alibi: Tensor | None = None
    sink: Tensor | None = None


@dataclass(frozen=True)
class Setting:
    """What follows from an agreement, and holds for every call like it: who owns what, how it moves, and blocks to run."""

    q: Owners
    kv: Owners
    method: Method
    wire: dict[str, int]
    kernel: Kernel
    forward: Plan

    @cached_property
    def backward(self) -> Plan:
        return make_plan(self.kernel.problem, self.q, self.kv, self.method, backward=True, wire=self.wire)


@dataclass(frozen=True)
class Call:
    """A setting with this call's own seed, slopes and sinks, and who carries its messages. `confirm`: where the setting is a
    guess, waits for the ranks to agree and gives the call that they have agreed on."""

    setting: Setting
    kernel: Kernel
    transport: Transport
    deadline_s: float
    confirm: Callable[[], Call] | None = None

    def forward(self, x: Shards) -> tuple[Call, Partial]:
        """The call that was agreed on, and o and lse of this rank's rows. A guess begins with what concerns this rank alone and
        sends nothing; where it was wrong that is thrown away."""
        if self.confirm is None:
            return self, run_steps(self._forward(x, self.transport.post), self.transport, self.deadline_s)
        held = Held(self.transport)
        with closing(begun(self._forward(x, held.post), self.transport)) as steps:
            agreed = self.confirm()
            if agreed.setting is self.setting:
                held.release()
                return agreed, run_steps(steps, self.transport, self.deadline_s)
        return agreed.forward(x)

    def backward(self, x: Shards, saved: Partial, grads: Partial) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's rows, and total = delta − dlse "b h n" of them."""
        self.transport.begin(self.deadline_s)
        return run_steps(self._backward(x, saved, grads), self.transport, self.deadline_s)

    def _forward(self, x: Shards, post: Callable[..., Handle]) -> Generator[Handle, None, Partial]:
        plan, rank = self.setting.forward, self.transport.rank
        given = forward_given(plan, rank, x.q, x.k, x.v)
        return forward_results((yield from run(plan, rank, given, self.kernel, partial(_post, post))))

    def _backward(self, x: Shards, saved: Partial, grads: Partial) -> Generator[Handle, None, Any]:
        plan, rank = self.setting.backward, self.transport.rank
        total = delta(saved.o, grads.o, grads.lse)
        given = backward_given(plan, rank, (x.q, x.k, x.v), grads.o, saved.lse, total)
        found = yield from run(plan, rank, given, self.kernel, partial(_post, self.transport.post))
        return *backward_results(plan, found, x.q.dtype), total


def delta(o: Tensor, do: Tensor, dlse: Tensor) -> Tensor:
    """rowsum(do∘o) − dlse "b h n" in the dtype of dlse."""
    found = total(o, do, dlse)
    if found is not None:
        return found
    return torch.addcmul(dlse.new_zeros(1), do, o).sum(-1).transpose(1, 2) - dlse  # without copies of do and o in that dtype


def _post(post: Callable[..., Handle], op: Post, sends: list[Message], recvs: list[Message]) -> Handle:
    return post(op.step, sends, recvs)


def settle(prepare: Callable[[], tuple[Shards, Asked]], transport: Transport, deadline_s: float) -> tuple[Call, Shards]:
    """The call that all ranks make and this one's tensors, as `prepare` gives them, once they have compared what they were
    asked. The same error everywhere, before any data moves, where they differ or one of them was asked what it cannot do. Where
    this rank has said the same before, the call is a guess, which its forward confirms."""
    error, terms = None, {}
    x: Any = None
    asked: Any = None
    try:
        x, asked = prepare()
        check(x, asked)
        asked = in_plain_numbers(asked)
        terms = terms_of(x, asked)
    except Exception as found:
        error = found
    transport.begin(deadline_s)
    said = transport.offer(propose(terms, error), deadline_s)
    mine = None if error else _summary(terms)
    drops = error is None and asked.dropout > 0
    drawn = drops and asked.seed is None

    def made(setting: Setting, draw: int, confirm: Callable[[], Call] | None = None) -> Call:
        drop = Dropout(asked.dropout, draw if asked.seed is None else asked.seed) if asked.dropout > 0 else None
        return Call(setting, setting.kernel.with_arrays(x.alibi, x.sink, drop), transport, deadline_s, confirm)

    def confirm() -> Call:
        told = said()
        every = tuple(x.numpy().tobytes() for x in told)
        setting, draw = transport.agreed.get(every) or (None, 0)  # whoever was of one mind before is again
        if setting is None:
            theirs = compare(terms, told, error)
            counts = [tuple(found[OWN + "rows of " + side] for found in theirs) for side in ("q", "k")]
            setting = _setting(x, asked, (counts, terms), (transport, partial(transport.gather, deadline_s=deadline_s)))
            draw = theirs[0][OWN + "draw"]
        if not drawn and not _asks_functions(asked.mask):
            if not drops:  # or every seed would be kept
                _keep(transport.agreed, every, (setting, draw))
            if transport.ahead:
                _keep(transport.guesses, mine, setting)
        return made(setting, draw)

    guess = None if error or drawn else transport.guesses.get(mine)
    return (confirm() if guess is None else made(guess, 0, confirm)), x


def _summary(terms: dict[str, Any]) -> tuple[Any, ...]:
    """What of a rank's terms a setting depends on, its own rows last."""
    words = {name: value for name, value in terms.items() if not name.startswith(OWN) and name not in PASSING}
    return repr(words), terms[OWN + "rows of q"], terms[OWN + "rows of k"]


def _keep(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Remember something, and in its place forget what came first where there is much."""
    if key not in table and len(table) >= MOST_SETTINGS:
        del table[next(iter(table))]
    table[key] = value


_passed: dict[Any, None] = {}
"""Arguments in which `check` has found nothing, by all that it looks at."""


def check(x: Shards, asked: Asked) -> None:
    """Raise where this rank's own arguments make no sense, or no backend takes them."""
    key = _looks(x, asked)
    if key is not None and key in _passed:
        return
    _check(x, asked)
    if key is not None:
        _keep(_passed, key, None)


def _looks(x: Shards, asked: Asked) -> Any:
    """What `check` looks at, where that is all plain."""
    said = asked.scale, asked.softcap, asked.dropout, asked.backend, asked.wire
    if not isinstance(asked.layout, Named) or any(type(one) not in PLAIN for one in said):
        return None
    return *[None if t is None else (t.shape, t.dtype, t.device, t.requires_grad) for t in x], type(asked.mask), *said


def _check(x: Shards, asked: Asked) -> None:
    options = Options(asked.mask, asked.scale, asked.softcap)
    problem = Problem.describe(_inputs(x), replace(options, mask=None))
    make_block_plan(replace(problem, wide=True, score=replace(problem.score, sink=False)), asked.backend)
    Dropout(asked.dropout, 0)
    if not isinstance(asked.layout, Named) and not (
        isinstance(asked.layout, tuple) and [type(side) for side in asked.layout] == [Owners, Owners]
    ):
        raise OptionError(f"layout must be a name or the Owners of q's and of k's rows, got {asked.layout!r}")
    if x.alibi is not None and x.alibi.requires_grad:
        raise OptionError("alibi: its slopes get no gradient over many ranks: detach them, or learn them on one")
    if asked.wire is not None and asked.wire is not torch.bfloat16:
        raise OptionError(f"wire: gradients travel as they are kept (None) or as torch.bfloat16, got {asked.wire!r}")


def in_plain_numbers(asked: Asked) -> Asked:
    """What was asked, once it is checked, in Python's own numbers, which NumPy's and torch's stand for. A seed where nothing is
    dropped says nothing, as on one device."""
    scale, softcap = (None if x is None else float(x) for x in (asked.scale, asked.softcap))
    seed = None if asked.seed is None or not asked.dropout else int(_seed(asked.seed))
    return replace(asked, scale=scale, softcap=softcap, dropout=float(asked.dropout), seed=seed)


def terms_of(x: Shards, asked: Asked) -> dict[str, Any]:
    """What all ranks must say alike, and how many rows this one holds."""
    (b, n, h, d), (_, s, g, e) = x.q.shape, x.v.shape
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
    return {
        **{f"axis {axis}": size for axis, size in zip("bhgde", (b, h, g, d, e), strict=True)},
        "dtype": str(x.q.dtype).removeprefix("torch."),
        "mask": fingerprint(asked.mask),
        "layout": _layout_term(asked.layout),
        "method": str(asked.method),
        **{name: getattr(asked, name) for name in ("scale", "softcap", "dropout", "seed", "backend")},
        "wire": None if asked.wire is None else str(asked.wire).removeprefix("torch."),
        **{name: None if t is None else list(t.shape) for name, t in (("alibi", x.alibi), ("sink", x.sink))},
        "gradients": learns,
        OWN + "rows of q": n,
        OWN + "rows of k": s,
        OWN + "draw": int(torch.randint(2**63 - 1, ())) if asked.dropout > 0 and asked.seed is None else 0,
    }


def _layout_term(layout: Named | tuple[Owners, Owners]) -> str:
    if not isinstance(layout, Named):
        return " and ".join(", ".join(str(shard.ranges) for shard in side.shards) for side in layout)
    name = name_layout(*layout)
    return f"balanced by {fingerprint(layout.mask)}" if name == "balanced" else name


def _setting(x: Shards, asked: Asked, agreed: tuple[list, dict], by: tuple[Transport, Callable]) -> Setting:
    """The setting of a call, kept under all that it depends on. All ranks of a group have settled the same calls, so all know
    it or none does. One with a function of positions is made anew, for that may answer differently each time. Arrays of its
    mask are its own: what a caller writes into an array later is no part of it. Raises where no plan can be made."""
    (counts, terms), (transport, gather) = agreed, by
    key = (_summary(terms)[0], *counts)
    if key in transport.settings:
        return transport.settings[key]
    layout = asked.layout
    layout = Named(layout.name, private(layout.mask)) if isinstance(layout, Named) else layout
    asked = replace(asked, mask=private(asked.mask), layout=layout)
    sides, problem = _share(x, asked, counts)
    method = settle_method(asked, problem, transport, gather)
    wire = {} if asked.wire is None else {"dkv": asked.wire.itemsize}
    kernel = Kernel(problem, x.alibi, x.sink, asked.backend)
    made = Setting(*sides, method, wire, kernel, make_plan(problem, *sides, method))
    if not _asks_functions(asked.mask):
        _keep(transport.settings, key, made)
    return made


def _share(x: Shards, asked: Asked, counts: list[tuple[int, ...]]) -> tuple[tuple[Owners, Owners], Problem]:
    """Who owns which rows, and the problem of all of them."""
    b, h, g = x.q.shape[0], x.q.shape[2], x.k.shape[2]
    if isinstance(asked.layout, Named):
        of_q, of_kv = (lay_out_as_held(asked.layout, rows, side, b) for side, rows in zip("qk", counts, strict=True))
    else:
        of_q, of_kv = asked.layout
        for side, rows, owner in zip("qk", counts, asked.layout, strict=True):
            if owner.counts != list(rows):
                raise OptionError(f"layout: owners of {side} share {owner.counts} rows, the ranks hold {list(rows)}")
    sizes = ((b, of_q.length, h), (b, of_kv.length, g), (b, of_kv.length, g))
    nothing = x.q.new_empty(1)  # tensors of the whole size that take no memory
    q, k, v = (nothing.expand(*size, t.shape[3]) for size, t in zip(sizes, x[:3], strict=True))
    problem = Problem.describe(_inputs(Shards(q, k, v, x.alibi, x.sink)), Options(asked.mask, asked.scale, asked.softcap))
    problem.check_values()
    return (of_q, of_kv), problem


def settle_method(asked: Asked, problem: Problem, transport: Transport, gather: Callable) -> Method:
    """How keys move. "auto": what the first rank forecasts to be fastest for the layout, by `choose`, and tells the others:
    what it found for one batch of documents it takes for the next of as many rows. Owners given one by one, of which a
    forecast knows nothing, send keys straight to whoever needs them. "heads": rows are exchanged for heads, no keys move.
    Queries that every rank holds leave keys where they are: a tree of partial results."""
    if isinstance(asked.method, Method):
        return asked.method
    if asked.method != "auto":
        return Method("direct", heads=transport.world) if asked.method == "heads" else Method(asked.method)
    if asked.layout.name == "replicated" if isinstance(asked.layout, Named) else asked.layout[0].replicated:
        return Method("tree")
    if transport.world == 1 or not problem.n or not problem.s or not isinstance(asked.layout, Named):
        return Method("direct")
    name, p = name_layout(*asked.layout), problem
    key = (name, p.mask.encode().text, p.b, p.n, p.s, p.h, p.g, p.d, p.e, p.dtype)
    error, text = None, ""
    try:
        if transport.rank == 0 and key not in transport.methods:
            transport.methods[key] = choose(problem, transport.world, layout=name).method
        text = str(transport.methods.get(key, ""))
    except Exception as found:
        error = found
    return method_named(agree({OWN + "method": text}, gather, error)[0][OWN + "method"])


def _inputs(x: Shards) -> Inputs[Tensor]:
    return Inputs(x.q, x.k, x.v, alibi=x.alibi, sink=x.sink)


def _asks_functions(mask: Mask | None) -> bool:
    parts = mask.parts if isinstance(mask, Both) else (mask,)
    return any(isinstance(part, Where) and callable(part.test) for part in parts)
