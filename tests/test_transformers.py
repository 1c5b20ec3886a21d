"""`attn_implementation="tilewise"` against transformers' own eager attention, model by model."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils

import tilewise as tw
from tilewise import demo
from tilewise.cli.demo import TOLERANCE
from tilewise.compat.transformers import MaskTensor, attend, describe, register

hf: Any = transformers
BATCH, LENGTH = 3, 11
PADDINGS = ["none", "left", "right", "holes"]
SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
MLP: dict[str, Any] = {"intermediate_size": 29, "initializer_range": 0.3}
TEXT: dict[str, Any] = SIZES | MLP | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS: dict[str, Any] = {"num_local_experts": 3, "intermediate_size_mlp": 29}
CAUSAL: dict[str, Any] = {
    "llama": hf.LlamaConfig(**TEXT),
    "mistral": hf.MistralConfig(**TEXT, sliding_window=4),
    "gemma2": hf.Gemma2Config(**TEXT, head_dim=6, sliding_window=4, attn_logit_softcapping=3.0),
    "gemma3": hf.Gemma3TextConfig(**TEXT, head_dim=6, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": hf.GptOssConfig(**TEXT, **EXPERTS, head_dim=6, sliding_window=3, num_experts_per_tok=2),
    "llama4": hf.Llama4TextConfig(**TEXT, **EXPERTS, head_dim=6, attention_chunk_size=4, no_rope_layer_interval=2),
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


def build(config: Any, auto: Any = hf.AutoModel) -> Any:
    """A random model whose biases, norms and sinks are random too, so that every parameter matters."""
    torch.manual_seed(0)
    model = auto.from_config(copy.deepcopy(config), attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def causal(name: str, implementation: str = "eager") -> Any:
    model = build(CAUSAL[name], hf.AutoModelForCausalLM)
    model.set_attn_implementation(implementation)
    return model


def t5() -> Any:
    sizes = {"vocab_size": 37, "d_model": 24, "d_kv": 5, "d_ff": 29, "num_layers": 2, "num_heads": 4}
    return build(hf.T5Config(**sizes, decoder_start_token_id=0), hf.AutoModelForSeq2SeqLM)


def bart() -> Any:
    each = {"layers": 2, "ffn_dim": 29, "attention_heads": 4}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in each.items()}
    config = hf.BartConfig(vocab_size=37, d_model=24, init_std=0.3, max_position_embeddings=17, **sizes)
    return build(config, hf.AutoModelForSeq2SeqLM)


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(3, 37, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(kind: str, length: int = LENGTH) -> Tensor:
    """A 2-D attention mask: 1 where a token is real. The first sequence is always whole."""
    real = torch.ones(BATCH, length, dtype=torch.long)
    for b in range(1, BATCH):
        hidden = {"none": slice(0), "left": slice(0, 3 * b), "right": slice(-3 * b, None), "holes": slice(b, 3 * b)}[kind]
        real[b, hidden] = 0
    return real


def padded(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """The inputs of a model, without a mask where nothing is padded, and which positions are real."""
    real = padding(kind)
    return {"input_ids": tokens()} | ({} if kind == "none" else {"attention_mask": real}), real.bool()


@contextmanager
def wide() -> Iterator[None]:
    """Models ask for float32 in softmax, norms and rotary tables even when they are float64; here they get float64."""
    with patch.object(torch, "float32", torch.float64), patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def outcome(model: Any, implementation: str, inputs: dict[str, Any], keep: Any) -> dict[str, Tensor]:
    """The first output at the kept positions, and the gradients of all parameters of a random projection of it."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    out = model(**inputs)[0][keep]
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)).sum().backward()
    return {"output": out.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(model: Any, inputs: dict[str, Any], keep: Any = ..., implementation: str = "tilewise") -> None:
    """err(tilewise) ≤ 2·err(eager) + rounding against eager in float64, in L2: the output, and each parameter's gradient.

    Rounding is the machine epsilon of float32 times the norm of the output, or of all gradients together: an entry that
    is exactly zero in theory, like the gradient of BERT's key bias, has only noise of that size.
    """
    tiles, eager = (outcome(model, name, inputs, keep) for name in (implementation, "eager"))
    with wide():
        double = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()}
        exact = outcome(copy.deepcopy(model).double(), "eager", double, keep)
    assert set(tiles) == set(eager) == set(exact)
    eps = torch.finfo(torch.float32).eps
    grads = torch.stack([x.norm() for name, x in exact.items() if name != "output"]).norm()
    for name, want in exact.items():
        error, budget = ((x[name] - want).norm() for x in (tiles, eager))
        rounding = eps * (want.norm() if name == "output" else grads)
        assert error <= 2 * budget + rounding, f"{name}: {error:.3g} > 2·{budget:.3g} + {rounding:.3g}"


@pytest.mark.parametrize("pad", PADDINGS)
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models(name: str, pad: str) -> None:
    check(causal(name), *padded(pad))


@pytest.mark.parametrize("pad", PADDINGS)
def test_bert(pad: str) -> None:
    check(build(hf.BertConfig(**SIZES, **MLP, max_position_embeddings=13)), *padded(pad))


@pytest.mark.parametrize("pad", PADDINGS)
@pytest.mark.parametrize("make", [t5, bart])
def test_encoder_decoder(make: Callable[[], Any], pad: str) -> None:
    check(make(), padded(pad)[0] | {"decoder_input_ids": tokens(length=7, seed=3)})


def test_vision_model_without_masks() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    check(build(hf.ViTConfig(**sizes, **MLP, image_size=6, patch_size=2)), {"pixel_values": torch.randn(2, 3, 6, 6)})


def documents(first: int = 0, second: int = 0) -> Tensor:
    """position_ids "1 s" of two documents."""
    return torch.cat([torch.arange(first, first + 6), torch.arange(second, second + 5)])[None]


@pytest.mark.parametrize("starts", [(0, 0), (5, 3)], ids=["from 0", "without 0"])
@pytest.mark.parametrize("name", CAUSAL)
def test_packed_position_ids(name: str, starts: tuple[int, int]) -> None:
    """A document starts where positions do not go up by one, whether or not they start at 0."""
    check(causal(name), {"input_ids": tokens(batch=1), "position_ids": documents(*starts), "use_cache": False})


@pytest.mark.parametrize("name", CAUSAL)
def test_packed_documents_run_as_they_do_alone(name: str) -> None:
    """Offsets separate documents in every model; position_ids do where the model hands them to its mask."""
    model, ids = causal(name, "tilewise"), tokens(batch=1)
    offsets = torch.tensor([0, 6, 11], dtype=torch.int32)
    packed = {"input_ids": ids, "position_ids": documents(), "use_cache": False}
    with_offsets = packed | {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets.clone()}
    with torch.no_grad():
        alone = torch.cat([model(x).logits for x in ids.split((6, 5), 1)], 1)
        torch.testing.assert_close(model(**with_offsets).logits, alone)
        if name != "gpt_oss":  # its mask is made without position_ids
            torch.testing.assert_close(model(**packed).logits, alone)
        assert (model(**packed, attention_mask=torch.ones(1, LENGTH)).logits - alone)[:, 6:].abs().max() > 1e-2
        with pytest.raises(tw.OptionError, match="packed alike"):
            model(**with_offsets | {"cu_seq_lens_k": offsets + 1})


def test_three_dimensional_positions_are_not_packing() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
    grid = torch.arange(LENGTH) // torch.tensor([3, 2, 1])[:, None, None]
    inputs = {"inputs_embeds": torch.randn(2, LENGTH, 24), "position_ids": grid.expand(3, 2, LENGTH)}
    check(build(hf.Qwen2VLTextConfig(**TEXT, rope_parameters=rope)), inputs)


@pytest.mark.parametrize("kind", ["bool", "float32", "bias"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_four_dimensional_masks(name: str, kind: str) -> None:
    """A mask that the caller prepared is taken as it is: a table, a table in numbers, or numbers to add."""
    table = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(4)) < 0.5
    table |= torch.eye(LENGTH, dtype=torch.bool)
    mask = torch.zeros(table.shape).masked_fill(~table, torch.finfo(torch.float32).min)
    if kind == "bool":  # eager adds whatever it is given, so it gets the same table in numbers
        model = causal(name, "tilewise")
        with torch.no_grad():
            torch.testing.assert_close(*(model(tokens(), attention_mask=m).logits for m in (table, mask)))
    else:
        mask = mask + torch.randn(mask.shape) * table if kind == "bias" else mask
        check(causal(name), {"input_ids": tokens(), "attention_mask": mask})


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


@pytest.mark.parametrize("config", [hf.BloomConfig(**SIZES), hf.MptConfig(vocab_size=37, d_model=24, n_layers=1, n_heads=4)])
def test_a_model_with_attention_of_its_own_is_refused(config: Any) -> None:
    with pytest.raises(tw.OptionError, match="scores of its own"):
        hf.AutoModelForCausalLM.from_config(config, attn_implementation="tilewise")(tokens())


MASKS: dict[str, Any] = {
    "causal": masking_utils.causal_mask_function,
    "full": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "band": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.long)),
    "chunks after padding": masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 3, 5])),
}
PLACES = {"whole": (LENGTH, LENGTH, 0, 0), "decode": (1, LENGTH, 10, 0), "static": (4, LENGTH, 3, 0), "sliding": (5, 9, 10, 6)}


def same_table(*arguments: Any) -> bool:
    """Is the mask described, never stored, and the one that transformers makes?"""
    mask: Any = describe(*arguments)
    assert isinstance(mask, MaskTensor)
    want: Any = masking_utils.sdpa_mask(*arguments, allow_is_causal_skip=False)
    return torch.equal(mask.table(), want)


@pytest.mark.parametrize("pad", PADDINGS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MASKS)
def test_a_described_mask_is_the_table_of_transformers(kind: str, place: str, pad: str) -> None:
    n, s, q_offset, kv_offset = PLACES[place]
    assert same_table(BATCH, n, s, q_offset, kv_offset, MASKS[kind], padding(pad, q_offset + n).bool())


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


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CAUSAL)
def test_generate_gives_the_same_tokens(name: str, cache: str) -> None:
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    made = [causal(name, i).generate(tokens(), attention_mask=padding("left"), **options) for i in ("eager", "tilewise")]
    assert torch.equal(*made)


@pytest.mark.parametrize("make", [t5, bart])
def test_encoder_decoder_generates_the_same_tokens(make: Callable[[], Any]) -> None:
    model, made = make(), []
    for implementation in ("eager", "tilewise"):
        model.set_attn_implementation(implementation)
        made.append(model.generate(tokens(), attention_mask=padding("left"), max_new_tokens=9, do_sample=False, num_beams=2))
    assert torch.equal(*made)


def training(seed: int, reentrant: bool | None = None) -> dict[str, Tensor]:
    """One step of a training Llama with dropout; with gradient checkpointing of either kind unless `reentrant` is None."""
    model = build(hf.LlamaConfig(**TEXT, attention_dropout=0.3), hf.AutoModelForCausalLM).train()
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(seed)
    inputs, real = padded("left")
    return outcome(model, "tilewise", inputs | {"use_cache": False}, real)


def test_dropout_follows_the_seed_and_only_in_training() -> None:
    first, again, other = training(0), training(0), training(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output"], other["output"])
    assert torch.equal(output(*rows(), None, dropout=0.5), output(*rows(), None))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_repeats_masks_and_dropout(reentrant: bool) -> None:
    plain, checkpointed = training(0), training(0, reentrant)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


@pytest.mark.parametrize("pad", ["none", "left"])
def test_compiled_model(pad: str) -> None:
    model, (inputs, real) = causal("mistral", "tilewise"), padded(pad)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(*(m(**inputs, use_cache=False).logits[real] for m in (compiled, model)))


OFF_BY_ONE = {"mask_function": masking_utils.sliding_window_causal_mask_function(5)}


@pytest.mark.parametrize(("name", "wrong"), [("mistral", OFF_BY_ONE), ("llama", {"attention_mask": None})])
def test_the_check_catches_a_wrong_mask(name: str, wrong: dict[str, Any]) -> None:
    hf.AttentionInterface.register("wrong", attend)
    hf.AttentionMaskInterface.register("wrong", lambda **right: describe(**right | wrong))
    with pytest.raises(AssertionError, match="output"):
        check(causal(name), *padded("left"), implementation="wrong")


@pytest.mark.parametrize("module", ["tilewise.compat", "tilewise.compat.transformers"])
def test_importing_brings_in_and_registers_nothing(module: str) -> None:
    early = "'transformers' in sys.modules" if module == "tilewise.compat" else "False"
    code = (
        f"import {module}, sys; assert not {early}; import transformers as t; assert 'tilewise' not in t.AttentionInterface()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_real_weights() -> None:
    """Sentence embeddings of MiniLM, pooled over real tokens, agree with sdpa; they are not all the same."""
    theirs, ours = demo.embed("sdpa"), demo.embed("tilewise")
    assert np.abs(theirs - ours).max() <= TOLERANCE < np.abs(ours[0] - ours[1]).max()
