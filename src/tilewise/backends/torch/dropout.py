"""The dropout pattern of `tilewise.dropout`, computed by torch on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dropout import MULTIPLIERS, ROUNDS, WEYL, WORD, Dropout


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 in int64: a product may wrap, but its 64 bits are those of the unsigned one."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((b >> 32) & WORD) ^ c1 ^ k0, b & WORD
        c2, c3 = ((a >> 32) & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def keep(dropout: Dropout, sequence: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """True where a pair survives. sequence, head and i broadcast with "... rows 1"; j "... 1 cols" holds key positions.

    Four neighbouring keys share one evaluation, so it runs once for each distinct j // 4.
    """
    quads, lane = torch.unique(j >> 2, return_inverse=True)
    head = head + dropout.head
    words = torch.stack(philox((quads & WORD, i & WORD, head & WORD, sequence & WORD), dropout.key), dim=-1)
    shape = torch.broadcast_shapes(words.shape[:-2], lane.shape[:-1]) + lane.shape[-1:]
    flat = words.flatten(-2).expand(*shape[:-1], -1)
    return torch.gather(flat, -1, (lane * 4 + (j & 3)).expand(shape)) >= dropout.threshold
