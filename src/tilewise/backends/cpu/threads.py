"""Work shared among the threads of torch's own OpenMP pool: a second pool beside it would slow both."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

Entrance = Callable[[int], None]
"""A compiled function of one argument, the address of a call's `arguments`."""

_forked = False


def _after_fork() -> None:
    """A child has none of its parent's threads, and their OpenMP does not start new ones for it."""
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@lru_cache
def pool() -> Any:
    """GOMP_parallel(function, data, threads, flags) of the OpenMP that torch itself is linked to; None where torch has another
    one or none, and calls run on one thread."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found


def available() -> int:
    """Threads that a call may use: what `torch.set_num_threads` says, 1 in a forked child and where there is no pool."""
    return 1 if _forked or pool() is None else torch.get_num_threads()


@lru_cache
def entrance(address: int) -> Entrance:
    """The function at an address, called on this thread; Python's lock is released meanwhile."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def run(address: int, data: int, threads: int) -> None:
    """Call the function at `address` with `data` on so many threads at once, this one among them, and wait for all."""
    if threads > 1:
        pool()(address, data, threads, 0)
    else:
        entrance(address)(data)
