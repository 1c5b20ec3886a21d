"""torch's `scaled_dot_product_attention` on tilewise, two ways. Every call inside a `with`, on any device, whoever makes it:

    with use_tilewise():
        model(x)

Or, on CUDA, inside torch's own dispatch, so that tilewise runs wherever torch chooses its flash kernel:

    register()
    torch.nn.attention.activate_flash_attention_impl("tilewise")
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from .._errors import DtypeError, OptionError, ShapeError
from ..api import attention
from ..mask import Causal, Full, Mask, Where
from ..ops import attention_backward, run
from ..problem import Inputs, Options
from ..ragged import Ragged
from ..request import Request
from .flash_attn import band, used_keys


def use_tilewise(backend: str | None = None) -> TorchFunctionMode:
    """While it is open, calls of `torch.nn.functional.scaled_dot_product_attention` run on tilewise, also from modules that
    imported the function earlier and from `torch.nn.MultiheadAttention` (which torch.compile cannot enter: it raises there).
    What does not call the function, such as MultiheadAttention with need_weights=True, is left alone. `backend`: as in
    `tilewise.attention`.

    >>> q = torch.randn(2, 4, 5, 16)
    >>> with use_tilewise():
    ...     torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).shape
    torch.Size([2, 4, 5, 16])
    """
    return _Routed(backend)


class _Routed(TorchFunctionMode):
    """Sees every function of torch before it runs. Torch shows it no calls that such a function makes in turn, so the one that
    makes ours, the body of `torch.nn.MultiheadAttention`, runs with ours under the name that it looks up."""

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.backend = backend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs, backend=self.backend)
        if func is functional.multi_head_attention_forward:
            if torch.compiler.is_compiling():
                raise OptionError("torch.compile takes torch.nn.MultiheadAttention as one piece, which tilewise cannot enter")
            ours = partial(scaled_dot_product_attention, backend=self.backend)
            names = vars(functional) | {"scaled_dot_product_attention": ours}
            func = FunctionType(func.__code__, names, func.__name__, func.__defaults__)
        return func(*args, **kwargs)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """torch's function of this name, by one call of `tilewise.attention`.

    Shapes   query "... h n d" · key "... g s d" · value "... g s e" → "... h n e"; two axes and more; axes before the last two
             broadcast, and with enable_gqa query head x reads key head x // (h // g)
    Masks    attn_mask broadcasts to "... h n s": a boolean one shows where True, a floating one is added and gets its gradient,
             a `CausalBias` is aligned as it says. is_causal is aligned top-left: the first query sits at the first key
    Dropout  whenever dropout_p > 0, as in torch; its pattern follows torch's generator
    Numerics a row that sees no key gives 0
    Errors   attn_mask together with is_causal, as in torch; nested tensors

    >>> q, k = torch.randn(5, 16), torch.randn(7, 16)
    >>> scaled_dot_product_attention(q, k, k, attn_mask=torch.randn(7)).shape
    torch.Size([5, 16])
    """
    if attn_mask is not None and is_causal:
        raise OptionError("attn_mask and is_causal=True do not go together: put the triangle into the mask")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested:
            raise DtypeError(f"{name} is a nested tensor: pack its sequences and call tilewise.attention_varlen")
        if x.dim() < 2:
            raise ShapeError(f"{name} must have the axes '... n d', got {tuple(x.shape)}")
    axes = max(x.dim() for x in (query, key, value))
    q, k, v = (x.reshape((1,) * (3 - x.dim()) + tuple(x.shape)) for x in (query, key, value))
    lead = _broadcast("the axes before 'h'", [x.shape[:-3] for x in (q, k, v)])
    (g,) = _broadcast("axis g: key and value heads", [x.shape[-3:-2] for x in (k, v)])
    h = q.shape[-3] if enable_gqa else _broadcast("axis h (enable_gqa=False)", [q.shape[-3:-2], (g,)])[0]
    (n, s), e = (q.shape[-2], k.shape[-2]), v.shape[-1]
    mask, bias = _mask(attn_mask, is_causal, (*lead, h, n, s))
    four = (_four(x, (*lead, heads)).transpose(1, 2) for x, heads in ((q, h), (k, g), (v, g)))
    o = attention(*four, mask=mask, bias=bias, scale=scale, dropout=dropout_p, backend=backend).transpose(1, 2)
    return o.reshape((*lead, h, n, e) if axes > 2 else (n, e))


def _broadcast(what: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that all of these broadcast to."""
    try:
        return tuple(torch.broadcast_shapes(*(tuple(shape) for shape in shapes)))
    except RuntimeError:
        raise ShapeError(f"{what} do not broadcast: {', '.join(str(tuple(shape)) for shape in shapes)}") from None


def _four(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """ "... heads rows d" as "b heads rows d", its axes before the last two grown to `lead`."""
    return x.expand(*lead, *x.shape[-2:]).reshape(math.prod(lead[:-1]), lead[-1], *x.shape[-2:])


def _mask(attn_mask: Tensor | None, is_causal: bool, shape: tuple[int, ...]) -> tuple[Mask, Tensor | None]:
    """What `attn_mask` and `is_causal` hide, and what they add, for scores of this shape "... h n s"."""
    if attn_mask is None:
        return Causal("top-left") if is_causal else Full(), None
    if isinstance(attn_mask, CausalBias):
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != shape[-2:]:
            have = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
            raise ShapeError(f"attn_mask, a CausalBias of {have}, does not fit the scores {shape} '... h n s'")
        return Causal("bottom-right" if attn_mask.variant == CausalVariant.LOWER_RIGHT else "top-left"), None
    if _broadcast("attn_mask and the scores '... h n s'", [attn_mask.shape, shape]) != shape:
        raise ShapeError(f"attn_mask {tuple(attn_mask.shape)} does not broadcast to the scores {shape} '... h n s'")
    table = attn_mask.reshape((1,) * (len(shape) - attn_mask.dim()) + tuple(attn_mask.shape))
    same = all(size == 1 for size in table.shape[:-3])  # for all entries: no need to grow it
    table = _four(table, (*((1,) if same else shape[:-3]), table.shape[-3]) if len(shape) > 3 else (1, table.shape[-3]))
    return (Where(table), None) if table.dtype == torch.bool else (Full(), table)


def register(name: str = "tilewise") -> None:
    """Let `torch.nn.attention.activate_flash_attention_impl(name)` put tilewise in the place of torch's flash kernel on CUDA;
    `restore_flash_attention_impl()` takes it out. Torch still decides which calls go there: half types without attn_mask.

    Errors   NotImplementedError on a torch without that registry
    """
    registry = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if registry is None:
        lacks = f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl"
        raise NotImplementedError(f"{lacks}: use `with tilewise.compat.sdpa.use_tilewise()` or a newer torch")
    registry(name, register_fn=Overrides)


class Overrides:
    """tilewise in the place of torch's flash kernels on CUDA, from its making until `remove`."""

    def __init__(self) -> None:
        library = torch.library.Library("aten", "IMPL", "CUDA")
        with warnings.catch_warnings():  # torch warns of what was asked for
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name, function in OPERATORS.items():
                if hasattr(torch.ops.aten, name):
                    library.impl(name, function, "CUDA")
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        self.library = None


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """aten::_flash_attention_forward: out and lse of "b n h d", or of packed "t h d" with offsets; the random state, whose
    first word is dropout's seed; two tensors that torch expects and nobody reads. Causal is bottom-right."""
    for refused, reason in (
        (return_debug_mask, "the weights are never formed, so there is no debug mask"),
        (block_table is not None, "tilewise has no paged cache"),
        (seqused_k is not None and cum_seq_k is None, "seqused_k needs packed sequences"),
    ):
        if refused:
            raise OptionError(f"tilewise in the place of torch's flash attention: {reason}")
    if cum_seq_k is not None:
        key, value, cum_seq_k = used_keys(key, value, cum_seq_k, None, seqused_k)
    state = torch.zeros(2, dtype=torch.int64)
    if dropout_p > 0:
        state[0] = torch.randint(2**63 - 1, ())
    state = state.to(query.device)
    mask = band(is_causal, (window_size_left, window_size_right))
    request = _request(mask, scale, (cum_seq_q, cum_seq_k), (dropout_p, state), alibi_slopes is not None)
    o, lse = run(Inputs(*_batched(cum_seq_q, query, key, value), alibi=alibi_slopes), request)
    o, lse = (o, lse) if cum_seq_q is None else (o[0], lse[0])
    unused, debug = query.new_zeros((), dtype=torch.uint64), query.new_empty(0)
    return _laid_out(o, query), lse, state.view(torch.uint64), unused, debug


def flash_forward_into(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: `flash_forward` with its output in `out`."""
    o, lse, *_ = flash_forward(*arguments, **options)
    out.copy_(o)
    return lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward: the gradients of query, key and value."""
    mask = band(is_causal, (window_size_left, window_size_right))
    wire = _request(mask, scale, (cum_seq_q, cum_seq_k), (dropout_p, rng_state.view(torch.int64)), False).encode()
    do, dlse, *saved = _batched(cum_seq_q, grad_out, torch.zeros_like(logsumexp), out, logsumexp, query, key, value)
    grads = attention_backward([do, dlse], saved, *wire, [True] * 3)
    grads = grads if cum_seq_q is None else [grad[0] for grad in grads]
    return tuple(_laid_out(grad, x) for grad, x in zip(grads, (query, key, value), strict=True))


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention: `flash_forward` of "b h n d", with the lengths and no offsets."""
    n, s = query.shape[2], key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    o, lse, *rest = flash_forward(q, k, v, None, None, n, s, dropout_p, is_causal, return_debug_mask, scale=scale)
    return o.transpose(1, 2), lse, None, None, n, s, *rest


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward: `flash_backward` of "b h n d", without offsets."""
    do, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    rest = (None, None, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)
    return tuple(x.transpose(1, 2) for x in flash_backward(do, q, k, v, o, logsumexp, *rest, scale=scale))


OPERATORS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}
"""Torch's operators and what takes their places, with their schemas."""


def _request(
    mask: Mask,
    scale: float | None,
    offsets: tuple[Tensor | None, Tensor | None],
    dropout: tuple[float, Tensor],
    alibi: bool,
) -> Request:
    """The request that forward and backward share."""
    rate, state = dropout
    ragged = None if offsets[0] is None else Ragged.from_offsets(*offsets)
    options = Options(mask, scale, ragged=ragged, deterministic=torch.are_deterministic_algorithms_enabled())
    return Request(options, rate, state[0] if rate > 0 else None, ("alibi",) if alibi else ())


def _batched(offsets: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """Packed tensors as a batch of one."""
    return [x if offsets is None else x[None] for x in tensors]


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """`x` with the strides of a new tensor like `like`, which is what torch's compiler counts on."""
    strides = torch.empty_like(like, device="meta").stride()
    return x if x.stride() == strides else torch.empty_like(like).copy_(x)
