"""The search for sizes: every pass of a workload with every choice that may be good, compiled in processes of their own and
timed in turns with the built-in sizes. Calls of `attention` never search; they read what `store` keeps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from ..._errors import OptionError
from ...dropout import Dropout
from ...mask import Mask, Where, parse
from ...problem import DTYPES, Inputs, Options, Problem
from ..made import wide
from ..reads import readable
from ..tape import Tape
from . import config as sizes
from .backward_pass import dk_dv, dq, prepare
from .call import Call
from .config import Config, Launch, Machine
from .dbias import bias_gradient
from .fit import PASSES, shared_bytes
from .forward_pass import forward
from .offline import Job, pretend, recorded
from .store import Found, Key, key_of

Timer = Callable[[dict[str, Callable[[], None]], float], dict[str, list[float]]]
"""Seconds of single calls of contenders that take turns for about so many seconds: `bench.timing.burst` on a clock."""

Tell = Callable[[str, int], None]
"""What is going on, and how many choices were done with since."""

TOGETHER = 8
"""Choices that take turns with each other, each with its own outputs in memory."""

FINALISTS = 4
"""Choices that are timed a second time, for longer."""


@dataclass(frozen=True)
class Workload:
    """A problem to tune for, of plain values, so that other processes can have it."""

    d: int = 128
    e: int = 128
    dtype: str = "bfloat16"
    mask: str = "full"
    """As the command line spells masks; or "table", a table of pairs that are hidden in blocks."""
    b: int = 2
    n: int = 4096
    h: int = 16
    g: int = 16
    bias: bool = False
    alibi: bool = False
    softcap: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @property
    def passes(self) -> tuple[str, ...]:
        return PASSES if self.bias else PASSES[:3]

    @property
    def small(self) -> Workload:
        """The same kernels on next to no data."""
        return replace(self, b=min(self.b, 2), n=min(self.n, 2), h=min(self.h, 2), g=1)

    def inputs(self, device: str) -> Inputs[Tensor]:
        """Standard normal tensors; small slopes."""
        rng, dtype = torch.Generator(device).manual_seed(0), getattr(torch, self.dtype)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, device=device, dtype=dtype)

        q, k, v = (draw(self.b, self.n, heads, size) for heads, size in ((self.h, self.d), (self.g, self.d), (self.g, self.e)))
        bias = draw(self.h, self.n, self.n) if self.bias else None
        return Inputs(q, k, v, bias, draw(self.h).abs() / 16 if self.alibi else None)

    def problem(self, x: Inputs[Tensor]) -> Problem:
        dropout = Dropout(self.dropout, seed=0) if self.dropout else None
        return Problem.describe(x, Options(self._mask(x.q.device), softcap=self.softcap, dropout=dropout))

    def _mask(self, device: torch.device) -> Mask:
        if self.mask != "table":
            return parse(self.mask)
        at = torch.arange(self.n, device=device) // 128
        return Where((at[:, None] + at) % 3 != 0)

    def __str__(self) -> str:
        extras = [name for name in ("bias", "alibi", "softcap", "dropout") if getattr(self, name)]
        shape = f"b={self.b} n={self.n} h={self.h} g={self.g} d={self.d}" + (f" e={self.e}" if self.e != self.d else "")
        return " ".join([shape, self.dtype, f"mask={self.mask}", *extras])


@dataclass
class Bench:
    """A workload's tensors on a device, and what backward starts from. With `empty`, backward starts from nothing, for a
    process that only compiles."""

    work: Workload
    device: str
    config: Config | None = None
    empty: bool = False

    @cached_property
    def x(self) -> Inputs[Tensor]:
        return self.work.inputs(self.device)

    @cached_property
    def problem(self) -> Problem:
        return self.work.problem(self.x)

    @cached_property
    def builtin(self) -> Config:
        """The sizes that are used where nothing is stored."""
        if self.config is not None:
            return self.config
        p = self.problem
        found = sizes.sizes_of(sizes.machine(self.device), p.itemsize, p.d, p.e, p.mask.kind, sizes.bias_itemsize(p))
        return replace(sizes.configure(p), **dict(zip((*PASSES, "careful"), found, strict=True)), known={})

    @cached_property
    def saved(self) -> tuple[Tensor, Tensor]:
        """do, and what backward knows of each row."""
        p, config = self.problem, self.builtin
        do = torch.randn_like(self.x.q[..., :1]).expand(p.b, p.n, p.h, p.e)
        if self.empty:
            o, lse = torch.empty_like(do), self.x.q.new_empty(p.b, p.h, p.n, dtype=wide(self.x.q))
        else:
            o, lse = forward(p, self.x, config)
        do = readable(do.contiguous())
        return do, prepare(Call.of(p, self.x, config), readable(o), do, (lse, None), Tape({}))

    def answer(self, name: str, launch: Launch) -> list[Tensor]:
        """What a pass computes with these sizes."""
        config = replace(self.builtin, **{name: launch}, known={})
        if name == "forward":
            return list(forward(self.problem, self.x, config))
        do, stats = self.saved
        call = Call.of(self.problem, self.x, config)
        if name == "dq":
            return [dq(call, do, stats, False, Tape({}))]
        return list(dk_dv(call, do, stats, Tape({}))) if name == "dk_dv" else [bias_gradient(call, do, stats)]

    def jobs(self, name: str, launch: Launch) -> list[Job]:
        """The launches of a pass with these sizes, not yet done."""
        if name != "forward":
            _ = self.saved  # which launches, too
        with recorded() as found:
            self.answer(name, launch)
        return found


def choices(machine: Machine, bench: Bench, name: str) -> list[Launch]:
    """The sizes worth a try: those that fit in shared memory, about fill the registers and divide by the careful kernel's."""
    p, careful, first = bench.problem, bench.builtin.careful, getattr(bench.builtin, name)
    plain = p.mask.kind == "NONE"
    found = [first]
    for m, n, warps, stages, apart in product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4), (True, False)):
        one = Launch(m, n, warps, stages, apart)
        if m % careful.block_m or n % careful.block_n or (plain and not apart) or one in found:
            continue
        own = {"forward": m * p.e, "dq": m * p.d, "dk_dv": n * (p.d + p.e), "dbias": m * n}[name]
        held = (own + m * n * (1 if name == "forward" else 2)) / (32 * warps)  # registers, of sums and of scores
        if (
            16 <= held <= 256
            and shared_bytes(one, name, machine, p.itemsize, (p.d, p.e), sizes.bias_itemsize(p)) <= machine.shared_bytes
        ):
            found.append(one)
    return found


# ---- compiling


def compile_all(
    work: Workload, name: str, asked: Sequence[Launch], built: tuple[Config, GPUTarget, int], processes: int, tell: Tell
) -> dict[Launch, str]:
    """Compile every choice into Triton's cache on disk, and say why not of those that failed. `built`: the built-in sizes, the
    GPU, and its bytes of shared memory. Where no process can be started nothing is done, and the first launch compiles."""
    config, target, most = built
    failed: dict[Launch, str] = {}
    try:
        with ProcessPoolExecutor(processes, get_context("spawn"), pretend, (target,)) as pool:
            waiting: dict[Future[str], Launch] = {
                pool.submit(compile_choice, work.small, name, one, config, most): one for one in asked
            }
            for done in as_completed(waiting):
                why = done.result()
                if why:
                    failed[waiting[done]] = why
                tell(f"{name}: compiled", 1)
    except (OSError, RuntimeError) as error:  # a pool that broke is a RuntimeError
        tell(f"{name}: no processes to compile in ({type(error).__name__}); compiling one by one", 0)
    return failed


def compile_choice(work: Workload, name: str, launch: Launch, config: Config, most: int) -> str:
    """Compile one choice, in a process that pretends; why it cannot run, or nothing."""
    bench = Bench(work, "cpu", replace(config, known={}), empty=True)
    try:
        with recorded():
            _ = bench.saved
        for job in bench.jobs(name, launch):
            shared = job.compile().metadata.shared
            if shared > most:
                return f"{shared} bytes of shared memory where there are {most}"
    except Exception as error:
        return _why(error)
    return ""


def _why(error: Exception) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:200]


# ---- timing


@dataclass
class Outcome:
    """What a search found: the best sizes under their key, and every choice that was tried, or skipped and why."""

    key: Key
    found: Found
    builtin: Launch
    tried: dict[Launch, float] = field(default_factory=dict)
    """Time over that of the built-in sizes."""
    skipped: dict[Launch, str] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """How many times as fast as with the built-in sizes."""
        return self.found.builtin_microseconds / self.found.microseconds


def search(bench: Bench, name: str, asked: Sequence[Launch], timer: Timer, seconds: float, tell: Tell) -> Outcome:
    """The fastest choice for one pass; the built-in sizes stay where nothing is faster. A choice that does not run, or
    computes something else, is skipped. `seconds` go into the final, and as much into each turn before it."""
    builtin, skipped, ratios = getattr(bench.builtin, name), {}, {}
    right, calls = bench.answer(name, builtin), {}
    for group in _groups([one for one in asked if one != builtin]):
        calls = {builtin: _call(bench, name, builtin)}
        for one in group:
            why = _differs(bench, name, one, right)
            if why:
                skipped[one] = why
            else:
                calls[one] = _call(bench, name, one)
        ratios |= _against(builtin, calls, timer, seconds)[1]
        tell(f"{name}: timed", len(group))
    best = sorted(ratios, key=ratios.__getitem__)[:FINALISTS]
    times, final = _against(
        builtin, {one: _call(bench, name, one) for one in {builtin: 0, **dict.fromkeys(best)}}, timer, seconds
    )
    winner = min(final, key=final.__getitem__)
    micro = {one: 1e6 * time for one, time in times.items()}
    w = winner
    found = Found(
        w.block_m, w.block_n, w.warps, w.stages, w.apart, round(micro[w], 2), round(micro[builtin], 2),
        date.today().isoformat(), str(bench.work),
    )  # fmt: skip
    key = key_of(bench.problem, sizes.machine(bench.device).name, name)
    return Outcome(key, found, builtin, ratios | final, skipped)


def _groups(asked: Sequence[Launch]) -> Iterator[Sequence[Launch]]:
    return (asked[at : at + TOGETHER] for at in range(0, len(asked), TOGETHER))


def _call(bench: Bench, name: str, launch: Launch) -> Callable[[], None]:
    """One run of a pass, with everything but its launches done before."""
    jobs = bench.jobs(name, launch)

    def call() -> None:
        for job in jobs:
            job.run()

    return call


def _against(
    builtin: Launch, calls: dict[Launch, Callable[[], None]], timer: Timer, seconds: float
) -> tuple[dict[Launch, float], dict[Launch, float]]:
    """Median seconds of each contender, and their ratio to the built-in sizes."""
    names = {str(at): one for at, one in enumerate(calls)}
    found = timer({at: calls[one] for at, one in names.items()}, seconds)
    times = {names[at]: float(torch.tensor(laps, dtype=torch.float64).median()) for at, laps in found.items()}
    return times, {one: time / times[builtin] for one, time in times.items()}


def _differs(bench: Bench, name: str, launch: Launch, right: Iterable[Tensor]) -> str:
    """Why a choice cannot be taken, or nothing: its results agree with the built-in ones' in more than half their digits."""
    try:
        mine = bench.answer(name, launch)
        if bench.device.startswith("cuda"):
            torch.cuda.synchronize(bench.device)
    except Exception as error:
        return _why(error)
    for a, b in zip(mine, right, strict=True):
        finite = b.isfinite()
        same = bool((a.isfinite() == finite).all())
        a, b = (torch.where(finite, t, 0).double() for t in (a, b))
        off = float((a - b).norm() / b.norm().clamp_min(torch.finfo(torch.float64).tiny))
        if not same or off > torch.finfo(bench.x.q.dtype).eps ** 0.5:
            return f"its result is off by {off:.1e}"
    return ""


# ---- all of it


def tune(
    work: Workload, names: Sequence[str], device: str, timer: Timer, seconds: float = 1.0, processes: int = 0,
    tell: Tell = lambda text, steps: None,
) -> Iterator[Outcome]:  # fmt: skip
    """Search for the sizes of each named pass of a workload on a GPU."""
    bench, machine = Bench(work, device), sizes.machine(device)
    for name in names:
        if name not in work.passes:
            raise OptionError(f"pass {name!r} is none of {', '.join(work.passes)}" + ("" if work.bias else " without a bias"))
        asked = choices(machine, bench, name)
        tell(f"{name}: {len(asked)} choices", 0)
        failed: dict[Launch, str] = {}
        if device.startswith("cuda"):
            target: Any = triton.runtime.driver.active.get_current_target()
            built = bench.builtin, target, machine.shared_bytes
            failed = compile_all(work, name, asked, built, processes or os.cpu_count() or 1, tell)
        outcome = search(bench, name, [one for one in asked if one not in failed], timer, seconds, tell)
        outcome.skipped |= failed
        yield outcome
