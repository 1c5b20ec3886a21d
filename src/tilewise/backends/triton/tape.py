"""A pass that is repeated on tensors of the same layout repeats its launches too: all but the addresses is as before. A tape
holds them ready, so that a small call does not spend its time on describing itself again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_runtime = triton.knobs.runtime  # pyright: ignore[reportAttributeAccessIssue]

Named = dict[str, Tensor | None]
"""The tensors of a pass: those that a caller gave, and those that were made for it."""


class Rows(TensorDescriptor):
    """A descriptor of blocks of rows that is known to be legal: whoever makes it has looked."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]) -> None:
        self.base, self.shape, self.strides, self.block_shape, self.padding = base, shape, strides, block_shape, "zero"


class Step(NamedTuple):
    """One launch: arguments with holes at `tensors` and `rows`, which say what goes there."""

    found: Any
    grid: int
    args: list[Any]
    tensors: list[tuple[int, str]]
    rows: list[tuple[int, str, Any]]
    start: Callable[..., None] | None
    """Triton's own C function, which takes descriptors taken apart; None where this Triton has another one."""
    head: tuple[Any, ...]


class Tape:
    """The launches of one pass on the tensors `names`. `whole`: they are complete, and nothing else went into them."""

    def __init__(self, names: Named) -> None:
        given = [(id(t), name) for name, t in names.items() if t is not None]
        self.names = dict(given)
        self.steps: list[Step] = []
        self.whole = len(self.names) == len(given)  # one tensor under two names would be taken for one of them

    def add(self, found: Any, grid: int, args: tuple[Any, ...]) -> None:
        """Remember one launch of a compiled kernel; None: it is being compiled."""
        held = [arg.base if isinstance(arg, Rows) else arg for arg in args]
        if found is None or any(isinstance(x, Tensor) and id(x) not in self.names for x in held):
            self.whole = False
            return
        start, metas = _inside(found)
        template: list[Any] = []
        tensors, rows = [], []
        for arg in args:
            at = len(template)
            if isinstance(arg, Rows):
                name = self.names[id(arg.base)]
                rows.append((at, name, (arg.shape, arg.strides, arg.block_shape) if start is None else _map(next(metas), arg)))
                template += [None] if start is None else [None, *arg.shape, *arg.strides]
            elif isinstance(arg, Tensor):
                tensors.append((at, self.names[id(arg)]))
                template.append(None)
            else:
                template.append(arg)
        self.steps.append(Step(found, grid, template, tensors, rows, start, () if start is None else _head(found)))

    def play(self, names: Named) -> None:
        """The same launches on other tensors."""
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        for found, grid, template, tensors, rows, start, head in self.steps:
            args = template.copy()
            for at, name in tensors:
                args[at] = names[name]
            if start is None:
                for at, name, parts in rows:
                    args[at] = Rows(names[name], *parts)  # type: ignore[arg-type]
                found.run(grid, 1, 1, stream, found.function, found.packed_metadata, None, None, None, *args)
            else:
                for at, name, (fill, parts) in rows:
                    args[at] = fill(names[name].data_ptr(), *parts)  # type: ignore[union-attr]
                start(grid, 1, 1, stream, found.function, *head, *args)


def repeat(known: dict[Any, Any], kind: str, given: list[Tensor], names: Named, record: Callable[[Tape], None]) -> None:
    """Play the tape of a pass if tensors laid out like `given` have been through it before; else `record` it, which runs it.
    `known` is what holds for all calls of a plan."""
    modes = torch.backends.cuda.matmul.fp32_precision if given[0].dtype == torch.float32 else None  # products follow it
    key = (kind, modes, *[(t.stride(), t.data_ptr() % 16, t.dtype) for t in given])
    tape = known.get(key)
    if tape is not None and unwatched():
        tape.play(names)
        return
    tape = Tape(names)
    record(tape)
    if tape.whole and tape.steps:
        known[key] = tape


def unwatched() -> bool:
    """Whether nobody, a profiler say, has hooked into Triton's launches."""
    return not any(
        hook is not None and getattr(hook, "calls", True) for hook in (_runtime.launch_enter_hook, _runtime.launch_exit_hook)
    )


def _inside(found: Any) -> tuple[Callable[..., None] | None, Any]:
    """Triton 3.5 and 3.6: the C function behind a compiled kernel's launcher, and what it wants to know of each descriptor. It
    saves a third of a launch; where it is not as it was there, nothing is lost but that."""
    try:
        launch = found.run.launch
        start = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))["launcher"].cell_contents
        metas = found.metadata.tensordesc_meta
    except (AttributeError, KeyError, TypeError):
        return None, iter(())
    plain = metas and all(metas) and type(start).__name__ == "builtin_function_or_method" and not found.run.global_scratch_size
    return (start, iter(metas)) if plain else (None, iter(()))


def _head(found: Any) -> tuple[Any, ...]:
    """What comes between the function and its arguments there: scratch memory, metadata and hooks, of which there are none."""
    run = found.run
    return run.launch_cooperative_grid, run.launch_pdl, None, None, found.packed_metadata, None, None, None


def _map(meta: Any, rows: Rows) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """How the copy engine's map of a descriptor is made, all but the address."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as codes

    fill = triton.runtime.driver.active.utils.fill_tma_descriptor  # pyright: ignore[reportAttributeAccessIssue]
    return fill, (meta["swizzle"], meta["elem_size"], codes[meta["elem_type"]], meta["block_size"], rows.shape, rows.strides, 0)
