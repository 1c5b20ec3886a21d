"""A pass that is repeated on tensors of the same layout repeats its launches too: all but the addresses is as before. A tape
holds them ready, so that a small call does not spend its time on describing itself again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_runtime = triton.knobs.runtime  # pyright: ignore[reportAttributeAccessIssue]

_compiled: dict[Any, Any] = {}
"""Compiled kernels by everything that another compilation would depend on."""

Named = dict[str, Tensor | None]
"""Tensors by what a pass calls them."""

MAPS = 64
"""Addresses whose tensor maps one argument keeps: an allocator returns to few."""


class Movable(Protocol):
    """A description of how a tensor is read in tiles, which holds for another tensor that is laid out in the same way."""

    base: Any

    def moved(self, base: Tensor | None) -> Movable:
        """The same tiles of another tensor."""
        ...


class Rows(TensorDescriptor):
    """A descriptor of blocks of rows that is known to be legal: whoever makes it has looked."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]) -> None:
        self.base, self.shape, self.strides, self.block_shape, self.padding = base, shape, strides, block_shape, "zero"

    def moved(self, base: Tensor | None) -> Rows:
        """The same blocks of another tensor."""
        return Rows(base, self.shape, self.strides, self.block_shape)  # type: ignore[arg-type]


class Hole(NamedTuple):
    """An argument that differs from call to call: a tensor's own, or made of it by `rows`."""

    at: int
    name: str
    rows: Any = None


class Wrapped(NamedTuple):
    """One launch through Triton's wrapper, which makes tensor maps itself."""

    found: Any
    grid: int
    args: list[Any]
    holes: list[Hole]

    def run(self, stream: int, names: Named, addresses: Mapping[str, int]) -> None:
        args = self.args.copy()
        for at, name, rows in self.holes:
            args[at] = names[name] if rows is None else rows.moved(names[name])
        found = self.found
        found.run(self.grid, 1, 1, stream, found.function, found.packed_metadata, None, None, None, *args)


class Bare(NamedTuple):
    """One launch through the compiled function under that wrapper: addresses instead of tensors, and tensor maps that are kept
    for addresses that come again."""

    entrance: Callable[..., None]
    head: tuple[Any, ...]
    tail: tuple[Any, ...]
    args: list[Any]
    holes: list[Hole]

    def run(self, stream: int, names: Named, addresses: Mapping[str, int]) -> None:
        args = self.args.copy()
        for at, name, maps in self.holes:
            address = addresses[name]
            if maps is not None:
                args[at] = maps.get(address) or maps.add(address, names[name])
            else:
                args[at] = address
        self.entrance(*self.head, stream, *self.tail, *args)


class Maps(dict[int, Any]):
    """The first argument that a descriptor becomes, by the address of its tensor."""

    def __init__(self, rows: Movable, make: Callable[[Movable], list[Any]]) -> None:
        self.rows, self.make = rows, make

    def add(self, address: int, base: Tensor | None) -> Any:
        if len(self) >= MAPS:
            self.clear()
        assert base is not None
        found = self[address] = self.make(self.rows.moved(base))[0]
        return found


def bared(found: Any, grid: int, args: list[Any], holes: list[Hole]) -> Bare | None:
    """A launch without Triton's wrapper; None where it is not the one of Triton 3.5 and 3.6, which is all we know by heart."""
    run = found.run
    inner: Any = getattr(run, "launch", None)
    names: tuple[str, ...] = getattr(getattr(inner, "__code__", None), "co_freevars", ())
    if names != ("launcher", "tensordesc_indices", "tensordesc_meta") or run.global_scratch_size or run.profile_scratch_size:
        return None
    cells: dict[str, Any] = dict(zip(names, [cell.cell_contents for cell in inner.__closure__], strict=True))
    metas, by_place = iter(cells["tensordesc_meta"]), {hole.at: hole for hole in holes}
    flat: list[Any] = []
    moved: list[Hole] = []
    for at, arg in enumerate(args):
        hole = by_place.get(at)
        if hole is None:
            flat.append(arg.data_ptr() if isinstance(arg, Tensor) else arg)
            continue
        maps, parts = None, [None]
        if hole.rows is not None:
            make = partial(_expanded, next(metas))
            parts = make(hole.rows)
            maps = None if isinstance(parts[0], Tensor) else Maps(hole.rows.moved(None), make)
        moved.append(Hole(len(flat), hole.name, maps))
        flat += [None, *parts[1:]]
    tail = (found.function, run.launch_cooperative_grid, run.launch_pdl, None, None, found.packed_metadata, None, None, None)
    return Bare(cells["launcher"], (grid, 1, 1), tail, flat, moved)


def _expanded(meta: Any, rows: Movable) -> list[Any]:
    """What a descriptor becomes: its tensor map, or without a copy engine its tensor, and its axes."""
    from triton.backends.nvidia import driver  # that of the Triton whose wrapper `bared` knows

    return driver.make_tensordesc_arg(rows, meta)  # pyright: ignore[reportCallIssue]


class Tape:
    """The launches of one pass, on tensors that were `given` and on room that is made anew whenever it is played. `whole`: they
    are all here, and nothing else went into them."""

    def __init__(self, given: Named) -> None:
        tensors = [(id(t), name) for name, t in given.items() if t is not None]
        self.names = dict(tensors)
        self.made: dict[str, Tensor] = {}
        self.recipes: list[tuple[str, tuple[int, ...], torch.dtype, torch.device]] = []
        self.held: dict[int, Tensor] = {}
        self.steps: list[Wrapped | Bare] = []
        self.whole = len(self.names) == len(tensors)  # one tensor under two names would be taken for one of them

    def room(self, name: str, size: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        """A tensor for this pass to fill."""
        made = self.made[name] = torch.empty(size, dtype=dtype, device=like.device)
        self.names[id(made)] = name
        self.recipes.append((name, size, dtype, like.device))
        return made

    def hold(self, *tensors: Tensor | None) -> None:
        """Let these go in, too: they are the same whenever the tape is played."""
        self.held |= {id(t): t for t in tensors if t is not None}

    def add(self, found: Any, grid: int, args: tuple[Any, ...]) -> None:
        """Remember one launch of a compiled kernel; None: it is being compiled."""
        bases = [arg.base if hasattr(arg, "moved") else arg for arg in args]
        tensors = {id(x) for x in bases if isinstance(x, Tensor)}
        if found is None or not tensors <= self.names.keys() | self.held.keys():
            self.whole = False
            return
        holes = [
            Hole(at, self.names[id(base)], arg if hasattr(arg, "moved") else None)
            for at, (arg, base) in enumerate(zip(args, bases, strict=True))
            if id(base) in self.names and isinstance(base, Tensor)
        ]
        plain: list[Any] = list(args)
        step = bared(found, grid, plain, holes)
        for at, *_ in holes:  # or the tape would keep the tensors that it was recorded on
            plain[at] = None
        unbound = [hole._replace(rows=None if hole.rows is None else hole.rows.moved(None)) for hole in holes]
        self.steps.append(step or Wrapped(found, grid, plain, unbound))

    def done(self) -> dict[str, Tensor]:
        """What the pass has filled; from here on the tape knows tensors by name alone."""
        made, self.made, self.names = self.made, {}, {}
        return made

    def play(self, given: Named, stream: int) -> dict[str, Tensor]:
        """The same launches on other tensors, and what they fill."""
        made = {name: torch.empty(size, dtype=dtype, device=device) for name, size, dtype, device in self.recipes}
        names: Named = {**given, **made}
        addresses = {name: t.data_ptr() for name, t in names.items() if t is not None}
        for step in self.steps:
            step.run(stream, names, addresses)
        return made


def repeat(known: dict[Any, Any], kind: Any, given: Named, record: Callable[[Tape], None]) -> dict[str, Tensor]:
    """What a pass fills. Its tape is played if tensors laid out like `given` have been through it before, on the same stream;
    else `record` runs it. `known` is what holds for all calls of a plan. A graph that is being captured holds no tensors that
    another call has made, nor the other way round."""
    q = given["q"]
    assert q is not None
    stream = torch._C._cuda_getCurrentRawStream(q.device.index) if q.is_cuda else 0
    modes = torch.backends.cuda.matmul.fp32_precision if q.dtype == torch.float32 else None  # products follow it
    layout = [None if t is None else (t.stride(), t.data_ptr() % 16, t.dtype) for t in given.values()]
    key = (kind, modes, stream, *layout)
    tape = known.get(key)
    if tape is not None and unwatched() and not (tape.held and torch.cuda.is_current_stream_capturing()):
        return tape.play(given, stream)
    tape = Tape(given)
    record(tape)
    if tape.whole and tape.steps and not (tape.held and torch.cuda.is_current_stream_capturing()):
        known[key] = tape
    return tape.done()


def unwatched() -> bool:
    """Whether nobody, a profiler say, has hooked into Triton's launches."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return not ((enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True)))


def start(
    kernel: Any, grid: int, args: tuple[Any, ...], options: Mapping[str, Any], key: Any, device: int | None,
    tape: Tape | None = None,
) -> None:  # fmt: skip
    """Run `grid` programs of a kernel, compiled once for every `key`, and remember it on a tape; on no device: as Triton itself
    would, whatever stands in for one."""
    found = None if device is None else _compiled.get(key)
    if tape is not None:
        tape.add(found, grid, args)
    if found is None or device is None:
        _compiled[key] = kernel[(grid,)](*args, **options)
        return
    stream, data, enter, leave = torch._C._cuda_getCurrentRawStream(device), None, None, None
    if not unwatched():
        enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
        data = found.launch_metadata((grid, 1, 1), stream, *args)
    found.run(grid, 1, 1, stream, found.function, found.packed_metadata, data, enter, leave, *args)
