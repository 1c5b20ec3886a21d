"""How long a call takes: contenders take turns, so that a slow second of the computer hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch

Call = Callable[[], Any]
Measure = Callable[[dict[str, Call], "Clock", float], dict[str, list[float]]]

REST_S = 0.05
"""Pause before each turn of the burst regime."""

BURST_CALLS = 2
"""Calls in one turn of the burst regime."""

ROUNDS = 4
"""Turns that each contender has in the sustained regime."""

LEAST_ROUNDS = 3
"""Turns that each contender has in the burst regime even if that takes longer than was asked for."""


class Clock:
    """Seconds of single calls on one device: by events on CUDA, by the processor's clock elsewhere."""

    def __init__(self, device: str) -> None:
        self.kind = torch.device(device).type

    def sync(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.kind == "cuda":
            torch.cuda.synchronize()
        elif self.kind == "mps":
            torch.mps.synchronize()

    def laps(self, call: Call, times: int) -> list[float]:
        """Seconds of each of `times` calls made back to back."""
        self.sync()
        if self.kind == "cuda":
            return self._events(call, times)
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            call()
            self.sync()
            seconds.append(time.perf_counter() - start)
        return seconds

    def _events(self, call: Call, times: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        self.sync()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def warm_up(call: Call, clock: Clock) -> None:
    """Let a call compile, tune and allocate."""
    clock.laps(call, 2)


def burst(contenders: dict[str, Call], clock: Clock, seconds: float) -> dict[str, list[float]]:
    """Short work after a rest: A B A B ..., a few calls a turn, for about `seconds` in all."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    start = time.perf_counter()
    for turn in count():
        if turn >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
            return times
        for name in _order(contenders, turn):
            time.sleep(REST_S)
            times[name] += clock.laps(contenders[name], BURST_CALLS)
    raise AssertionError("turns never run out")


def sustained(contenders: dict[str, Call], clock: Clock, seconds: float) -> dict[str, list[float]]:
    """Work without rest: each contender runs back to back for its share of `seconds`, cut into turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    share = seconds / (ROUNDS * len(contenders))
    calls = {name: max(1, round(share / clock.laps(call, 1)[0])) for name, call in contenders.items()}
    for turn in range(ROUNDS):
        for name in _order(contenders, turn):
            times[name] += clock.laps(contenders[name], calls[name])
    return times


def host(contenders: dict[str, Call], clock: Clock, rounds: int = 9, calls: int = 50) -> dict[str, list[float]]:
    """Seconds that a call keeps the computer busy, one mean a round: calls back to back with nobody waiting for the device, so
    few that its queue does not fill."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in _order(contenders, turn):
            call = contenders[name]
            clock.sync()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - start) / calls)
            clock.sync()
    return times


REGIMES: dict[str, Measure] = {"burst": burst, "sustained": sustained}
"""The ways of timing, by name."""


def median(seconds: list[float]) -> float:
    return float(np.median(seconds))


def spread(seconds: list[float]) -> float:
    """Inter-quartile range over median: how far the middle half of the calls lies apart."""
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return float((high - low) / middle)


def _order(contenders: dict[str, Call], turn: int) -> Iterator[str]:
    """Every other turn runs backwards, so that nobody always follows the same neighbour."""
    return iter(contenders) if turn % 2 == 0 else reversed(contenders)
