"""Sizes that `tilewise tune` has found on a machine: one JSON file in the user's cache, read once a process. Whatever is wrong
with the file, calls run with the built-in sizes."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from ...problem import Problem
from ..cache import folder, put
from ..sight import kind_of
from .fit import LEAST, PASSES
from .sizes import Launch
from .variant import padded

FORMAT = 1
"""Of the file; one of another format is not read."""


class Key(NamedTuple):
    """What sizes were found for."""

    gpu: str
    """Its name and capability."""
    triton: str
    kernels: str
    """A digest of the kernels' source: sizes of other kernels say nothing of these."""
    name: str
    """The pass."""
    dtype: str
    d: int
    e: int
    """Columns in a tile."""
    mask: str
    """NONE, INTERVAL or TABLE, as kernels see it."""
    score: str
    """What the logits have beside q·k, parted by spaces."""


@dataclass(frozen=True)
class Found:
    """The best sizes, and what they and the built-in ones took."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    apart: bool
    microseconds: float
    builtin_microseconds: float
    date: str = ""
    problem: str = ""
    """What was timed, for readers."""

    @property
    def legal(self) -> bool:
        blocks = {LEAST << power for power in range(4)}  # 128 rows at most: `backward_pass.ROWS`
        whole = all(type(x) is int for x in (self.block_m, self.block_n, self.warps, self.stages))
        sizes = self.block_m in blocks and self.block_n in blocks | {256}
        return whole and sizes and self.warps in (1, 2, 4, 8, 16) and 1 <= self.stages <= 8 and type(self.apart) is bool

    def launch(self, like: Launch) -> Launch:
        """These sizes as a launch."""
        sizes = {name: getattr(self, name) for name in ("block_m", "block_n", "warps", "stages", "apart")}
        return replace(like, **sizes)


def path() -> Path:
    """sizes.json in the user's cache."""
    return folder() / "sizes.json"


def entries() -> Mapping[Key, Found]:
    """Everything that the file holds, of all machines; read once a process."""
    asked = os.environ.get("TILEWISE_CACHE"), os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME")
    return _entries(asked)


@lru_cache(maxsize=8)
def _entries(asked: tuple[str | None, ...]) -> Mapping[Key, Found]:
    try:
        where = path()
        text = where.read_text()
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        return _ignored(f"tilewise cannot read its tuned sizes: {error}")
    try:
        told = json.loads(text)
        if told["format"] != FORMAT:
            return _ignored(f"{where} is of format {told['format']}, not {FORMAT}: run `tilewise tune` again")
        found = {Key(**one["key"]): Found(**one["found"]) for one in told["entries"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return _ignored(f"{where} is broken ({type(error).__name__}): run `tilewise tune` again")
    return found


def _ignored(message: str) -> Mapping[Key, Found]:
    """Nothing, and a warning: once, for what was read is kept."""
    warnings.warn(f"{message}; the built-in sizes are used", stacklevel=2)
    return {}


def add(found: Mapping[Key, Found]) -> Path:
    """Put what was found into the file, beside what is there already. Readers see the old file or the new one, never half of
    one. Raises OSError where it cannot be written."""
    _entries.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what cannot be read is written anew
        every = {**entries(), **found}
    where = path()
    told = {"format": FORMAT, "entries": [{"key": key._asdict(), "found": asdict(one)} for key, one in sorted(every.items())]}
    put(where, json.dumps(told, indent=1).encode())
    _entries.cache_clear()
    return where


def clear() -> bool:
    """Remove the file; whether there was one."""
    _entries.cache_clear()
    try:
        path().unlink()
    except FileNotFoundError:
        return False
    return True


# ---- which entry a problem asks for


def preferred(problem: Problem, name: str, sizes: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """forward, dq, dk_dv, dbias and careful, those that were tuned for this problem on its GPU in place of the built-in ones.
    `name`: of the machine."""
    found = entries()
    if not found:
        return sizes
    *mains, careful = sizes
    key = key_of(problem, name)
    for at, part in enumerate(PASSES):
        one = found.get(key._replace(name=part))
        if one is not None and one.legal and not (one.block_m % careful.block_m or one.block_n % careful.block_n):
            mains[at] = one.launch(mains[at])
    return *mains, careful


def key_of(problem: Problem, machine: str, name: str = "") -> Key:
    """What the sizes of a pass of a problem are found under."""
    p = problem
    score = p.score
    added = {"bias": score.bias, "alibi": score.alibi, "softcap": score.softcap, "dropout": p.dropout}
    words = " ".join(word for word, there in added.items() if there is not None)
    gpu = f"{gpu_name(p.device)} {machine}"
    return Key(gpu, triton.__version__, digest(), name, p.dtype, padded(p.d), padded(p.e), kind_of(p), words)


@lru_cache
def gpu_name(device: str) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


@lru_cache
def digest() -> str:
    """Of the source of everything that is compiled."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    texts: list[Any] = [
        text for text in (file.read_bytes() for file in files) if b"\n@triton.jit" in text or b"\n@kernel" in text
    ]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]
