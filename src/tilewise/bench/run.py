"""One case from check to rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._errors import Unsupported
from ..testing import Result
from . import timing
from .cases import QKV, Case, Task
from .peers import PEERS, Peer, contender, tilewise
from .report import Note, Row
from .timing import REGIMES, Call, Clock
from .verify import verify

Tell = Callable[[str], None]
Change = Callable[[Any], Any]

LONG = 240
"""Characters of an error that a footnote repeats."""


@dataclass(frozen=True)
class Setting:
    """How to measure: where, against whom, and about how many seconds a regime of a pass."""

    device: str = "cpu"
    seconds: float = 1.0
    backend: str | None = None
    peers: tuple[Peer, ...] = PEERS[:1]


class Outcome(NamedTuple):
    """What one case gave."""

    rows: list[Row]
    notes: list[Note]


def run(case: Case, setting: Setting, tell: Tell) -> Outcome:
    """Check a case, then time its passes in both regimes; a case that is wrong anywhere is refused everywhere. `tell` hears
    what is going on."""
    tell(f"{case.name}: checking against the definition")
    with ieee():
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
            try:
                timed = _timed(task, verdict, setting, tell)
            except Exception as error:  # what cannot be timed, for want of memory say, must not end a long run
                failed = Result(case.name, case.dtype, "raised", math.inf, 0.0)
                timed = Outcome([_row(task, regime, {}, failed) for regime in REGIMES], [])
                notes.append(Note("tilewise", case.name, name, _one_line(error)))
            rows += timed.rows
            notes += timed.notes
    return Outcome(rows, notes)


def _timed(task: Task, verdict: Result, setting: Setting, tell: Tell) -> Outcome:
    """One pass that is right, in both regimes."""
    ready, notes = contenders(task, setting, tell)
    rows = []
    for regime, measure in REGIMES.items():
        tell(f"{task.case.name} {task.name}: timing {', '.join(ready)}, {regime}")
        rows.append(_row(task, regime, measure(ready, Clock(setting.device), setting.seconds), verdict))
    return Outcome(rows, notes)


@contextmanager
def ieee() -> Iterator[None]:
    """float32 means float32 for everybody: no TF32 in products, torch's own or compiled."""
    before = torch.get_float32_matmul_precision()
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


def contenders(task: Task, setting: Setting, tell: Tell, change: Change | None = None) -> tuple[dict[str, Call], list[Note]]:
    """A warm call of tilewise and of each peer that can run this pass and agrees with it, and why the others cannot. `change`
    is made to whatever does not compile itself."""
    torch.compiler.reset()  # a pass compiles its own functions, and none of them looks through those of another
    mine = contender(tilewise(setting.backend), task, change)
    timing.warm_up(mine, Clock(setting.device))
    ready, notes = {"tilewise": mine}, []
    for peer in setting.peers:
        tell(f"{task.case.name} {task.name}: {'compiling' if peer.slow_start else 'warming up'} {peer.name}")
        reasons = peer.reasons(task) or _try(peer, task, ready, setting, change)
        if reasons:
            notes.append(Note(peer.name, task.case.name, task.name, reasons))
    return ready, notes


def _try(peer: Peer, task: Task, ready: dict[str, Call], setting: Setting, change: Change | None) -> str:
    """Add a peer to those that are ready; or the reason why it is not, whatever kind of error it raised."""
    try:
        with _explained():
            call = contender(peer, task, None if peer.slow_start else change)
            timing.warm_up(call, Clock(setting.device))
            theirs, ours = call, ready["tilewise"]
            if task.problem.dropout is not None:  # which pairs are dropped is everybody's own choice, the rest is not
                theirs, ours = (contender(one, task.without_dropout()) for one in (peer, tilewise(setting.backend)))
            difference = _difference(peer, task, theirs(), ours())
    except Exception as error:
        return _one_line(error)
    if not difference <= tolerance(task.x.q.dtype):
        return f"computes something else (relative difference {difference:.1e})"
    ready[peer.name] = call
    return ""


def _difference(peer: Peer, task: Task, theirs: Any, ours: Any) -> float:
    """How far a peer's o, or the gradient that is furthest, is from ours, which has been checked: relative, in the L2 norm."""
    lone = isinstance(ours, torch.Tensor)
    differences = []
    for name, a, b in zip(("q",) if lone else task.case.needs, *([x] if lone else x for x in (theirs, ours)), strict=True):
        a, b = a.detach().double(), b.detach().double()
        a = a.transpose(1, 2) if peer.layout == "b h n d" and name in QKV else a
        differences.append((a - b).norm() / b.norm())
    return float(torch.stack(differences).max())  # NaN if one is


def tolerance(dtype: torch.dtype) -> float:
    """How far a peer may be from us: far above rounding, far below another mask or scale; below TF32 where float32 is asked."""
    return torch.finfo(dtype).eps ** (0.5 if dtype.itemsize == 2 else 0.7)


@contextmanager
def _explained() -> Iterator[None]:
    """torch says in warnings why a kernel cannot run, and in the error only that none can: put both into the error."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            said = [str(warning.message).partition(" (Triggered")[0].strip() for warning in heard]
            why = [text for text in dict.fromkeys(said) if not text.endswith(("because:", "runtime disabled."))]
            raise NotImplementedError(" ".join(["no such kernel:", *why])) from error


def _row(task: Task, regime: str, times: dict[str, list[float]], verdict: Result) -> Row:
    amount = task.work
    rates = {who: amount / timing.median(seconds) for who, seconds in times.items()}
    widest = max((timing.spread(seconds) for seconds in times.values()), default=None)
    ours, case = rates.pop("tilewise", None), task.case
    return Row(case.group, case.name, task.name, regime, task.unit, amount, ours, rates, widest, verdict.error, verdict.budget)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{text[:LONG] if text else 'no reason given'} ({type(error).__name__})"
