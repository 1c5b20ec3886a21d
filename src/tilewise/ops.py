"""The torch contract: operators with schemas, shapes without values, and derivatives of any order. Whatever runs is chosen
when an operator executes, so this file imports no backend. An ordinary eager call takes a shorter way to the same launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd import forward_ad
from torch.nn import Parameter

from ._errors import OptionError
from .problem import NAMES, Inputs, Partial, Problem
from .recall import Plan, Words, backends, plan_of, recall, remember
from .request import Request, Wire, extras_of, named_inputs, on_host


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse for inputs of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes an operator `tilewise::name` of a function, its schema taken from its types. As `torch.library.custom_op` does, but
    without the wrappers that this puts around every call."""

    def make(function: Callable[..., Any]) -> Any:
        library.define(f"tilewise::{name}", library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)
        library.impl(f"tilewise::{name}", "default", function)
        return getattr(torch.ops.tilewise, name).default

    return make


@operator("attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    arrays: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    text: str,
) -> tuple[Tensor, Tensor]:
    """o "b n h e" and lse "b h n". `extras` are bias, alibi and sink where given; the rest is a `request.Wire`."""
    wire = Wire(list(arrays), list(ints), list(floats), text)
    x = named_inputs(text, q, k, v, extras)
    return tuple(launch(plan_of(x, wire), x))


@library.register_fake("tilewise::attention")
def _(q, k, v, extras, arrays, ints, floats, text):
    request = Request.decode(Wire(arrays, ints, floats, text))
    problem = Problem.describe(request.inputs(q, k, v, extras), request.options)
    wide = lse_dtype(q.dtype)
    return q.new_empty(problem.b, problem.n, problem.h, problem.e), q.new_empty(problem.b, problem.h, problem.n, dtype=wide)


@operator("attention_backward")
def attention_backward(
    grads: Sequence[Tensor],
    saved: Sequence[Tensor],
    arrays: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    text: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The gradients that `needs` asks for, of q, k, v and the extras in that order. grads: do, dlse; saved: o, lse, q, k, v,
    extras."""
    wire = Wire(list(arrays), list(ints), list(floats), text)
    o, lse, q, k, v, *extras = saved
    x = named_inputs(text, q, k, v, extras)
    wanted = _wanted(extras_of(text), needs)
    out = launch_backward(plan_of(x, wire), x, Partial(o, lse), Partial(*grads), wanted)
    return [getattr(out, name) for name in wanted]


@library.register_fake("tilewise::attention_backward")
def _(grads, saved, arrays, ints, floats, text, needs):
    return [x.new_empty(x.shape) for x, wanted in zip(saved[2:], needs, strict=True) if wanted]


def run(x: Inputs[Tensor], request: Request) -> Partial:
    """o and lse of a call: launched at once where nothing but autograd looks on, and as the operator where something does;
    inside torch.func transforms and forward-mode differentiation the same fold in ordinary operations, which every transform
    can look into."""
    compiling = torch.compiler.is_compiling()
    if compiling and forward_ad._current_level >= 0:
        raise OptionError(
            "forward-mode differentiation inside torch.compile is not supported: differentiate the compiled function"
        )
    wire = (request.tabulated(x) if compiling else request).encode()
    if not compiling:
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            return _differentiable(x, wire)
        if _plain(x.q, x.k, x.v, x.bias, x.alibi, x.sink):
            plan = plan_of(x, wire)
            remember(x, request, wire, plan)
            return eager(plan, wire, x)
    return Partial(*attention(x.q, x.k, x.v, [getattr(x, name) for name in request.extras], *wire))


def _plain(*tensors: Tensor | None) -> bool:
    """Whether these are tensors as such, and no mode or tracer wants to see operators."""
    for t in tensors:
        if t is not None and (type(t) not in (Tensor, Parameter) or t.is_neg()):
            return False
    return not _watched()


def _watched() -> bool:
    """Whether a transform, a mode or a tracer wants to see operators."""
    c = torch._C
    return c._are_functorch_transforms_active() or c._len_torch_dispatch_stack() > 0 or c._get_tracing_state() is not None


def launch(plan: Plan, x: Inputs[Tensor]) -> Partial:
    """Run a plan."""
    if not torch.is_autocast_enabled(x.q.device.type):
        return backends().forward(plan, x)
    with torch.autocast(x.q.device.type, enabled=False):
        return backends().forward(plan, x)


def launch_onto(plan: Plan, x: Inputs[Tensor], onto: Partial) -> Partial | None:
    """Run a plan whose result is merged with `onto` on the way; None: its backend cannot."""
    with torch.autocast(x.q.device.type, enabled=False):
        return backends().forward_onto(plan, x, onto)


def launch_backward(plan: Plan, x: Inputs[Tensor], saved: Partial, grads: Partial, needs: Sequence[str]) -> Inputs[Tensor]:
    """Run a plan's backward pass."""
    if not torch.is_autocast_enabled(x.q.device.type):
        return backends().backward(plan, x, saved, grads, needs)
    with torch.autocast(x.q.device.type, enabled=False):
        return backends().backward(plan, x, saved, grads, needs)


def again(q: Tensor, k: Tensor, v: Tensor, words: Words) -> Partial | None:
    """A call that was made before with tensors of the same shapes, by the plan that it had then; None where it was not, or
    somebody looks on. Nothing is checked or described anew: what passed once passes."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return None
    known = recall(q, k, v, words)
    if known is None or torch.is_autocast_enabled("cpu" if q.is_cpu else q.device.type) or not _plain(q, k, v):
        return None
    x = Inputs(q, k, v)
    return eager(*known, x) if torch.is_grad_enabled() else backends().forward(known.plan, x)


def eager(plan: Plan, wire: Wire, x: Inputs[Tensor]) -> Partial:
    """A call that only autograd looks at."""
    tensors = (x.q, x.k, x.v, x.bias, x.alibi, x.sink)
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors]):  # noqa: C419
        return Partial(*_Eager.apply(plan, wire, *tensors))  # type: ignore[misc]
    return launch(plan, x)


class _Eager(torch.autograd.Function):
    """The operator's derivative without its machinery; derivatives of the derivative go through the operator's own."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, wire: Wire, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        o, lse = launch(plan, Inputs(*tensors))  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(o, lse, *tensors, *wire.arrays)
        ctx.plan, ctx.wire = plan, wire
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        o, lse, *tensors = ctx.saved_tensors[: 2 + len(NAMES)]
        do = torch.zeros_like(o) if do is None else do.resolve_neg()
        dlse = None if dlse is None else dlse.resolve_neg()
        present = [name for name, t in zip(NAMES, tensors, strict=True) if t is not None]
        needs = [need for need, t in zip(ctx.needs_input_grad[2:], tensors, strict=True) if t is not None]
        if torch.is_grad_enabled() or _watched():
            dlse = torch.zeros_like(lse) if dlse is None else dlse
            given = [t for t in tensors if t is not None]
            found = iter(attention_backward([do, dlse], [o, lse, *given], *ctx.wire, needs))
        else:
            wanted = [name for name, need in zip(present, needs, strict=True) if need]
            x = Inputs(*tensors)
            out = launch_backward(ctx.plan, x, Partial(o, lse), Partial(do, dlse), wanted)  # type: ignore[arg-type]
            found = iter([getattr(out, name) for name in wanted])
        asked = [t is not None and need for t, need in zip(tensors, ctx.needs_input_grad[2:], strict=True)]
        return None, None, *[next(found) if need else None for need in asked]


def _differentiable(x: Inputs[Tensor], wire: Wire) -> Partial:
    """Attention as ordinary operations: what derivatives beyond the first are taken of."""
    request = Request.decode(wire._replace(arrays=[on_host(a) for a in wire.arrays]))
    plan = backends().make_plan(request.problem(x), request.backend)
    with torch.autocast(x.q.device.type, enabled=False):
        return backends().differentiable(plan, x, named=request.backend is not None)


def _wanted(extras: Sequence[str], needs: Sequence[bool]) -> list[str]:
    return [name for name, need in zip((*NAMES[:3], *extras), needs, strict=True) if need]


def _nothing(arguments: Sequence[Any]) -> list[Any]:
    """No gradient, in the structure that torch wants: an empty list for an empty list."""
    return [[] if isinstance(a, list | tuple) and not a else None for a in arguments]


def _split(tensors: Sequence[Tensor], at: int) -> tuple[list[Tensor], list[Tensor]]:
    return list(tensors[:at]), list(tensors[at:])


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, extras, arrays, *rest = inputs
    ctx.save_for_backward(*output, q, k, v, *extras, *arrays)
    ctx.extras, ctx.wire, ctx.extras_needed = len(extras), rest, [t.requires_grad for t in extras]
    ctx.request = Request.decode(Wire(list(arrays), *rest))  # holds a Where function until backward has run


def _backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple:
    saved, arrays = _split(ctx.saved_tensors, 5 + ctx.extras)
    needs = [*ctx.needs_input_grad[:3], *ctx.extras_needed]
    found = iter(attention_backward([do, dlse], saved, arrays, *ctx.wire, needs))
    dq, dk, dv, *extras = [next(found) if need else None for need in needs]
    return dq, dk, dv, extras, [None] * len(arrays), *_nothing(ctx.wire)


def _save_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    grads, saved, arrays, *rest = inputs
    ctx.save_for_backward(*grads, *saved[2:], *arrays)
    ctx.extras, (*ctx.wire, ctx.needs) = len(saved) - 5, rest
    ctx.request = Request.decode(Wire(list(arrays), *ctx.wire))


def _double_backward(ctx: Any, grads: list[Tensor]) -> tuple:
    """The derivative of the backward pass, as that of the gradient of the differentiable fold. o and lse are functions of
    the inputs here, so nothing flows through the saved ones."""
    tensors, arrays = _split(ctx.saved_tensors, 5 + ctx.extras)
    with torch.enable_grad():
        # views are nodes of their own: a do that was computed from q must not count as a path from q
        do, dlse, *xs = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]
        x = ctx.request.inputs(*xs[:3], xs[3:])
        partial = _differentiable(x, Wire(arrays, *ctx.wire))
        asked = [t for t, need in zip(xs, ctx.needs, strict=True) if need]
        first = _gradients(list(partial), asked, [do, dlse])
        second = _gradients(first, [do, dlse, *xs], grads)
    return [second[0], second[1]], [None, None, *second[2:]], [None] * len(arrays), *_nothing([*ctx.wire, ctx.needs])


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """torch.autograd.grad, with zeros where nothing depends on anything: rows without keys, tensors without rows."""
    live = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
    if not live:
        return [torch.zeros_like(t) for t in inputs]
    o, g = zip(*live, strict=True)
    return list(torch.autograd.grad(o, inputs, g, create_graph=True, materialize_grads=True))


library.register_autograd("tilewise::attention", _backward, setup_context=_save)
library.register_autograd("tilewise::attention_backward", _double_backward, setup_context=_save_backward)


def _each(info: Any, in_dims: tuple, *args: Any) -> tuple[list[Tensor], list[int]]:
    """torch.func.vmap over the backward pass of a graph, one entry after the other: exact, as fast as a loop."""

    def pick(x: Any, dim: Any, entry: int) -> Any:
        if isinstance(x, list | tuple):
            dims = dim if isinstance(dim, list | tuple) else [dim] * len(x)
            return [pick(one, d, entry) for one, d in zip(x, dims, strict=True)]
        return x if dim is None else x.select(dim, entry)

    entries = [[pick(x, dim, entry) for x, dim in zip(args, in_dims, strict=True)] for entry in range(info.batch_size)]
    stacked = [torch.stack(parts) for parts in zip(*(attention_backward(*entry) for entry in entries), strict=True)]
    return stacked, [0] * len(stacked)


library.register_vmap("tilewise::attention_backward", _each)
