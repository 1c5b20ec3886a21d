"""How many queries a task has and how many keys a block: they change speed and memory, never the result beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...problem import Problem
from ...tiles import TileShape
from .choose import choose
from .pack import key_columns, value_columns
from .target import Target, l2_bytes

KEYS = 192
"""Keys of a block. Sums run block by block, so this is the same on every machine of one instruction set."""

TILED_KEYS = 512
"""The same where products are made of tiles."""

SHARE = 3
"""The part of a core's second-level cache that a task's queries and outputs may take: one in so many."""

TILED_SHARE = 2
"""The same for tiles, whose products are done so soon that packing keys again counts."""

MOST_PANELS = 32
TASKS = 4
"""Tasks that each thread should find, so that none waits long for the last one."""


@dataclass(frozen=True)
class Config:
    """`panels` of queries a task at most, `keys` a block."""

    target: Target
    panels: int
    keys: int
    rows: int
    workspace_bytes: int = 0
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a first call has found out that holds for all calls of the plan."""

    @property
    def shape(self) -> TileShape:
        return TileShape(self.rows, self.keys)


def configure(problem: Problem) -> Config:
    """Blocks of queries that fit the cache; a block of keys no longer than there are keys."""
    p, target = problem, choose(problem)
    assert target is not None
    size, share = (2, TILED_SHARE) if target.amx else (4, SHARE)
    panel_bytes = target.panel * (size * key_columns(target, p.d) + 4 * value_columns(target, p.e))
    panels = max(1, min(MOST_PANELS, l2_bytes() // share // panel_bytes, -(-p.n // target.panel)))
    step = max(target.rows, target.step)
    keys = min(TILED_KEYS if target.amx else KEYS, max(-(-p.s // step) * step, step))
    return Config(target, panels, keys, max(1, min(p.n, panels * target.panel)))


def rows_of_task(config: Config, heads: int, n: int, threads: int) -> int:
    """Query rows of a task: whole panels, as many as fit, or fewer where threads would find too few tasks."""
    panel = config.target.panel
    panels = -(-n // panel)
    blocks = max(-(-panels // config.panels), min(panels, -(-TASKS * threads // max(heads, 1)) if threads > 1 else 1))
    return -(-panels // blocks) * panel
