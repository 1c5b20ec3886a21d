"""Attention over many devices. A schedule is a value: it can be proved, priced and run.

`runs owners sight program teams moves heads tree script schedule` say what is done, `formulas proof verify` that it is right,
`links prices survey passes outline events simulate choose` how long it takes; all of them are pure (NumPy only) and speak of
rows, heads and ranks, never of tensors. `execute kernel local` run plans on tensors, the rest runs them over torch.distributed.

The names below are what users call; torch.distributed is imported when the first of them is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import attention as attention
    from .api import attention_with_lse as attention_with_lse
    from .api import positions as positions
    from .api import roll as roll
    from .api import shard as shard
    from .api import sharded as sharded
    from .api import unshard as unshard

CALLS = ("attention", "attention_with_lse", "positions", "roll", "shard", "sharded", "unshard")


def __getattr__(name: str) -> Any:
    if name in CALLS:
        return getattr(import_module(".api", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *CALLS]
