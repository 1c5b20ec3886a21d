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
    compiled(where, write, **words)(**words)


def compiled(where: target.Target, write: Callable[[Code, Words], Any], **words: Any) -> Callable[..., None]:
    """A function of words like these; of their values nothing is looked at."""
    names = {k: f"{k}_ptr" if isinstance(x, np.ndarray) else k for k, x in words.items()}
    block, module = Block(*names.values()), Module(where)
    with module.function("go", (ADDRESS,), exported=True) as code:
        write(code, Words(code, block, code.arguments[0]))
    library = machinecode.Library(machinecode.compile(module), where)

    def call(**given: Any) -> None:
        filled = block.filled({names[k]: x.ctypes.data if isinstance(x, np.ndarray) else x for k, x in given.items()})
        threads.run(library.address("go"), ctypes.addressof(filled), 1)

    return call


def undefined(code: bytes) -> list[str]:
    """Names that an ELF file wants from elsewhere: machine code that calls a library would need that library."""
    at, size, count = (int.from_bytes(code[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    sections = [code[at + i * size : at + (i + 1) * size] for i in range(count)]
    kind = [int.from_bytes(s[4:8], "little") for s in sections]
    place = [(int.from_bytes(s[24:32], "little"), int.from_bytes(s[32:40], "little")) for s in sections]
    index = kind.index(2)  # SHT_SYMTAB
    names, (start, length) = place[int.from_bytes(sections[index][40:44], "little")][0], place[index]
    found = []
    for symbol in range(start + 24, start + length, 24):
        name, section = (int.from_bytes(code[symbol + a : symbol + b], "little") for a, b in ((0, 4), (6, 8)))
        if section == 0:
            found.append(code[names + name : code.index(b"\0", names + name)].decode())
    return [one for one in found if one not in ("memset", "memcpy", "sched_yield", "_GLOBAL_OFFSET_TABLE_")]
