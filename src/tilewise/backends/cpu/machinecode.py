"""From a module of vector code to machine code, and from machine code to addresses that can be called."""

from __future__ import annotations

from functools import lru_cache
from threading import Lock

import llvmlite.binding as llvm

from .target import Target
from .vector import Module

_lock = Lock()
"""LLVM is asked by one thread at a time."""


def compile(module: Module) -> bytes:
    """An object file. LLVM keeps what changes in registers and simplifies; loops stay as they are written."""
    with _lock:
        machine = module.target.machine()
        parsed = llvm.parse_assembly(str(module.raw))
        parsed.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(parsed, builder)
        return machine.emit_object(parsed)


class Library:
    """An object file in memory, whose exported functions have addresses."""

    def __init__(self, code: bytes, target: Target) -> None:
        with _lock:
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target.machine())
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            self._engine.finalize_object()
        self.address = lru_cache(self._address)

    def _address(self, name: str) -> int:
        """Where an exported function begins."""
        with _lock:
            found = self._engine.get_function_address(name)
        if not found:
            raise KeyError(name)
        return found
