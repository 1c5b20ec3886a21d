"""What is made of attention over many ranks, for `test_ring_gloo.py`: language models, which must learn the same however rows
are shared out, and another library's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ring_workers import EXACT, Found, dist, distance
from torch import Tensor, nn
from torch.nn import functional

import tilewise as tw
from tilewise.compat import ring_flash_attn as theirs
from tilewise.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from tilewise.ring import api


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of "b n h d" at these positions."""
    angle = positions[:, None] / 100 ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    cos, sin = angle.cos()[:, None].to(x), angle.sin()[:, None].to(x)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Layer(nn.Module):
    """Attention of 4 heads over 2, and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor, positions: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (8, -1)).split([4, 2, 2], 2)
        x = x + self.out(attend(rotate(q, positions), rotate(k, positions), v).flatten(2))
        return x + self.down(functional.silu(self.up(self.after(x))))


class Model(nn.Module):
    """A language model of two layers; returns the sum of the losses of its rows."""

    def __init__(self, words: int = 23, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList([Layer(width), Layer(width)])

    def forward(
        self, ids: Tensor, labels: Tensor, positions: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions, attend)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def learns() -> Found:
    """Loss and every gradient of a language model in each layout against one device."""
    torch.manual_seed(5)
    model, found = Model().double(), {}
    ids = torch.randint(23, (2, 31))
    labels = functional.pad(ids[:, 1:], (0, 1), value=-100)
    for mask in (tw.Causal(), tw.Causal() & tw.Documents.from_lengths([11, 2, 18])):
        whole = model(ids, labels, torch.arange(31), lambda q, k, v, mask=mask: tw.attention(q, k, v, mask=mask))
        right = [whole.detach(), *torch.autograd.grad(whole, list(model.parameters()))]
        for layout in ("contiguous", "zigzag", "striped", "balanced"):
            where: dict[str, Any] = {"layout": layout, "mask": mask}
            mine = api.shard(ids, **where)
            loss = model(
                mine, api.roll(mine, -1, fill=-100, **where), api.positions(31, batch=2, **where),
                lambda q, k, v, where=where: api.attention(q, k, v, **where),
            )  # fmt: skip
            sums = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
            for x in sums:
                dist.all_reduce(x)
            names = ("loss", *(name for name, _ in model.named_parameters()))
            found |= {
                f"{layout}, {type(mask).__name__}, {name}": (distance(x, y), EXACT)
                for name, x, y in zip(names, sums, right, strict=True)
            }
    return found


def transformers_model() -> Found:
    """An unmodified Llama and a Mistral with windows, run sharded."""
    import transformers

    from tilewise.compat.ring_transformers import register

    hf: Any = transformers
    register()
    found, sizes = {}, {"vocab_size": 37, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 29, "initializer_range": 0.3}
    documents = tw.Documents.from_lengths([9, 1, 13])
    configs = {"llama": hf.LlamaConfig(**sizes), "mistral": hf.MistralConfig(**sizes, sliding_window=4)}
    for name, mask in (("llama", None), ("mistral", None), ("llama", documents)):
        torch.manual_seed(3)
        model = hf.AutoModelForCausalLM.from_config(configs[name], attn_implementation="tilewise").double().eval()
        ids = torch.randint(37, (1 if mask is not None else 2, 23))
        packed = torch.cat([torch.arange(x) for x in (9, 1, 13)])[None] if mask is not None else None
        whole = model(ids, position_ids=packed, use_cache=False).logits
        do = torch.randn(whole.shape, dtype=torch.float64)
        right = [whole.detach(), *torch.autograd.grad(whole, list(model.parameters()), do)]
        for layout in ("auto", "striped"):
            with tw.ring.sharded(layout=layout, mask=mask) as ring:
                at = ring.positions(23)
                positions = at[None] if packed is None else packed[:, at]
                mine = model(ring.shard(ids), position_ids=positions, use_cache=False).logits
            grads = torch.autograd.grad(mine, list(model.parameters()), do[:, at])
            for x in grads:
                dist.all_reduce(x)
            label = f"{name}, {layout}, {mask is not None}"
            found[f"{label}: logits"] = distance(mine, right[0][:, at]), EXACT
            for (what, _), x, y in zip(model.named_parameters(), grads, right[1:], strict=True):
                found[f"{label}: {what}"] = distance(x, y), EXACT
    return found


def their_names() -> Found:
    """ring-flash-attn's functions, packed sequences among them, each laid out as that library wants them."""
    world, rank, found = dist.get_world_size(), dist.get_rank(), {}
    rng = torch.Generator().manual_seed(4)
    qkv = torch.randn(2, 6 * world, 3, 4, 8, generator=rng, dtype=torch.float64).requires_grad_()
    for name, layout in (("ring", "contiguous"), ("zigzag_ring", "zigzag"), ("stripe", "striped")):
        call = getattr(theirs, f"{name}_flash_attn_qkvpacked_func")
        index = api.positions(6 * world, layout=layout)
        mine = call(qkv[:, index], causal=True, window_size=(5, 0), return_attn_probs=True)
        q, k, v = qkv.unbind(2)
        right: Any = flash_attn_func(q, k, v, causal=True, window_size=(5, 0), return_attn_probs=True)
        found |= _same_rows(name, mine[:2], (right[0][:, index], right[1][:, :, index]))
    packed = qkv.detach()[0].requires_grad_()
    lengths = torch.tensor([2, 4]) * world
    offsets = functional.pad(lengths.cumsum(0), (1, 0))
    q, k, v = packed.unbind(1)
    right = flash_attn_varlen_func(q, k, v, offsets, offsets, 0, 0, causal=True, return_attn_probs=True)
    for name, layout in (("ring", "contiguous"), ("zigzag_ring", "zigzag")):
        call = getattr(theirs, f"{name}_flash_attn_varlen_qkvpacked_func")
        parts = [api.positions(int(n), layout=layout) + int(at) for n, at in zip(lengths, offsets, strict=False)]
        index = torch.cat(parts)
        mine = call(packed[index], offsets // world, 0, causal=True, return_attn_probs=True)
        found |= _same_rows(f"{name}, packed", mine[:2], (right[0][index], right[1][:, index]))
    prepared = theirs.llama3_flash_attn_prepare_cu_seqlens(offsets, True, rank, world)
    index = api.positions(6 * world, layout="contiguous")
    mine: Any = theirs.llama3_flash_attn_varlen_qkvpacked_func(
        packed[index], *prepared[:4], 1, prepared[4], causal=True, return_attn_probs=True
    )
    return found | _same_rows("llama3", mine[:2], (right[0][index], right[1][:, index]))


def _same_rows(name: str, mine: Any, right: Any) -> Found:
    """out and lse of this rank's rows."""
    return {f"{name}: {what}": (distance(x, y), EXACT) for what, x, y in zip(("out", "lse"), mine, right, strict=True)}
