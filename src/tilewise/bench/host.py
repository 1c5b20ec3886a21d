"""What a call costs the computer that makes it: microseconds of a call so small that nothing else takes time, and seconds until
a first call has run, with and without the kernels of an earlier process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .._errors import Unsupported
from . import timing
from .cases import Case, Task
from .report import Note
from .run import Setting, Tell, contenders, ieee
from .timing import Clock
from .verify import verify

COMPILE = partial(torch.compile, fullgraph=True, dynamic=False)

LIMIT_S = 300
"""Seconds after which a process that makes its first call is given up."""


@dataclass(frozen=True)
class HostRow:
    """Microseconds of one call of the pass `name`, as it is ("eager") or under torch.compile ("compiled")."""

    case: str
    name: str
    how: str
    who: str
    us: float
    spread: float

    def json(self) -> dict[str, object]:
        return {("pass" if key == "name" else key): value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class StartRow:
    """Seconds until a new process has imported what it needs and can use the device, of its first forward, and of the first
    backward after that; with a "cold" cache of kernels (empty) or a "warm" one (filled by an earlier process)."""

    case: str
    who: str
    cache: str
    ready_s: float
    forward_s: float
    backward_s: float | None
    name: str = "first call"

    def json(self) -> dict[str, object]:
        return {("pass" if key == "name" else key): value for key, value in asdict(self).items()}


def calls(case: Case, setting: Setting, tell: Tell) -> Iterator[HostRow | Note]:
    """Every pass of a tiny case, eager and compiled, for us and every peer."""
    tell(f"{case.name}: checking against the definition")
    try:
        wrong = [v for v in verify(case, setting.device, setting.backend).values() if not v.ok]
    except Unsupported as error:
        wrong = list(error.reasons)
    if wrong:
        yield Note("tilewise", case.name, case.passes[0], f"not right, so not timed: {wrong[0]}")
        return
    for how, change in (("eager", None), ("compiled", COMPILE)):
        for name in case.passes:
            yield from _pass(Task.of(case, name, setting.device), how, change, setting, tell)


def _pass(task: Task, how: str, change: Any, setting: Setting, tell: Tell) -> Iterator[HostRow | Note]:
    case = task.case.name
    if how == "eager":  # what compiles itself has no other form
        setting = replace(setting, peers=tuple(peer for peer in setting.peers if not peer.slow_start))
    with ieee():
        try:
            ready, notes = contenders(task, setting, tell, change)
        except Exception as error:
            yield Note("tilewise", case, f"{task.name}, {how}", f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return
        tell(f"{case} {task.name}, {how}: timing {', '.join(ready)}")
        for who, seconds in timing.host(ready, Clock(setting.device)).items():
            yield HostRow(case, task.name, how, who, 1e6 * timing.median(seconds), timing.spread(seconds))
    yield from (note._replace(name=f"{note.name}, {how}") for note in notes)


def starts(setting: Setting, tell: Tell) -> Iterator[StartRow | Note]:
    """First calls of us and of every peer that exists here, each twice in processes of their own that share one cache."""
    us = "tilewise" if setting.backend is None else f"tilewise:{setting.backend}"
    for who in (us, *(peer.name for peer in setting.peers if not peer.absent(setting.device))):
        with TemporaryDirectory() as folder:
            for cache in ("cold", "warm"):
                tell(f"first call of {who}, {cache} cache")
                yield _start(who, cache, folder, setting.device)


def _start(who: str, cache: str, folder: str, device: str) -> StartRow | Note:
    places = {name: os.path.join(folder, name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    command, name = [sys.executable, "-m", "tilewise.bench.startup", device, who], who.partition(":")[0]
    begun = time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **places})
    except subprocess.TimeoutExpired:
        return Note(name, "first call", cache, f"took longer than {LIMIT_S} s")
    if done.returncode:
        return Note(name, "first call", cache, (done.stderr.strip().splitlines() or ["it failed without a word"])[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    return StartRow(found["case"], name, cache, found["ready"] - begun, found["forward_s"], found["backward_s"])
