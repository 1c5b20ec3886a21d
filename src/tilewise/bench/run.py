"""One case from check to rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._errors import Unsupported
from ..testing import Result
from . import timing
from .cases import Case, Task
from .peers import PEERS, Peer, contender, tilewise
from .report import Note, Row
from .timing import REGIMES, Call, Clock
from .verify import verify

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """How to measure: where, against whom, and about how many seconds a regime of a pass."""

    device: str = "cpu"
    seconds: float = 1.0
    backend: str | None = None
    peers: tuple[Peer, ...] = PEERS


class Outcome(NamedTuple):
    """What one case gave."""

    rows: list[Row]
    notes: list[Note]


def run(case: Case, setting: Setting, tell: Tell) -> Outcome:
    """Check a case, then time its passes in both regimes; a case that is wrong anywhere is refused everywhere. `tell` hears
    what is going on."""
    tell(f"{case.name}: checking against the definition")
    try:
        verdicts = verify(case, setting.device, setting.backend)
    except Unsupported as error:
        return Outcome([], [Note("tilewise", case.name, name, "; ".join(error.reasons)) for name in case.passes])
    rows, notes = [], []
    for name, verdict in verdicts.items():
        task = Task.of(case, name, setting.device)
        if not all(v.ok for v in verdicts.values()):
            rows += [_row(task, regime, {}, verdict) for regime in REGIMES]
            notes += [Note("tilewise", case.name, name, verdict.detail)] if verdict.detail else []
            continue
        ready, refused = _contenders(task, setting, tell)
        notes += refused
        for regime, measure in REGIMES.items():
            tell(f"{case.name} {name}: timing {', '.join(ready)}, {regime}")
            rows.append(_row(task, regime, measure(ready, Clock(setting.device), setting.seconds), verdict))
    return Outcome(rows, notes)


def _contenders(task: Task, setting: Setting, tell: Tell) -> tuple[dict[str, Call], list[Note]]:
    """A warm call of tilewise and of each peer that can run this pass and agrees with it, and why the others cannot."""
    clock = Clock(setting.device)
    mine = contender(tilewise(task.case, setting.backend), task)
    timing.warm_up(mine, clock)
    ready, notes = {"tilewise": mine}, []
    for peer in setting.peers:
        tell(f"{task.case.name} {task.name}: {'compiling' if peer.slow_start else 'warming up'} {peer.name}")
        reasons = "; ".join(peer.why_not(task.problem)) or _try(peer, task, ready, clock)
        if reasons:
            notes.append(Note(peer.name, task.case.name, task.name, reasons))
    return ready, notes


def _try(peer: Peer, task: Task, ready: dict[str, Call], clock: Clock) -> str:
    """Add a peer to those that are ready; or the reason why it is not, whatever kind of error it raised."""
    try:
        call = contender(peer, task)
        timing.warm_up(call, clock)
        difference = _difference(peer, task, call, ready["tilewise"])
    except Exception as error:
        return _one_line(error)
    if not difference <= torch.finfo(task.x.q.dtype).eps ** 0.5:  # far above rounding, far below another mask or scale
        return f"computes something else (relative difference {difference:.1e})"
    ready[peer.name] = call
    return ""


def _difference(peer: Peer, task: Task, theirs: Call, ours: Call) -> float:
    """How far a peer's o, or dq for backward, is from ours, which has been checked: relative, in the L2 norm."""
    a, b = ((x[0] if task.name == "backward" else x).detach().double() for x in (theirs(), ours()))
    a = a.transpose(1, 2) if peer.layout == "b h n d" else a
    return float((a - b).norm() / b.norm())


def _row(task: Task, regime: str, times: dict[str, list[float]], verdict: Result) -> Row:
    amount = task.work
    rates = {who: amount / timing.median(seconds) for who, seconds in times.items()}
    widest = max((timing.spread(seconds) for seconds in times.values()), default=None)
    ours = rates.pop("tilewise", None)
    return Row(task.case.name, task.name, regime, task.unit, ours, rates, widest, verdict.error, verdict.budget)


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[0][:160] if lines else 'no reason given'} ({type(error).__name__})"
