"""What a ring of ranks sends: k and v go round, each rank keeps its queries. Closed forms, of one rank.

Source: Liu et al. 2023, Ring Attention with Blockwise Transformers, section 3."""

from __future__ import annotations

from typing import NamedTuple

from .._errors import OptionError
from ..problem import Problem
from ..tiles import blocks
from .count import PARTIAL_BYTES


class Ring(NamedTuple):
    """Messages that one rank sends, and bytes of them; `state_bytes` is traffic of its own memory, of o and lse kept in float32
    between the steps of forward where no kernel keeps them on chip."""

    hops: int
    sent_bytes: int
    backward_hops: int
    backward_sent_bytes: int
    state_bytes: int


def ring(problem: Problem, ranks: int, rank: int = 0) -> Ring:
    """Queries and keys cut into `ranks` contiguous parts of ⌈n/ranks⌉ and ⌈s/ranks⌉ rows, the last ones shorter.

    forward     R − 1 hops with k and v in one message: every part passes through every rank but the last on its way
    backward    k and v once more, and R hops of dk and dv in float32, the last of which brings them home
    Bytes, equal parts      z·(R − 1)·b·g·s/R·(d + e), backward + 4·b·g·s·(d + e)
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise OptionError(f"rank: a ring of {ranks} ranks has none that is number {rank}")
    p = problem
    (n, s) = (_parts(size, ranks) for size in (p.n, p.s))
    row = p.b * p.g * (p.d + p.e)
    keys = (p.s - s[(rank + 1) % ranks]) * row * p.itemsize if ranks > 1 else 0
    grads = p.s * row * PARTIAL_BYTES if ranks > 1 else 0
    state = 2 * (ranks - 1) * p.b * p.h * n[rank] * (p.e + 1) * PARTIAL_BYTES
    home = ranks if ranks > 1 else 0
    return Ring(ranks - 1, keys, ranks - 1 + home, keys + grads, state)


def _parts(size: int, ranks: int) -> list[int]:
    """Rows of each rank."""
    lengths = [part.stop - part.start for part in blocks(size, max(1, -(-size // ranks)))]
    return lengths + [0] * (ranks - len(lengths))
