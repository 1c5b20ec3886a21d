"""Key tiles outside, query tiles inside: FlashAttention-1, forward and backward, and FlashAttention-2's backward with atomics.
What is unfinished of a query row, o with its statistics and dq, goes to memory after every tile and is read again for the next.

Source: Dao et al. 2022, FlashAttention, algorithms 1 and 4; Dao 2023, FlashAttention-2, algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .._errors import OptionError
from ..problem import Problem
from ..tiles import TileShape
from .count import Cost, Moved, tidy
from .flash import bias_once, delta, tiles_of
from .visits import Visits, bias_size, entries


@dataclass(frozen=True)
class Accounting:
    """What "FlashAttention-1" leaves open and what changes the count."""

    accumulator_bytes: int | None = None
    """Bytes of a number of o and dq while they are unfinished; None: those of the dtype, as the paper counts."""
    statistics: tuple[str, ...] = ("m", "l")
    """What is kept of a row beside o: ("m", "l") or ("lse",)."""
    zeroed: tuple[str, ...] = ()
    """What is filled with zeros in memory first, so that it is read at the first visit too: of "o" (with its statistics), "dq",
    "dk" and "dv"."""
    delta: Literal["every", "first", "before"] = "first"
    """When backward takes delta = rowsum(do∘o): at every visit, at a row's first one, or in a kernel of its own."""
    atomic: bool = False
    """dq is added up in memory by programs that do not wait for each other, in accumulator_bytes until a last kernel converts
    it. Its part of a tile is then whole, for ds goes through shared memory; else warps that own keys each hold a part."""

    def __post_init__(self) -> None:
        if self.statistics not in (("m", "l"), ("lse",)):
            raise OptionError(f"accounting: statistics are ('m', 'l') or ('lse',), got {self.statistics}")
        if self.delta not in ("every", "first", "before"):
            raise OptionError(f"accounting: delta is taken at 'every' visit, at the 'first' or 'before', got {self.delta!r}")
        if unknown := set(self.zeroed) - {"o", "dq", "dk", "dv"}:
            raise OptionError(f"accounting: only o, dq, dk and dv are filled with zeros, got {', '.join(sorted(unknown))}")
        if self.accumulator_bytes is not None and self.accumulator_bytes < 1:
            raise OptionError(f"accounting: an accumulator has at least one byte, got {self.accumulator_bytes}")

    def accumulator(self, problem: Problem) -> int:
        """Bytes of a number that is unfinished."""
        return self.accumulator_bytes or problem.itemsize


LEAN = Accounting(statistics=("lse",))
"""Nothing twice: no zeros, accumulators of the dtype, o read once in backward. (3·T_c + 1)·N·d forward, (4·T_c + 4)·N·d
backward."""

LITERAL = Accounting(zeroed=("o", "dq", "dk", "dv"), delta="every")
"""Algorithms 1 and 4 word for word: (3·T_c + 3)·N·d forward, (5·T_c + 7)·N·d backward."""

RELEASED = Accounting(accumulator_bytes=4, statistics=("lse",))
"""The kernels released in May 2022: float32 o_tmp and dq_tmp, lse in place of m and l, delta saved at the first visit."""

ATOMIC = Accounting(accumulator_bytes=4, statistics=("lse",), zeroed=("dq",), delta="before", atomic=True)
"""FlashAttention-2's backward: delta first, dq by atomic adds in float32, converted at the end. Five products, not seven."""


SUM_BYTES = 8
"""Bytes of a float32 number that a warp writes to shared memory and reads, to be summed with what other warps hold."""


def forward(problem: Problem, shape: TileShape, accounting: Accounting = LEAN) -> Cost:
    """For each block of keys, k and v once for all heads that share them; then at each of its visits q, and o, m and l back and
    forth. A sink is what a row starts from."""
    p, z, y, a = problem, problem.itemsize, problem.lse_itemsize, accounting.accumulator(problem)
    zeroed = "o" in accounting.zeroed
    total = Cost()
    for times, one in entries(p, shape):
        query = {
            "q": Moved(z * one.rows * p.d, 0, z * one.seen_rows * p.d),
            "o": _kept(p, one, p.e, (a, z), zeroed),
            "bias": Moved(z * bias_size(p, one)),
            **{name: _kept(p, one, 1, (y, y), zeroed) for name in accounting.statistics},
        }
        keys = {name: z * one.seen_cols * x for name, x in (("k", p.d), ("v", p.e))}
        work = Cost(
            2 * one.pairs * (p.d + p.e),
            one.pairs + one.rows,
            query,
            chip_bytes=z * (one.rows * p.d + one.cols * (p.d + p.e)),
            reader_bytes=z * one.rows * p.d + SUM_BYTES * one.rows * p.e,
        )
        key = Cost(tensors={name: Moved(x, 0, x) for name, x in keys.items()}, chip_bytes=sum(keys.values()))
        total += ((work + tiles_of(one)) * p.h + key * p.g) * times
    return tidy(total + bias_once(p, shape))


def backward(problem: Problem, shape: TileShape, accounting: Accounting = LEAN) -> Cost:
    """For each block of keys, k and v in, dk and dv out; at each of its visits q, do, the statistics and delta, and dq back and
    forth. s, dp, dv, dk and dq are five products."""
    p, z, y, a = problem, problem.itemsize, problem.lse_itemsize, accounting.accumulator(problem)
    final = a if accounting.atomic else z
    heads = p.b * p.h
    total = delta(p) if accounting.delta == "before" else Cost()
    for times, one in entries(p, shape):
        query = {
            **{name: Moved(z * one.rows * x, 0, z * one.seen_rows * x) for name, x in (("q", p.d), ("do", p.e))},
            **{name: Moved(y * one.rows, 0, y * one.seen_rows) for name in accounting.statistics},
            **_delta(p, one, accounting),
            "bias": Moved(z * bias_size(p, one)),
        }
        keys = {name: z * one.seen_cols * x for name, x in (("k", p.d), ("v", p.e))}
        key = {name: Moved(x, 0, x) for name, x in keys.items()}
        for name, x in (("dk", p.d), ("dv", p.e)):
            size, filled = z * p.s * x, name in accounting.zeroed
            key[name] = Moved(0, size * (1 + filled), size * (1 + filled))
        query["dq"] = _kept(p, one, p.d, (a, final), "dq" in accounting.zeroed)
        chip, reader = z * (one.rows + one.cols) * (p.d + p.e), 2 * z * one.rows * (p.d + p.e)
        if accounting.atomic:  # ds written and read; k read by everybody
            chip, reader = chip + 2 * z * one.pairs, reader + z * one.cols * p.d
        else:  # k read by those who own it; parts of dq in float32
            chip, reader = chip + z * one.cols * p.d, reader + SUM_BYTES * one.rows * p.d
        work = Cost(2 * one.pairs * (3 * p.d + 2 * p.e), one.pairs, query, chip_bytes=chip, reader_bytes=reader)
        total += ((work + tiles_of(one)) * p.h + Cost(tensors=key, chip_bytes=sum(keys.values())) * p.g) * times
    if accounting.atomic:
        total += Cost(tensors={"dq": Moved(heads * p.n * p.d * a, heads * p.n * p.d * z, heads * p.n * p.d * (a + z))})
    return tidy(total + bias_once(p, shape))


def _kept(p: Problem, one: Visits, width: int, sizes: tuple[int, int], zeroed: bool) -> Moved:
    """What a row keeps in memory between its visits, `width` numbers of sizes (unfinished, finished): written after each
    visit, read before each but the first. Rows of no visit are written once; zeroed ones are written first and always read."""
    unfinished, finished = sizes
    again, hidden = one.rows - one.seen_rows, p.n - one.seen_rows
    if not zeroed:
        write = unfinished * again + finished * (one.seen_rows + hidden)
        return Moved(width * unfinished * again, width * write, width * finished * p.n)
    write = unfinished * (again + p.n) + finished * one.seen_rows
    least = unfinished * (p.n + one.seen_rows) + finished * one.seen_rows
    return Moved(width * unfinished * one.rows, width * write, width * least)


def _delta(p: Problem, one: Visits, accounting: Accounting) -> dict[str, Moved]:
    """o, and delta = rowsum(do∘o), where backward needs them."""
    z, y = p.itemsize, p.lse_itemsize
    if accounting.delta == "every":
        return {"o": Moved(z * one.rows * p.e, 0, z * one.seen_rows * p.e)}
    if accounting.delta == "before":
        return {"delta": Moved(y * one.rows, 0, y * one.seen_rows)}
    o = z * one.seen_rows * p.e
    return {"o": Moved(o, 0, o), "delta": Moved(y * (one.rows - one.seen_rows), y * one.seen_rows, y * one.seen_rows)}
