"""One step's tensors: the rows of some batch entries and key heads, and the scores between them. Query heads that share a
key head are folded into its rows, so a step is one batched matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...mask import Tile
from ...problem import Inputs, Problem
from ...tiles import Visit
from .dropout import keep as dropout_keep


def why_not(problem: Problem, named: bool) -> tuple[str, ...]:
    """Nothing that can be described is refused."""
    del named
    return ("tensors on the meta device hold no values",) if problem.device == "meta" else ()


def accumulator(problem: Problem) -> torch.dtype:
    """The dtype of scores, states and sums: float32, or float64 for float64 inputs."""
    return torch.float64 if problem.dtype == "float64" else torch.float32


def made_of(problem: Problem, given: Tensor) -> torch.dtype:
    """The dtype of o and of the gradients of q, k and v."""
    return accumulator(problem) if problem.wide else given.dtype


@dataclass(frozen=True)
class Chunk:
    """Batch entries b and key heads g of a problem, r = h / g query heads each. Rows are "b g (r rows) d"."""

    problem: Problem
    x: Inputs[Tensor]
    b: slice
    g: slice
    clean: bool = True
    """Whether q, k and v may be multiplied without care for what hidden entries hold: logits need none where no derivative
    is taken, weights none where v is finite."""

    @property
    def heads(self) -> slice:
        """The query heads of these key heads."""
        return slice(self.g.start * self.problem.group, self.g.stop * self.problem.group)

    def fold(self, x: Tensor, i: slice) -> Tensor:
        """Rows i of a query-side tensor "b n h d" as "b g (r rows) d", in the accumulator's dtype."""
        x = x[self.b, i, self.heads].to(accumulator(self.problem))
        return x.unflatten(2, (-1, self.problem.group)).permute(0, 2, 3, 1, 4).flatten(2, 3)

    def fold_rows(self, x: Tensor, i: slice) -> Tensor:
        """Rows i of a statistic "b h n" as "b g (r rows) 1"."""
        x = x[self.b, self.heads, i].to(accumulator(self.problem))
        return x.unflatten(1, (-1, self.problem.group)).flatten(2, 3)[..., None]

    def keys(self, x: Tensor, j: slice) -> Tensor:
        """Rows j of a key-side tensor "b s g d" as "b g cols d"."""
        return x[self.b, j, self.g].to(accumulator(self.problem)).transpose(1, 2)

    def unfold(self, x: Tensor) -> Tensor:
        """ "b g (r rows) d" back to "b rows h d"."""
        return x.unflatten(2, (self.problem.group, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def split(self, x: Tensor) -> Tensor:
        """A tile "b g (r rows) cols" as "b g r rows cols"."""
        return x.unflatten(2, (self.problem.group, -1))

    def logits(self, q: Tensor, k: Tensor, visit: Visit) -> tuple[Tensor, Tensor | None]:
        """s "b g (r rows) cols", -inf where hidden, and which pairs are seen (None: all)."""
        score = self.problem.score
        seen = None if visit.kind == Tile.FULL else self._keep(visit)
        s = self.split(self._product(q, k)) * score.scale
        if self.x.bias is not None:
            s = s + self.bias(self.x.bias, visit)
        if self.x.alibi is not None:
            s = s - self.slopes(self.x.alibi) * self.distance(visit)
        if score.softcap is not None:
            s = s if seen is None or self.clean else torch.where(seen, s, 0)
            s = score.softcap * torch.tanh(s / score.softcap)
        if seen is not None:
            s = torch.where(seen, s, -torch.inf)
        if self.x.bias is not None:
            seen = s != -torch.inf  # a bias of -inf hides as a mask does
        return s.flatten(2, 3), None if seen is None else seen.expand(s.shape).flatten(2, 3)

    def _product(self, q: Tensor, k: Tensor) -> Tensor:
        """q·kᵀ. Autograd would multiply the zero gradient of a hidden pair by what k holds; so where that may be NaN or inf,
        such rows meet as numbers that no derivative goes through."""
        if self.clean:
            return q @ k.transpose(-1, -2)
        rows, cols = q.isfinite().all(-1, keepdim=True), k.isfinite().all(-1, keepdim=True)
        s = torch.where(rows, q, 0) @ torch.where(cols, k, 0).transpose(-1, -2)
        return torch.where(rows & cols.transpose(-1, -2), s, q.detach() @ k.detach().transpose(-1, -2))

    def bias(self, bias: Tensor, visit: Visit) -> Tensor:
        """The bias of a tile, "b g r rows cols" up to broadcasting."""
        p = self.problem
        whole = bias.expand(p.b, p.h, p.n, p.s)[self.b, self.heads, visit.i, visit.j]
        return whole.to(accumulator(p)).unflatten(1, (-1, p.group))

    def slopes(self, alibi: Tensor) -> Tensor:
        """ALiBi slopes as "b g r 1 1"."""
        alibi = alibi.expand(self.problem.b, self.problem.h)[self.b, self.heads].to(accumulator(self.problem))
        return alibi.unflatten(1, (-1, self.problem.group))[..., None, None]

    def distance(self, visit: Visit) -> Tensor:
        """|i − j| in positions, "b 1 1 rows cols" up to broadcasting."""
        (_, i), (_, j) = self._rows(visit)
        return (i - j).abs().to(accumulator(self.problem))

    def drop(self, visit: Visit) -> Tensor | float:
        """What dropout multiplies a tile's weights by."""
        p = self.problem
        if p.dropout is None:
            return 1.0
        (sequence, i), (_, j) = self._rows(visit)
        head = torch.arange(self.heads.start, self.heads.stop, device=i.device).view(1, -1, p.group, 1, 1)
        keep = dropout_keep(p.dropout, sequence, head, i, j)
        whole = keep.expand(self.b.stop - self.b.start, *keep.shape[1:]).flatten(2, 3)
        return whole.to(accumulator(p)) * p.dropout.scale

    def _rows(self, visit: Visit) -> tuple[list[Tensor], list[Tensor]]:
        """(sequence, position) of the tile's rows as "b 1 1 rows 1", and of its columns as "b 1 1 1 cols"."""
        device, layout = self.x.q.device, self.problem.layout
        rows, cols = (
            [torch.from_numpy(np.array(x)).to(device)[:, None, None] for x in side]
            for side in (layout.queries(self.b, visit.i), layout.keys(self.b, visit.j))
        )
        return [x[..., :, None] for x in rows], [x[..., None, :] for x in cols]

    def _keep(self, visit: Visit) -> Tensor:
        """The mask of a tile, "b g r rows cols" up to broadcasting."""
        grid = self.problem.mask.grid(self.problem.layout, self.b, visit.i, visit.j, self.heads)
        keep = torch.from_numpy(np.array(grid)).to(self.x.q.device)
        return keep[:, :, None] if keep.shape[1] == 1 else keep.unflatten(1, (-1, self.problem.group))


def weigh(w: Tensor, x: Tensor, seen: Tensor | None, clean: bool) -> Tensor:
    """w @ x over seen pairs only, for finite w exactly as IEEE arithmetic would give it if the hidden ones were not there.

    A product multiplies, and 0·NaN is NaN; so where x may hold NaN or inf (not `clean`) those entries are taken out and
    what they contribute, NaN or an infinity, is counted by products of indicators. No branch looks at the data.
    """
    if seen is None or clean:
        return w @ x
    finite = x.isfinite()
    result = w @ torch.where(finite, x, 0)

    def count(pairs: Tensor, entries: Tensor) -> Tensor:
        return (pairs & seen).to(w.dtype) @ entries.to(w.dtype)

    up, down = x == torch.inf, x == -torch.inf
    positive, negative = w > 0, w < 0
    plus = count(positive, up) + count(negative, down) > 0
    minus = count(positive, down) + count(negative, up) > 0
    nan = (count(seen, x.isnan()) + count(~(positive | negative), up | down) > 0) | (plus & minus)
    extra = torch.where(nan, torch.nan, torch.where(plus, torch.inf, torch.where(minus, -torch.inf, 0.0)))
    return result + extra.to(result.dtype)
