"""Hugging Face transformers on tilewise: `register()` once, then `attn_implementation="tilewise"`.

A model asks twice. First for a mask, which it hands to its layers without looking inside: `describe` answers with a
`MaskTensor`, a boolean "b 1 n s" that holds a tilewise mask and stores no table. Then each layer asks for attention:
`attend` reads the mask back and calls `tilewise.attention`.

Padding is not taken out and put back, as flash-attn needs it: a row's visible keys are an interval, so tiles of padding are
never visited, and no layer waits for a length to reach the host or copies q, k and v.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.utils.import_utils import is_tracing

from .._errors import DtypeError, OptionError, ShapeError
from ..api import attention, attention_varlen
from ..mask import Causal, Chunked, Documents, Full, Lengths, Mask, Where, Window
from ..mask.base import Both
from ..positions import Positions
from ..ragged import Ragged


def register(name: str = "tilewise") -> None:
    """Let `attn_implementation=name` run any transformers model on `tilewise.attention`.

    >>> register()
    >>> from transformers import LlamaConfig, LlamaModel
    >>> config = LlamaConfig(vocab_size=7, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    >>> model = LlamaModel._from_config(config, attn_implementation="tilewise")
    >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 16])
    """
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, describe)


class MaskTensor(torch.Tensor):
    """A boolean mask "b 1 n s" that is described, not stored: row r sits at `start + r`, column c at c.

    It travels through a model, a cache or a checkpoint like the table that it stands for. Whatever operates on it, be it
    `mask[..., :k]`, `.to(device)` or `.contiguous()`, gets that table. A model that adds it to scores of its own, or fills
    scores where it is true, expects an additive mask and is refused.
    """

    mask: Mask
    start: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, mask: Mask, start: int, shape: tuple[int, int, int, int], device: torch.device | str) -> MaskTensor:
        new = torch.Tensor._make_wrapper_subclass(cls, shape, strides=(0,) * 4, dtype=torch.bool, device=torch.device(device))
        new.mask, new.start = mask, start
        return new

    def table(self) -> Tensor:
        """The table itself, "b 1 n s"."""
        b, _, n, s = self.shape
        i, j = self.start + np.arange(n)[:, None], np.arange(s)
        keep = self.mask.keep(i, j, np.arange(b)[:, None, None, None], 0)
        return torch.from_numpy(np.broadcast_to(keep, self.shape).copy()).to(self.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores = any(isinstance(x, Tensor) and x.is_floating_point() for x in args)
        if scores and func.overloadpacket.__name__ in ("add", "add_", "masked_fill", "masked_fill_"):
            raise OptionError(
                "this model adds an attention mask to scores of its own instead of asking transformers' attention interface, "
                'so it cannot run on tilewise: load it with attn_implementation="eager"'
            )
        args, kwargs = tree_map(lambda x: x.table() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"MaskTensor({self.mask}, start={self.start}, shape={tuple(self.shape)})"


def describe(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of one model call, as transformers asks for it: a `MaskTensor` where the request is understood.

    Query row r sits at `q_offset + r`, key row c at `kv_offset + c`; `attention_mask` "b x" is true at the positions that
    are not padding. It hides the keys of padding, and in causal attention over a whole sequence, where queries are the same
    tokens, everything from queries of padding: such a row gives 0 and its tiles are not visited. (Without causality queries
    may be another sequence's, and the request does not say.) What is not understood, custom mask functions and everything
    under `torch.compile`, becomes a boolean table "b 1 n s", or None where transformers allows it: then the layer's own
    `is_causal` speaks.
    """
    if is_tracing(attention_mask):
        plain = mask_function is masking_utils.causal_mask_function and attention_mask is None
        if plain and kwargs.get("allow_is_causal_skip", True) and isinstance(q_offset, int) and q_length == kv_length:
            return None
        parts = None
    else:
        parts = _parts(mask_function, _Keys(kv_length, kv_offset))
    if parts is None or (attention_mask is not None and attention_mask.dim() != 2):
        table = masking_utils.sdpa_mask
        return table(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)  # pyright: ignore[reportArgumentType]
    start = int(q_offset) - kv_offset
    if attention_mask is not None:
        missing = max(kv_offset + kv_length - attention_mask.shape[1], 0)
        same = start == missing == 0 and q_length == kv_length and any(isinstance(part, Causal) for part in parts)
        parts += _padding(pad(attention_mask, (0, missing))[:, kv_offset : kv_offset + kv_length], same)
    mask = reduce(operator.and_, parts) if parts else Full()
    return MaskTensor(mask, start, (batch_size, 1, q_length, kv_length), kwargs.get("device", "cpu"))


class _Keys(NamedTuple):
    """The keys that a mask speaks of: `count` of them, the first at the model's position `offset`."""

    count: int
    offset: int


class _Condition(NamedTuple):
    """One condition of a mask function: its code, what it captured, and the position_ids it counts by, "b s" or None."""

    code: Any
    captured: dict[str, Any]
    position_ids: Tensor | None


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _template(name: str, *arguments: Any) -> Any:
    """The code of the mask functions that transformers' `name` makes: closures share it, whatever they captured."""
    make = getattr(masking_utils, name, None)
    return object() if make is None else _code(make(*arguments))


_IDS = torch.zeros(1, dtype=torch.long)
_AND = _template("and_masks")
_REMAP = _template("remap_positions_for_packed_sequence", masking_utils.causal_mask_function, _IDS)
_PACKED = _template("packed_sequence_mask_function", _IDS)
_CHUNKED = _template("chunked_overlay", 1, _IDS)
_BANDS: dict[Any, Callable[[dict[str, Any]], list[Mask]]] = {
    _code(masking_utils.causal_mask_function): lambda _: [Causal()],
    _code(masking_utils.bidirectional_mask_function): lambda _: [],
    _template("sliding_window_overlay", 1): lambda has: [Window(left=has["sliding_window"] - 1)],
    _template("sliding_window_bidirectional_overlay", 1): lambda has: [Window(has["sliding_window"], has["sliding_window"])],
}


def _conditions(function: Any, position_ids: Tensor | None = None) -> Iterator[_Condition]:
    """The conditions that a mask function joins by "and"."""
    code = _code(function)
    cells = getattr(function, "__closure__", None) or ()
    names: tuple[str, ...] = getattr(code, "co_freevars", ())
    captured = dict(zip(names, (cell.cell_contents for cell in cells), strict=True))
    if code is _AND:
        for part in captured["mask_functions"]:
            yield from _conditions(part, position_ids)
    elif code is _REMAP:
        yield from _conditions(captured["mask_function"], captured["position_ids"])
    else:
        yield _Condition(code, captured, position_ids)


def _parts(function: Any, keys: _Keys) -> list[Mask] | None:
    """Masks whose `&` is a mask function, by key index: position 0 is the first key. None if a condition is unknown."""
    parts, segments = [], []
    conditions = list(_conditions(function))
    packed = any(c.code is _PACKED for c in conditions)
    for code, has, position_ids in conditions:
        if position_ids is not None and not packed:
            return None
        if code in _BANDS:
            parts += _BANDS[code](has)
        elif code is _PACKED:
            segments.append(has["packed_sequence_mask"])
        elif code is _CHUNKED:
            size, first = has["chunk_size"], has["left_padding"][:, None]
            if position_ids is None and not ((keys.offset - first) % size).any():
                parts.append(Chunked(size))
            else:
                at = torch.arange(keys.count, device=first.device) + keys.offset if position_ids is None else position_ids
                segments.append((at - first) // size)
        else:
            return None
    return parts + _documents(segments)


def _documents(segments: list[Tensor]) -> list[Mask]:
    """Keys that every segmentation, "b s" each, keeps together form one document."""
    if not segments:
        return []
    cuts = reduce(operator.or_, [segment.diff(dim=-1) != 0 for segment in segments])
    return [Documents(pad(cuts.cumsum(-1), (1, 0)))]


def _padding(real: Tensor, same: bool) -> list[Mask]:
    """The mask that hides all but the real keys, "b s", and where queries are the `same` tokens everything from those that are
    not real: one document, or a length and a first key; a table "b 1 1 s" of keys alone if there are holes."""
    if bool(real.all()):
        return []
    starts = real & ~pad(real, (1, 0))[:, :-1]
    if not bool((starts.sum(-1) <= 1).all()):
        return [Where(real[:, None, None, :])]
    if same:
        return [Documents(real.int() - 1)]
    return [Lengths(real.sum(-1), first=real.int().argmax(-1))]


class _View(NamedTuple):
    """What one layer sees: the mask, the position of its first query row where key c sits at c, and what to add to scores."""

    mask: Mask
    start: int
    bias: Tensor | None = None


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers asks for it. Rows that see no key give 0.

    Shapes   query "b h n d" · key "b g s d" · value "b g s e" · attention_mask broadcasts to "b h n s" · s_aux "h" ·
             position_bias broadcasts to "b h n s" → "b n h e", and no weights
    Masks    a mask says everything, so `sliding_window` and `is_causal` count only where it is None: then, as in sdpa,
             rows are aligned top-left and a single row sees all keys (of the window). A boolean table hides where False;
             a floating one hides at -inf and at its dtype's minimum, and is added elsewhere
    Packing  position_ids that restart separate documents where the model hands them to its mask, as most do; offsets
             cu_seq_lens_q and cu_seq_lens_k "sequences+1" into the flattened "b n" and "b s" separate them in every model,
             with a mask of bands alone as in `tilewise.attention_varlen`, so that queries and keys may differ in number
    Dropout  only while the module trains; its pattern follows torch's generator
    Errors   OptionError for what tilewise cannot do: weights as output, sparse indices, a bias together with softcap
    """
    _refuse(kwargs)
    query = query.expand(key.shape[0], -1, -1, -1) if query.shape[0] == 1 else query
    n, s = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        view = _unmasked(causal, sliding_window, n, s)
    else:
        view = _masked(attention_mask, query, s)
    bias = view.bias
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if bias is not None and softcap is not None:
        raise OptionError("tilewise adds a bias before softcap, transformers after it: it cannot run both in one layer")
    x = [t.transpose(1, 2) for t in (query, key, value)]
    options = {
        "scale": scaling, "softcap": softcap, "bias": bias, "sink": s_aux, "dropout": dropout if module.training else 0.0,
        "deterministic": bool(kwargs.get("deterministic")),
    }  # fmt: skip
    mask, q_offsets, kv_offsets = view.mask, kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if q_offsets is not None and bias is None and _relative(mask):
        ragged = Ragged.from_offsets(q_offsets, kv_offsets)
        o = attention_varlen(*(t.flatten(0, 1) for t in x), ragged=ragged, mask=mask, **options)
        return o.unflatten(0, x[0].shape[:2]), None
    if q_offsets is not None:
        mask = mask & _packed(q_offsets, kv_offsets, key.shape[0], n, s)
    return attention(*x, mask=mask, positions=(Positions(n, start=view.start), Positions(s)), **options), None


def _refuse(kwargs: dict[str, Any]) -> None:
    """Raise for arguments that would change the result and that tilewise has no answer to."""
    if kwargs.get("output_attentions"):
        raise OptionError('tilewise never forms the weights: use attn_implementation="eager" for output_attentions=True')
    for name in ("indices", "block_indices", "sinks", "head_mask", "block_table"):
        if kwargs.get(name) is not None:
            raise OptionError(f'tilewise does not support the argument {name}= of this model: use attn_implementation="eager"')


def _unmasked(causal: bool, sliding_window: int | None, n: int, s: int) -> _View:
    """Where the model gave no mask, its layer's flags say what is visible."""
    mask = Causal() if causal else Full()
    if sliding_window is not None:
        mask = mask & Window(left=sliding_window - 1, right=None if causal else sliding_window - 1)
    return _View(mask, 0 if n > 1 else s - 1)


def _masked(attention_mask: Tensor, query: Tensor, s: int) -> _View:
    """Reads a `MaskTensor`, a boolean table or an additive one."""
    b, h, n, _ = query.shape
    shape = tuple(attention_mask.shape)
    if len(shape) != 4 or any(have not in (1, want) for have, want in zip(shape, (b, h, n, s), strict=True)):
        raise ShapeError(f"attention_mask {shape} does not broadcast to {(b, h, n, s)} 'b h n s'")
    if isinstance(attention_mask, MaskTensor):
        return _View(attention_mask.mask, attention_mask.start)
    if attention_mask.dtype == torch.bool:
        return _View(Where(attention_mask), 0)
    if not attention_mask.is_floating_point():
        raise DtypeError(f"attention_mask must be boolean or floating point, got {attention_mask.dtype} of shape {shape}")
    hidden = attention_mask <= max(torch.finfo(x.dtype).min for x in (attention_mask, query)) / 2
    bias = attention_mask.masked_fill(hidden, 0)
    adds = is_tracing(bias) or bias.requires_grad or bool(bias.any())
    return _View(Where(~hidden), 0, bias if adds else None)


def _relative(mask: Mask) -> bool:
    """Does the mask speak of distances alone, so that it means the same in a sequence that starts elsewhere?"""
    return all(isinstance(part, Full | Causal | Window) for part in (mask.parts if isinstance(mask, Both) else (mask,)))


def _packed(q_offsets: Tensor, kv_offsets: Tensor | None, batch: int, n: int, s: int) -> Documents:
    """Sequences packed end to end, given by their offsets, for masks and biases that count from the first token of all."""
    alike = n == s and (kv_offsets is None or kv_offsets is q_offsets or torch.equal(q_offsets, kv_offsets))
    if batch != 1 or not alike:
        got = f"got a batch of {batch}, {n} query rows and {s} key rows"
        raise OptionError(f"cu_seq_lens: with this mask or bias queries and keys must be packed alike in one row, {got}")
    ids = torch.searchsorted(q_offsets, torch.arange(s, device=q_offsets.device, dtype=q_offsets.dtype), right=True)
    return Documents(torch.where(ids < len(q_offsets), ids, -1))
