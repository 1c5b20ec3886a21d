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
    rows: list[tuple[int, str, tuple[list[int], list[int], list[int]]]]


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
        step = Step(found, grid, list(args), [], [])
        for at, arg in enumerate(args):
            if isinstance(arg, Rows):
                step.rows.append((at, self.names[id(arg.base)], (arg.shape, arg.strides, arg.block_shape)))
                step.args[at] = None
            elif isinstance(arg, Tensor):
                step.tensors.append((at, self.names[id(arg)]))
                step.args[at] = None
        self.steps.append(step)

    def play(self, names: Named) -> None:
        """The same launches on other tensors."""
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        for found, grid, template, tensors, rows in self.steps:
            args = template.copy()
            for at, name in tensors:
                args[at] = names[name]
            for at, name, parts in rows:
                args[at] = Rows(names[name], *parts)  # type: ignore[arg-type]
            found.run(grid, 1, 1, stream, found.function, found.packed_metadata, None, None, None, *args)


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
