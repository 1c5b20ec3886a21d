"""What holds for all calls of a plan is found out once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


def remember(known: dict[Any, Any], what: Hashable, like: Tensor, make: Callable[[], Any]) -> Any:
    """What `make` finds out about a plan, once for each stream, since nothing waits for what another stream computes. A graph
    that is being captured finds out for itself, so that a replay looks again."""
    if not like.is_cuda:
        key = what
    elif torch.cuda.is_current_stream_capturing():
        return make()
    else:
        key = (what, torch._C._cuda_getCurrentRawStream(like.device.index))
    found = known.get(key)
    if found is None:
        found = known[key] = make()
    return found
