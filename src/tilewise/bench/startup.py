"""One process's first call, timed: `python -m tilewise.bench.startup DEVICE WHO`, where WHO is a peer or "tilewise", or
"tilewise:BACKEND". Prints one line of JSON: when it was ready, in seconds since 1970, and how long both calls took."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import pairwise


def main(device: str, who: str) -> None:
    """Import, put a tensor on the device, then the first forward and the first backward."""
    import torch

    from .cases import Task
    from .catalog import tiny
    from .peers import PEERS, contender, tilewise
    from .timing import Clock

    name, _, backend = who.partition(":")
    peer = tilewise(backend or None) if name == "tilewise" else next(peer for peer in PEERS if peer.name == name)
    clock, marks = Clock(device), []

    def mark() -> None:
        clock.sync()
        marks.append(time.time())

    step = Task.of(tiny(device), "step", device)
    can_step = not list(peer.why_not(step))
    task = replace(step, name="recorded" if can_step else "call")
    torch.zeros((), device=device).item()
    mark()
    o = contender(peer, task)()
    mark()
    if can_step:
        o.backward(torch.ones_like(o))
        mark()
    forward, *backward = (b - a for a, b in pairwise(marks))
    found = {"case": task.case.name, "ready": marks[0], "forward_s": forward, "backward_s": next(iter(backward), None)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
