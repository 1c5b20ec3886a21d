"""Machine code from a few lines of vector code, run on NumPy arrays: what the tests of the CPU backend's layers share."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding as llvm

from tilewise.backends.cpu import machinecode, target, threads
from tilewise.backends.cpu.arguments import Block, Words
from tilewise.backends.cpu.vector import ADDRESS, Code, Module


def runnable() -> list[target.Target]:
    """Every target whose code this computer runs: its own, and AVX2 where that is not it."""
    found, features = target.host(), llvm.get_host_cpu_features()
    if found is None:
        return []
    narrow = all(features.get(name) for name in ("avx2", "fma", "f16c"))
    return [found, target.AVX2] if found.lanes == target.AVX512.lanes and narrow else [found]


def run(where: target.Target, write: Callable[[Code, Words], Any], **words: Any) -> None:
    """Compile a function and call it: arrays become `words.<name>_ptr`, numbers `words.<name>`."""
    named = {f"{k}_ptr" if isinstance(x, np.ndarray) else k: x for k, x in words.items()}
    block, module = Block(*named), Module(where)
    with module.function("go", (ADDRESS,), exported=True) as code:
        write(code, Words(code, block, code.arguments[0]))
    library = machinecode.Library(machinecode.compile(module), where)
    filled = block.filled({k: x.ctypes.data if isinstance(x, np.ndarray) else x for k, x in named.items()})
    threads.run(library.address("go"), ctypes.addressof(filled), 1)
