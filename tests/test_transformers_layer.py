"""What `attn_implementation="tilewise"` does in one layer: masks, described or stored, and one call of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_transformers import BATCH, LENGTH, PADDINGS, causal, documents, padding, tokens
from torch import Tensor
from transformers import masking_utils

import tilewise as tw
from tilewise.compat.transformers import MaskTensor, attend, describe, register
from tilewise.testing import agree


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


class Layer(torch.nn.Module):
    """What `attend` needs of a layer."""

    is_causal = True


def rows(n: int = 5, s: int = 7, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, heads, size, 8, generator=generator).to(dtype) for heads, size in ((4, n), (2, s), (2, s))]


def output(*arguments: Any, **options: Any) -> Tensor:
    return attend(Layer().eval(), *arguments, **options)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden", ["finfo.min", "-inf", "False"])
def test_a_row_that_sees_nothing_gives_zero(hidden: str, dtype: torch.dtype) -> None:
    table = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    table[1, :, 2] = False
    low = torch.finfo(dtype).min if hidden == "finfo.min" else -torch.inf
    mask = table if hidden == "False" else torch.zeros(table.shape, dtype=dtype).masked_fill(~table, low)
    o = output(*rows(dtype=dtype), mask)
    assert not o[1, 2].any()
    assert o[0].all() and o[1, :2].all() and o[1, 3:].all()


def test_a_learned_additive_mask_gets_its_gradient() -> None:
    bias = torch.zeros(1, 1, 5, 7, requires_grad=True)
    assert torch.autograd.grad(output(*rows(), bias).square().sum(), bias)[0].all()


def test_without_a_mask_the_flags_of_the_layer_speak() -> None:
    i, j = torch.arange(7)[:, None], torch.arange(7)
    x = rows(n=7)
    for flags, table in (
        ({}, j <= i),
        ({"is_causal": False}, j < 7 + i),
        ({"sliding_window": 3}, (j <= i) & (j > i - 3)),
        ({"sliding_window": 3, "is_causal": False}, (i - j).abs() < 3),
    ):
        torch.testing.assert_close(output(*x, None, **flags), output(*x, table[None, None]))
    torch.testing.assert_close(output(x[0][:, :, -1:], *x[1:], None), output(*x, None)[:, -1:])


def test_what_cannot_be_honoured_is_refused() -> None:
    for error, message, mask, options in (
        (tw.OptionError, "never forms the weights", None, {"output_attentions": True}),
        (tw.OptionError, "block_indices", None, {"block_indices": torch.zeros(1)}),
        (tw.OptionError, "softcap", None, {"softcap": 2.0, "position_bias": torch.randn(1, 4, 5, 7)}),
        (tw.ShapeError, "does not broadcast", torch.ones(2, 1, 5, 6, dtype=torch.bool), {}),
        (tw.DtypeError, "boolean or floating", torch.ones(2, 1, 5, 7, dtype=torch.long), {}),
    ):
        with pytest.raises(error, match=message):
            output(*rows(), mask, **options)
    with pytest.raises(tw.OptionError, match="never forms the weights"):
        causal("llama", "tilewise")(tokens(), output_attentions=True)


MASKS: dict[str, Any] = {
    "causal": masking_utils.causal_mask_function,
    "full": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "band": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.long)),
    "chunks after padding": masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 3, 5])),
}
PLACES = {"whole": (LENGTH, LENGTH, 0, 0), "decode": (1, LENGTH, 10, 0), "static": (4, LENGTH, 3, 0), "sliding": (5, 9, 10, 6)}


def same_table(*arguments: Any, rows: Tensor | None = None) -> bool:
    """Is the mask described, never stored, and the one that transformers makes, in the given rows "b n" or in all?"""
    mask: Any = describe(*arguments)
    assert isinstance(mask, MaskTensor)
    want: Any = masking_utils.sdpa_mask(*arguments, allow_is_causal_skip=False)
    rows = torch.ones(BATCH, want.shape[2], dtype=torch.bool) if rows is None else rows
    return torch.equal(mask.table()[:, 0][rows], want.expand(BATCH, -1, -1, -1)[:, 0][rows])


@pytest.mark.parametrize("pad", PADDINGS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MASKS)
def test_a_described_mask_is_the_table_of_transformers(kind: str, place: str, pad: str) -> None:
    n, s, q_offset, kv_offset = PLACES[place]
    real = padding(pad, q_offset + n).bool()
    causal = place == "whole" and kind not in ("full", "band")
    rows = real if causal else None  # rows of padding are nobody's concern
    assert same_table(BATCH, n, s, q_offset, kv_offset, MASKS[kind], real, rows=rows)


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("kind", ["causal", "window"])
def test_rows_of_padding_give_zero_and_cost_what_unpadding_would(kind: str, pad: str) -> None:
    """The tiles visited are as many as for the real tokens alone, packed end to end."""
    size, lengths = 1024, [1024, 512, 256]
    real = torch.arange(size) < torch.tensor(lengths)[:, None]
    real = real.flip(1) if pad == "left" else real
    mask: Any = describe(3, size, size, 0, 0, MASKS[kind], real)
    x = torch.randn(3, 1, size, 8)
    o = output(x, x, x, mask)
    assert not o[~real].any() and o[real].abs().amax(-1).all()
    band = tw.Causal() if kind == "causal" else tw.Window(3, 0)
    plans = [
        tw.plan(*[x.transpose(1, 2)] * 3, mask=mask.mask, backend="torch"),  # whose tiles divide the lengths
        tw.plan(*[x.transpose(1, 2)[real]] * 3, mask=band, ragged=tw.Ragged.from_lengths(lengths), backend="torch"),
    ]
    ours, unpadded = (p.forward_cost.full_tiles + p.forward_cost.partial_tiles for p in plans)
    assert ours == unpadded


@pytest.mark.parametrize("kind", ["full", "band"])
def test_padding_hides_no_query_where_queries_may_be_another_sequence(kind: str) -> None:
    assert same_table(BATCH, LENGTH, LENGTH, 0, 0, MASKS[kind], padding("right").bool())


@pytest.mark.parametrize("kind", MASKS)
def test_a_described_packed_mask_is_the_table_of_transformers(kind: str) -> None:
    ids = torch.cat([documents(0, 0), documents(5, 3), documents(1, 2)])
    found: Any = masking_utils.find_packed_sequence_indices(ids)
    remapped = masking_utils.remap_positions_for_packed_sequence(MASKS[kind], ids)
    function = masking_utils.and_masks(remapped, masking_utils.packed_sequence_mask_function(found))
    assert same_table(BATCH, LENGTH, LENGTH, 0, 0, function)


@pytest.mark.parametrize("vmap", [False, True])
def test_a_mask_function_of_the_users_own_becomes_a_table(vmap: bool) -> None:
    function = masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, i, j: j < 3)
    real = padding("left").bool()
    table: Any = describe(BATCH, LENGTH, LENGTH, 0, 0, function, real, use_vmap=vmap, allow_is_causal_skip=False)
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    assert type(table) is Tensor and torch.equal(table, (((j <= i) | (j < 3)) & real[:, None, :])[:, None])


def test_a_mask_tensor_stores_nothing_and_becomes_a_table_when_touched() -> None:
    large, small = (describe(1, size, size) for size in (1 << 20, 5))
    assert isinstance(large, MaskTensor) and large.shape == (1, 1, 1 << 20, 1 << 20)
    assert isinstance(small, MaskTensor)
    for touched in (small[..., :5], small.contiguous(), small.clone(), small & small):
        assert type(touched) is Tensor and torch.equal(touched, torch.ones(5, 5, dtype=torch.bool).tril()[None, None])


def test_there_is_dropout_only_in_training() -> None:
    q, k, v = rows()
    assert torch.equal(output(q, k, v, None, dropout=0.5), output(q, k, v, None))
    assert not agree(attend(Layer().train(), q, k, v, None, dropout=0.5)[0], output(q, k, v, None))


def test_offsets_count_from_the_first_row_of_the_batch() -> None:
    """As in flash-attn, sequences lie in the flattened batch and may cross its rows; lengths of queries and keys may differ."""
    q, k, v = rows()
    offsets = {"cu_seq_lens_q": torch.tensor([0, 2, 7, 10]), "cu_seq_lens_k": torch.tensor([0, 5, 5, 14])}
    o = output(q, k, v, None, **offsets, max_length_q=5, max_length_k=9).flatten(0, 1)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    for (first, past), (begin, end) in zip([(0, 2), (2, 7), (7, 10)], [(0, 5), (5, 5), (5, 14)], strict=True):
        alone = tw.attention(q[None, first:past], k[None, begin:end], v[None, begin:end], mask=tw.Causal())[0]
        assert agree(o[first:past], alone)


def test_offsets_with_a_mask_that_counts_from_the_first_token() -> None:
    x, offsets = [t[:1] for t in rows(n=7)], torch.tensor([0, 3, 7])
    table = torch.rand(1, 1, 7, 7) < 0.7
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    both = table & (ids[:, None] == ids)
    assert agree(output(*x, table, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets.clone()), output(*x, both))
    with pytest.raises(tw.OptionError, match="packed alike in one row"):
        output(*rows(n=7), table.expand(2, -1, -1, -1), cu_seq_lens_q=offsets)


def test_compiled_layer_with_offsets() -> None:
    x, offsets = [t[:1] for t in rows(n=7)], torch.tensor([0, 3, 7])
    layer = Layer().eval()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(layer, q, k, v, None, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=4, max_length_k=4)[0]

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(*x), call(*x))
