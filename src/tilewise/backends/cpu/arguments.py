"""How a call reaches machine code: one block of 64-bit words, each by name. A kernel reads words by the same names; every
thread of a call gets the same block, and two words of it are counters from which threads take tasks and scratch memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping

from .vector import ADDRESS, F32, INDEX, Code, Value

LINE = 64
"""Bytes that memory fetches at a time, or fewer; tiles in scratch memory begin at multiples of it."""

COUNTERS = ("task", "slot")
"""The next task, and the next thread's place in the scratch memory. They are 0 when a call begins."""


class Block:
    """The names of a kernel's words, in order. Names that end in _ptr are addresses, those in _f32 numbers, others integers."""

    def __init__(self, *names: str) -> None:
        self.names = (*COUNTERS, *names)
        self.place = {name: 8 * at for at, name in enumerate(self.names)}
        assert len(self.place) == len(self.names)
        self.size = len(self.names)
        self.make = ctypes.c_int64 * self.size

    def filled(self, words: Mapping[str, int | float]) -> ctypes.Array[ctypes.c_int64]:
        """A block with these words, all of them but the counters."""
        assert words.keys() == set(self.names) - set(COUNTERS), words.keys() ^ (set(self.names) - set(COUNTERS))
        return self.make(*(_word(name, words.get(name, 0)) for name in self.names))

    def read(self, code: Code, address: Value, name: str) -> Value:
        """Write code that reads a word of the block at `address`."""
        kind = ADDRESS if name.endswith("_ptr") else F32 if name.endswith("_f32") else INDEX
        return Value(code, code.builder.load((address + self.place[name]).raw, typ=kind, align=8))

    def take(self, code: Code, address: Value, counter: str) -> Value:
        """Write code that takes the next number of a counter."""
        return code.fetch_add(address + self.place[counter], 1)


class Words:
    """The words of a block as a kernel has read them: `words.n`, `words.q_ptr`."""

    def __init__(self, code: Code, block: Block, address: Value) -> None:
        self._read = {name: block.read(code, address, name) for name in block.names if name not in COUNTERS}

    def __getattr__(self, name: str) -> Value:
        try:
            return self._read[name]
        except KeyError:
            raise AttributeError(name) from None


def _word(name: str, number: int | float) -> int:
    """The 64 bits of a word."""
    if name.endswith("_f32"):  # beyond the largest one it is an infinity
        return int.from_bytes(bytes(ctypes.c_float(number)), sys.byteorder, signed=True)
    return int(number)
