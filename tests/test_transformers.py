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
from tilewise.compat.transformers import attend, describe, register

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
        with pytest.raises(tw.OptionError, match=r"packed alike|must start at 0"):
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


@pytest.mark.parametrize("config", [hf.BloomConfig(**SIZES), hf.MptConfig(vocab_size=37, d_model=24, n_layers=1, n_heads=4)])
def test_a_model_with_attention_of_its_own_is_refused(config: Any) -> None:
    with pytest.raises(tw.OptionError, match="scores of its own"):
        hf.AutoModelForCausalLM.from_config(config, attn_implementation="tilewise")(tokens())


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


def test_dropout_follows_the_seed() -> None:
    first, again, other = training(0), training(0), training(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output"], other["output"])


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
