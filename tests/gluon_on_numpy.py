"""Gluon kernels on numpy: their own source, run on a CPU. A partition of a kernel is a thread; a tensor is an array of what
all of the partition's threads hold, whatever its layout; named barriers, mbarriers and the copy engine do what the hardware
promises and no more, a product being made only when somebody waits for it. What the compiler and the assembler make of the
source is not looked at.

    with emulated("tilewise.backends.hopper"):
        run(forward_kernel, grid, args, variant)

A partition that waits for `PATIENCE_S` seconds is taken for hung, and so is whoever arrives at a barrier once too often."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from gluon_numbers import Array, Number, Pointer, Real, array, dtype_of, load, rounded, store

PATIENCE_S = 20.0


# ---- shared memory, barriers, the copy engine and the tensor cores


class Shared:
    """Shared memory: a tile, or several."""

    def __init__(self, cells: np.ndarray, dtype: Any) -> None:
        self.cells, self.dtype, self.shape = cells, dtype, list(cells.shape)

    def index(self, at: int) -> Shared:
        assert 0 <= at < len(self.cells)
        return Shared(self.cells[at], self.dtype)

    def reshape(self, shape: Any) -> Shared:
        return Shared(self.cells.reshape(shape), self.dtype)

    def permute(self, order: Any) -> Shared:
        return Shared(self.cells.transpose(order), self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.cells[(slice(None),) * dim + (slice(start, start + length),)], self.dtype)

    def load(self, layout: Any = None) -> Array:
        return array(self.cells.copy())

    def store(self, value: Any) -> None:
        self.cells[...] = value


class Waiting:
    """What threads wait for; the program fails as a whole."""

    lock: ClassVar[threading.Condition] = threading.Condition()
    failed: ClassVar[list[BaseException]] = []

    @classmethod
    def until(cls, done: Callable[[], bool], what: str) -> None:
        ok = cls.lock.wait_for(lambda: done() or bool(cls.failed), PATIENCE_S)
        if cls.failed:
            raise RuntimeError("another partition failed")
        if not ok:
            raise TimeoutError(f"hung at {what}")


@dataclass
class MBarrier:
    """One that expects bytes: `done` phases are complete."""

    done: int = 0
    missing: int = 0

    def expect(self, count: int) -> None:
        assert self.missing == 0, "a stage is filled again before it has come"
        self.missing = count

    def receive(self, count: int) -> None:
        with Waiting.lock:
            self.missing -= count
            assert self.missing >= 0, "more came than was announced"
            self.done += self.missing == 0
            Waiting.lock.notify_all()

    def arrive(self) -> None:
        with Waiting.lock:
            self.done += 1
            Waiting.lock.notify_all()

    def wait(self, parity: int) -> None:
        with Waiting.lock:
            Waiting.until(lambda: self.done % 2 != parity, f"an mbarrier, phase {parity}")


@dataclass
class Named:
    """A named barrier: how many threads have come, and how often it was complete."""

    here: int = 0
    turns: int = 0
    bad: bool = False
    verdict: bool = False

    def arrive(self, threads: int, of: int, bad: bool = False) -> int:
        turn = self.turns
        self.here, self.bad = self.here + threads, self.bad or bad
        assert self.here <= of, "somebody arrived twice at a named barrier"
        if self.here == of:
            self.here, self.turns, self.verdict, self.bad = 0, turn + 1, self.bad, False
            Waiting.lock.notify_all()
        return turn


@dataclass
class Program:
    """One program of a grid."""

    pid: int
    programs: int
    together: bool = False
    """Whether all programs run at the same time."""
    named: dict[int, Named] = field(default_factory=dict)
    flags: dict[Any, bool] = field(default_factory=dict)


class Here(threading.local):
    """The partition that runs in this thread: its program, its threads, and its products under way."""

    program: Program
    threads: int = 128
    products: list[Product]


HERE = Here()


class Product:
    """A product that may still be under way: operands in shared memory are read when it is waited for."""

    def __init__(self, a: Any, b: Shared, c: Any) -> None:
        self.a, self.b, self.c, self.made = a, b, c, None
        HERE.products.append(self)

    def make(self) -> None:
        a = self.a.cells if isinstance(self.a, Shared) else self.a
        with np.errstate(all="ignore"):
            self.made = array(np.asarray(self.c, np.float32) + np.asarray(a, np.float32) @ np.asarray(self.b.cells, np.float32))


def warpgroup_mma(a: Any, b: Shared, c: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    assert is_async and not isinstance(c, Product), "a sum is added to before it is made"
    return Product(a, b, c if use_acc else np.zeros_like(c))


def warpgroup_mma_wait(pending: int, deps: Any) -> Any:
    while len(HERE.products) > pending:
        HERE.products.pop(0).make()
    made = [x.made for x in deps]
    assert all(x is not None for x in made), "a sum is read before it is made"
    return made[0] if len(made) == 1 else tuple(made)


def load_tile(descriptor: Any, place: Any, barrier: MBarrier, to: Shared) -> None:
    """A box of a descriptor's tensor; 0 past its ends."""
    box = np.zeros(descriptor.block_shape, np.float32)
    view = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides, descriptor.base.storage_offset())
    inside = tuple(slice(int(p), max(int(p), min(int(p) + b, n))) for p, b, n in zip(place, box.shape, view.shape, strict=True))
    got = view[inside].detach().float().numpy()
    box[tuple(slice(0, n) for n in got.shape)] = got
    to.cells[...] = box.reshape(to.cells.shape)
    barrier.receive(box.size * descriptor.base.element_size())


def store_tile(descriptor: Any, place: Any, tile: Shared) -> None:
    view = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides, descriptor.base.storage_offset())
    at = [int(p) for p in place]
    inside = tuple(slice(p, max(p, min(p + b, n))) for p, b, n in zip(at, tile.cells.shape, view.shape, strict=True))
    part = tile.cells[tuple(slice(0, s.stop - s.start) for s in inside)]
    view[inside] = torch.from_numpy(np.ascontiguousarray(part)).to(view.dtype)


def add_tile(descriptor: Any, place: Any, tile: Shared) -> None:
    view = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides, descriptor.base.storage_offset())
    inside = tuple(slice(int(p), int(p) + b) for p, b in zip(place, tile.cells.shape, strict=True))
    view[inside] += torch.from_numpy(np.ascontiguousarray(tile.cells))


# ---- inline PTX


def await_count(counter: Pointer, least: int) -> None:
    """Where programs run one after the other, what one waits for must have happened."""
    with Waiting.lock:
        if HERE.program.together:
            Waiting.until(lambda: int(counter.flat[int(counter.offset)]) >= int(least), f"a count of {least}")
        assert int(counter.flat[int(counter.offset)]) == int(least), "a program waits for a later one, or is overtaken"


def count_up(counter: Pointer) -> None:
    with Waiting.lock:
        counter.flat[int(counter.offset)] += 1
        Waiting.lock.notify_all()


def signal(barrier: int, threads: int) -> None:
    with Waiting.lock:
        HERE.program.named.setdefault(int(barrier), Named()).arrive(HERE.threads, threads)


def meet(barrier: int, threads: int, bad: bool = False) -> bool:
    with Waiting.lock:
        one = HERE.program.named.setdefault(int(barrier), Named())
        turn = one.arrive(HERE.threads, threads, bad)
        Waiting.until(lambda: one.turns > turn, f"named barrier {int(barrier)}")
        return one.verdict


def agree(name: Any, barrier: int, threads: int) -> Number:
    return Number(meet(barrier, threads, name is not None and HERE.program.flags[name]))


def vote(x: Any, exponent: int, name: Any, count: int) -> None:
    HERE.program.flags[name] = bool((np.asarray(x) > 2.0**exponent).any())


def note(x: Any, exponent: int, name: Any, count: int) -> None:
    HERE.program.flags[name] |= bool((~(np.asarray(x) < 2.0**exponent)).any())


def warp_specialize(partitions: Any, warps: Any, registers: Any = None) -> Any:
    """The first partition here, the others in threads of their own; what the first returns."""
    program = HERE.program

    def work(function: Any, args: Any, threads: int) -> None:
        HERE.program, HERE.threads, HERE.products = program, threads, []
        try:
            with np.errstate(all="ignore"):
                function(*args)
        except BaseException as error:
            with Waiting.lock:
                Waiting.failed.append(error)
                Waiting.lock.notify_all()

    found: list[Any] = []
    first = (lambda *args: found.append(partitions[0][0](*args)), partitions[0][1], 128)
    rest = [(f, args, 32 * count) for (f, args), count in zip(partitions[1:], warps, strict=True)]
    running = [threading.Thread(target=work, args=one, daemon=True) for one in rest]
    for thread in running:
        thread.start()
    work(*first)
    for thread in running:
        thread.join()
    if Waiting.failed:
        raise next((e for e in Waiting.failed if not isinstance(e, RuntimeError)), Waiting.failed[0])
    return found[0]


def scalars(x: Any) -> bool:
    return not isinstance(x, np.ndarray)


def where(keep: Any, x: Any, y: Any) -> Any:
    if scalars(keep) and scalars(x) and scalars(y):
        return x if keep else y
    return array(np.where(keep, x, y).astype(np.result_type(*[a for a in (x, y) if not scalars(a)] or [np.float32])))


def pick(both: Callable[[Any, Any], Any], one: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: Number(one(int(x), int(y))) if scalars(x) and scalars(y) else array(both(x, y))


def language(bars: Any) -> dict[str, Any]:
    """What stands for Gluon's operations."""

    def allocate(dtype: Any, shape: Any, layout: Any = None) -> Any:
        if str(dtype) == "int64":
            return MBarrier() if len(shape) == 1 else bars([MBarrier() for _ in range(shape[0])])
        return Shared(np.full([int(n) for n in shape], np.nan, np.float32), dtype)

    return {
        "allocate_shared_memory": allocate, "warp_specialize": warp_specialize, "load": load, "store": store, "where": where,
        "arange": lambda a, b, layout=None: array(np.arange(a, b)), "maximum": pick(np.fmax, max), "minimum": pick(np.fmin,
        min), "zeros": lambda shape, dtype, layout=None: array(np.zeros([int(n) for n in shape], np.float32)), "full": lambda
        shape, value, dtype, layout=None: array(np.full([int(n) for n in shape], value, np.float32)), "exp2": lambda x:
        array(np.exp2(x)), "log2": lambda x: array(np.log2(x)), "abs": lambda x: array(np.abs(x)), "max": lambda x, axis:
        array(np.fmax.reduce(x, axis)), "sum": lambda x, axis: array(np.sum(x, axis)), "reshape": lambda x, shape:
        array(np.reshape(x, [int(n) for n in shape])), "permute": lambda x, order: x.transpose(order), "split": lambda x:
        (x[..., 0], x[..., 1]), "join": lambda x, y: array(np.stack([x, y], -1)), "convert_layout": lambda x, layout,
        assert_trivial=False: x, "cdiv": lambda x, y: Number(-(-int(x) // int(y))), "program_id": lambda axis:
        Number(HERE.program.pid), "num_programs": lambda axis: Number(HERE.program.programs), "to_tensor": lambda x: Real(x) if
        isinstance(x, float) else Number(x), "static_range": range, "SliceLayout": lambda dim, parent: None,
    }  # fmt: skip


STANDS_IN: dict[str, Any] = {
    "signal": signal, "meet": meet, "agree": agree, "vote": vote, "note": note, "anew": lambda: Number(0), "alike": lambda x: x,
    "rounded": rounded,
    "declare_flag": lambda name: None, "lower_flag": lambda name: HERE.program.flags.__setitem__(name, False),
    "flag": lambda name: Number(HERE.program.flags[name]), "barrier": lambda: None, "fence_async_shared": lambda: None,
    "load_tile": load_tile, "store_tile": store_tile, "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait,
    "recast": lambda tile, dtype, shape, layout: Shared(tile.cells.reshape(-1)[: int(np.prod(shape))].reshape(shape), dtype),
    "tma": mock.Mock(store_wait=lambda pending: None), "range": lambda *args: map(Number, range(*args)),
    "mbarrier": mock.Mock(
        init=lambda bar, count: None, expect=lambda bar, n: bar.expect(n), wait=lambda bar, p: bar.wait(p),
        arrive=lambda bar, count: bar.arrive(),
    ), "add_tile": add_tile, "await_count": await_count, "count_up": count_up, "settle": lambda: None,
}  # fmt: skip
"""What stands for names that the kernels' files import."""


class Bars(list[Any]):
    """mbarriers, one a stage."""

    index: Any = operator.itemgetter

    def __getattribute__(self, name: str) -> Any:
        return self.__getitem__ if name == "index" else super().__getattribute__(name)


@contextmanager
def emulated(package: str) -> Iterator[None]:
    """Within, kernels of a package are plain functions, and Gluon's language is this file."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.language import constexpr

    patches = [mock.patch.object(GluonJITFunction, "__call__", lambda self, *args, **more: self.fn(*args, **more), create=True)]
    patches += [mock.patch.object(gl, name, value) for name, value in language(Bars).items()]
    for module in [m for name, m in sys.modules.items() if name.startswith(f"{package}.")]:
        names = vars(module)
        if names.get("gl") is gl:
            stand = {name: value for name, value in STANDS_IN.items() if name in names or name == "range"}
            stand |= {name: value.value for name, value in names.items() if isinstance(value, constexpr)}
            patches.append(mock.patch.multiple(module, create=True, **stand))
    with _all(patches):
        yield


@contextmanager
def _all(patches: list[Any]) -> Iterator[None]:
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()


def run(kernel: Any, grid: int, args: Any, variant: Any, together: bool = False) -> None:
    """Every program of a grid, one after the other, or `together`."""
    Waiting.failed.clear()
    given = [Pointer.to(x) if isinstance(x, torch.Tensor) else described(x) for x in args]

    def program(pid: int) -> None:
        HERE.program, HERE.threads, HERE.products = Program(pid, grid, together), 128, []
        with np.errstate(all="ignore"):
            kernel(*given, variant)
        left = {number: one.here for number, one in HERE.program.named.items() if one.here}
        assert all(count % 128 == 0 for count in left.values()), f"arrivals are left over: {left}"

    with ThreadPoolExecutor(grid if together else 1) as pool:
        list(pool.map(program, range(grid)))


def described(x: Any) -> Any:
    """An argument as a kernel sees it."""
    if hasattr(x, "block_shape"):
        x.dtype = dtype_of(x.base)
        return x
    return Number(x) if isinstance(x, int) else Real(x) if isinstance(x, float) else x
