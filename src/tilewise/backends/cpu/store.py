"""Compiled kernels: in this process, and on disk for the next one. Whatever is wrong with a file, it is compiled again;
whatever is wrong with the folder, nothing is kept."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock

import llvmlite
import llvmlite.binding as llvm

from ..cache import folder, put
from .machinecode import Library, compile
from .target import Target
from .vector import Module

Write = Callable[[], Module]
"""What writes the module of a kernel."""

DIGEST_BYTES = hashlib.sha256().digest_size

_libraries: dict[tuple[str, Target], Library] = {}
_locks: dict[tuple[str, Target], Lock] = {}


def library(name: str, target: Target, write: Write) -> Library:
    """The kernel called `name`: of this process, from disk, or compiled now. Threads that ask for the same one wait for it."""
    key = (name, target)
    found = _libraries.get(key)
    if found is not None:
        return found
    with _locks.setdefault(key, Lock()):
        if key not in _libraries:
            _libraries[key] = _load(name, target, write)
        return _libraries[key]


def _load(name: str, target: Target, write: Write) -> Library:
    code = read(name, target)
    if code is not None:
        with suppress(RuntimeError):
            return Library(code, target)
    code = _compiled(name, write)
    keep(name, target, code)
    return Library(code, target)


def _compiled(name: str, write: Write) -> bytes:
    """Compile, and say so to somebody who sits in front of it."""
    watched = sys.stderr is not None and sys.stderr.isatty()
    if watched:
        print(f"tilewise: compiling {name} for this CPU, once …", end="", file=sys.stderr, flush=True)
    try:
        return compile(write())
    finally:
        if watched:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# ---- on disk


def path(name: str, target: Target) -> Path:
    """Of the object file: in cpu/ of the user's cache, by name and by all that it depends on."""
    return folder() / "cpu" / f"{name}-{digest(target)}.o"


def read(name: str, target: Target) -> bytes | None:
    """An object file as it was written; None if there is none, or if it is not whole."""
    try:
        told = path(name, target).read_bytes()
    except (OSError, RuntimeError):
        return None
    check, code = told[:DIGEST_BYTES], told[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == check else None


def keep(name: str, target: Target, code: bytes) -> bool:
    """Write an object file, whose readers see all of it or nothing; whether that was possible."""
    try:
        put(path(name, target), hashlib.sha256(code).digest() + code)
    except (OSError, RuntimeError):
        return False
    return True


@lru_cache
def digest(target: Target) -> str:
    """Of all that machine code depends on: the instruction set, the compiler, and the source of this folder."""
    about = (target, llvmlite.__version__, llvm.llvm_version_info, sys.platform)
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(repr(about).encode() + sources).hexdigest()[:20]
