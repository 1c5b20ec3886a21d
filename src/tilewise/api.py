"""What users call: tensors in, `Partial`s out. Describes, chooses, runs; holds no arithmetic but merge's one line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ._errors import DtypeError, OptionError, ShapeError
from .backends import check_name, make_plan
from .backends.plan import Plan
from .dropout import check_rate
from .mask import Mask
from .ops import again, run
from .positions import Positions
from .problem import NAMES, Inputs, Options, Partial
from .ragged import Ragged
from .recall import Words
from .request import EXTRAS, Request


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    positions: tuple[Positions, Positions] | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Scaled dot-product attention, exact, without storing the n×s matrix of scores.

        s[i, j] = cap(scale·q[i]·k[j] + bias[i, j] − alibi·|i − j|)      hidden where not mask.keep(i, j)
        o[i]    = Σ_j drop(softmax_j(s[i, j]))·v[j]                      cap(x) = softcap·tanh(x / softcap)

    Shapes      q "b n h d" · k "b s g d" · v "b s g e" → o "b n h e"; h % g == 0, query head x reads key head x // (h // g);
                alibi slopes "h" or "b h" · bias broadcasts to "b h n s" · sink "h"
    Options     scale defaults to d**-0.5 (a tensor, 0-d or "h", is learnable) · sink: one more logit a head, which takes
                probability but has no value · dropout: chance in [0, 1) by which a probability is dropped, a function of
                (seed, b, h, i, j) alone; seed None draws one from torch's generator · positions of q's and k's rows, by
                default q's last row at k's last · backend None chooses
    Numerics    accumulates in float32 (float64 for float64); a row that sees no key gives 0 and gradients 0; what a hidden
                key or value holds, NaN included, is never read into a result
    Memory      O(n + s) beside inputs, output and gradients; see `plan`
    Gradients   of q, k, v, bias, alibi, sink and a tensor scale; of any order (beyond the first with O(n·s) memory)
    Errors      ShapeError, OptionError (ValueError) and DtypeError (TypeError) naming the axis and both shapes, before
                anything runs; Unsupported with every reason if `backend` was named and refuses
    Spec        `reference.plain.attention`, the definition; `softmax.absorb`, the loop
    Source      Dao 2023, FlashAttention-2, algorithm 1; Milakov & Gimelshein 2018, section 3

    >>> from tilewise import Causal, Window
    >>> q, k, v = torch.randn(2, 5, 8, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 24)
    >>> attention(q, k, v, mask=Causal() & Window(left=3)).shape
    torch.Size([2, 5, 8, 24])
    """
    return attention_with_lse(
        q, k, v, mask=mask, scale=scale, softcap=softcap, alibi=alibi, bias=bias, sink=sink, dropout=dropout, seed=seed,
        positions=positions, backend=backend, deterministic=deterministic,
    ).o  # fmt: skip


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    positions: tuple[Positions, Positions] | None = None,
    ragged: Ragged | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> Partial:
    """`attention` and the log-sum-exp of each row's logits, as a `Partial` that merges with others. Both differentiable.

        lse[i] = log Σ_j exp(s[i, j])        natural logarithm; the sink's logit counts; dropout does not

    Shapes      o "b n h e" in the inputs' dtype · lse "b h n", float32 (float64 for float64 inputs); with `ragged`, as in
                `attention_varlen`, "t h e" and "h t"
    Everything else as in `attention`.

    >>> from tilewise import Causal
    >>> x = torch.randn(1, 6, 2, 8)
    >>> attention_with_lse(x, x, x, mask=Causal()).lse.shape
    torch.Size([1, 2, 6])
    """
    few = bias is None and alibi is None and sink is None and positions is None and ragged is None
    if few and type(dropout) is float and dropout == 0.0:
        made = again(q, k, v, Words(mask, scale, softcap, backend, deterministic))  # type: ignore[arg-type]
        if made is not None:
            return made
    x = _unpacked(Inputs(q, k, v, bias, alibi, sink), ragged)
    learned, number = (scale, None) if isinstance(scale, Tensor) else (None, scale)
    options = Options(mask, number, softcap, None, positions, ragged, deterministic)
    partial = compute(x, options, learned, (dropout, seed), backend)
    return partial if ragged is None else Partial(partial.o[0], partial.lse[0])


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ragged: Ragged,
    mask: Mask | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> Tensor:
    """`attention` over sequences of different lengths packed end to end; sequences never see each other.

    Shapes      q "t h d" · k "t g d" · v "t g e" → o "t h e", where t of q and t of k may differ; bias broadcasts to
                "h t t" · alibi and sink "h"; an array of a mask with an axis b has one entry a sequence
    Positions   start at 0 in each sequence, and its last query sits at its last key; dropout counts sequences as b, so
                packing changes no result
    Rows past the last offset give 0 and gradients 0. Everything else as in `attention`.

    >>> from tilewise import Causal, Ragged
    >>> q = torch.randn(8, 4, 16)
    >>> attention_varlen(q, q, q, ragged=Ragged.from_lengths([3, 5]), mask=Causal()).shape
    torch.Size([8, 4, 16])
    """
    return attention_with_lse(
        q, k, v, ragged=ragged, mask=mask, scale=scale, softcap=softcap, alibi=alibi, bias=bias, sink=sink, dropout=dropout,
        seed=seed, backend=backend, deterministic=deterministic,
    ).o  # fmt: skip


def merge(*partials: Partial | tuple[Tensor, Tensor]) -> Partial:
    """Attention over the union of disjoint sets of keys, from attention over each, in any order. Differentiable.

        L = log Σ_a exp(L_a)        o = Σ_a exp(L_a − L)·o_a

    Shapes      o "b n h e" · lse "b h n" (or "n h e" and "h n"), each the same throughout
    Numerics    in the dtype of lse; (0, -inf) is neutral, and what a partial with lse = -inf holds in o is not read
    Source      Dao 2023, FlashAttention-2, section 3.1

    >>> x = torch.randn(1, 6, 2, 8)
    >>> halves = (attention_with_lse(x, x[:, part], x[:, part]) for part in (slice(0, 2), slice(2, 6)))
    >>> torch.allclose(merge(*halves).o, attention(x, x, x), atol=1e-6)
    True
    """
    if not partials:
        raise OptionError("merge needs at least one partial")
    for index, partial in enumerate(partials):
        _check_partial(index, partial, partials[0])
    lses = torch.stack([lse for _, lse in partials])
    top = lses.detach().amax(0)
    weights = torch.exp(lses - torch.where(top == -torch.inf, 0, top))
    total = weights.sum(0)
    nothing = total == 0
    safe = torch.where(nothing, 1, total)
    shares = (weights / safe).transpose(-1, -2)[..., None]
    o = sum(s * torch.where(s == 0, 0, o.to(s.dtype)) for s, (o, _) in zip(shares, partials, strict=True))
    lse = torch.where(nothing, -torch.inf, torch.where(nothing, 0, top) + torch.log(safe))
    assert isinstance(o, Tensor)
    return Partial(o.to(partials[0][0].dtype), lse)


def _check_partial(index: int, partial: Partial | tuple[Tensor, Tensor], first: Partial | tuple[Tensor, Tensor]) -> None:
    """A pair of tensors that fit each other and the first pair."""
    if not isinstance(partial, tuple) or len(partial) != 2 or not all(isinstance(x, Tensor) for x in partial):
        got = f"got {type(partial).__name__}; several are given one by one: merge(*partials)"
        raise DtypeError(f"partial {index} must be a Partial or a pair of tensors (o, lse), {got}")
    o, lse = partial
    if o.shape[:-1] != lse.transpose(-1, -2).shape:
        raise ShapeError(f"partial {index}: o {tuple(o.shape)} '… n h e' does not fit lse {tuple(lse.shape)} '… h n'")
    if o.shape != first[0].shape:
        raise ShapeError(f"partial {index}: o {tuple(o.shape)} differs from the first, {tuple(first[0].shape)}")
    if (o.dtype, lse.dtype) != (first[0].dtype, first[1].dtype):
        raise DtypeError(
            f"partial {index} is {o.dtype} with lse {lse.dtype}; the first is {first[0].dtype} with {first[1].dtype}"
        )


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    positions: tuple[Positions, Positions] | None = None,
    ragged: Ragged | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> Plan:
    """What `attention` (with `ragged`, `attention_varlen`) would run on these arguments, why, and what it costs; print it.
    Takes the same options and computes nothing.

    >>> from tilewise import Causal
    >>> x = torch.randn(1, 1024, 8, 64)
    >>> print(plan(x, x, x, mask=Causal(), backend="torch"))
    backend   torch on cpu, float32
    problem   b=1 n=1024 s=1024 h=8 g=8 d=64 e=64, mask INTERVAL
    tiles     256 × 256: visits 80 of 128 (48 FULL, 32 PARTIAL, 48 EMPTY)
    forward   1.342 GFLOP, 14.71 MB (storing the scores: 142.61 MB)
    backward  4.698 GFLOP, 40.11 MB (storing the scores: 251.66 MB)
    workspace 16.0 MiB beside inputs, outputs and gradients
    """
    x = _unpacked(Inputs(q, k, v, bias, alibi, sink), ragged)
    if isinstance(scale, Tensor):
        _scaled(x.q[:0], scale)
        scale = None
    options = Options(mask, scale, softcap, None, positions, ragged, deterministic)
    return make_plan(_request(x, options, (dropout, seed), backend).problem(x), backend)


def compute(
    x: Inputs[Tensor],
    options: Options,
    scale: float | Tensor | None = None,
    dropout: tuple[float, int | Tensor | None] = (0.0, None),
    backend: str | None = None,
) -> Partial:
    """One call as values, for layers that already hold them; `scale` takes the place of the options', `dropout` is (rate,
    seed). Autocast and a tensor scale are applied here, all else is the request's."""
    dtype = autocast_dtype(x.q)
    if dtype is not None:
        q, k, v = (t.to(dtype) if t.is_floating_point() else t for t in (x.q, x.k, x.v))
        x = replace(x, q=q, k=k, v=v)
    if isinstance(scale, Tensor):
        x, scale = replace(x, q=_scaled(x.q, scale)), 1.0
    options = options if scale is None else replace(options, scale=scale)
    return run(x, _request(x, options, dropout, backend))


def autocast_dtype(q: Tensor) -> torch.dtype | None:
    """What autocast makes of q, k and v; None where it is off, or float64 stays as it is."""
    kind = q.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind) and q.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if on else None


def _scaled(q: Tensor, scale: Tensor) -> Tensor:
    """q times a scale that may be learned: one number, or one a query head."""
    if scale.dim() > 1 or (scale.dim() == 1 and q.dim() == 4 and scale.shape[0] != q.shape[2]):
        raise ShapeError(f"axis h: scale {tuple(scale.shape)} must be one number, or one a query head of q {tuple(q.shape)}")
    if not scale.is_floating_point():
        raise DtypeError(f"scale must be a floating-point number, got {scale.dtype}")
    return q * scale.to(q.dtype).unsqueeze(-1)


def _request(x: Inputs[Tensor], options: Options, dropout: tuple, backend: str | None) -> Request:
    rate, seed = dropout
    check_rate(rate)
    if backend is not None:
        check_name(backend)
    extras = tuple([name for name in EXTRAS if getattr(x, name) is not None])
    return Request(options, rate, _seed(seed) if rate > 0 else None, extras, backend)


def _seed(seed: int | Tensor | None) -> Tensor:
    """The seed as an int64 tensor of one element, drawn from torch's generator if there is none."""
    if seed is None:
        return torch.randint(2**63 - 1, (), device="cpu")
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point() or seed.is_complex():
            raise DtypeError(f"seed must be one integer, got a tensor {tuple(seed.shape)} of {seed.dtype}")
        return seed.reshape(())
    if not isinstance(seed, (int, np.integer)):
        raise DtypeError(f"seed must be an integer, got {type(seed).__name__}")
    if not -(2**63) <= seed < 2**63:
        raise OptionError(f"seed must fit 64 bits, got {seed}")
    return torch.full((), int(seed) if isinstance(seed, np.integer) else seed, dtype=torch.int64, device="cpu")


def _check_tensors(x: Inputs[Tensor]) -> None:
    for name, tensor in zip(NAMES, (x.q, x.k, x.v, x.bias, x.alibi, x.sink), strict=True):
        if not isinstance(tensor, Tensor) and not (tensor is None and name in EXTRAS):
            raise DtypeError(f"{name} must be a torch tensor, got {type(tensor).__name__}")


def _unpacked(x: Inputs[Tensor], ragged: Ragged | None) -> Inputs[Tensor]:
    """The inputs with all four axes: packed ones are a batch of one."""
    _check_tensors(x)
    if ragged is None:
        return x
    for name, tensor, axes in (("q", x.q, "t h d"), ("k", x.k, "t g d"), ("v", x.v, "t g e")):
        if tensor.dim() != 3:
            raise ShapeError(f"{name} must have the three axes '{axes}', got {tensor.dim()}: {tuple(tensor.shape)}")
    return replace(x, q=x.q[None], k=x.k[None], v=x.v[None])
