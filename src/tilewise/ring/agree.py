"""Before any data moves, all ranks lay their terms on the table: whoever calls with another shape, mask or option is found by
everybody at once, and everybody raises the same error.

Every call pays for this with one message of a kilobyte to each rank, from host to host. It is not skipped for calls seen
before: what one rank calls again another may call for the first time, as lengths may repeat on one rank and not on the next;
then one would skip what the other waits for. But on a device a rank that has said the same before goes ahead with what
concerns it alone, and sends nothing until the others have been heard (`call.Call.forward`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._errors import DtypeError, OptionError, ShapeError
from .._typing import Array
from ..arrays import host
from ..mask import Mask, Where
from ..mask.base import Both
from .news import first_line

SIZE = 1024
"""Bytes of what a rank says of a call."""

OWN = "own "
"""How the names of terms begin that may differ from rank to rank."""

ERROR = OWN + "error"
KINDS = {kind.__name__: kind for kind in (ShapeError, DtypeError, OptionError)}


def agree(terms: Mapping[str, Any], gather: Callable[[Tensor], list[Tensor]], error: Exception | None = None) -> list[dict]:
    """The terms of every rank, or the same error on all of them: `error`, what this rank found wrong with its own arguments,
    goes first, then what differs between ranks."""
    return compare(terms, gather(propose(terms, error)), error)


def propose(terms: Mapping[str, Any], error: Exception | None) -> Tensor:
    """What this rank says of a call."""
    return pack({ERROR: [type(error).__name__, first_line(error)]} if error is not None else terms)


def compare(terms: Mapping[str, Any], said: list[Tensor], error: Exception | None) -> list[dict]:
    """`agree`, once everybody has said what it has to say."""
    theirs = [unpack(x) for x in said]
    if error is not None:
        raise error
    for rank, found in enumerate(theirs):
        if ERROR in found:
            kind, what = found[ERROR]
            raise KINDS.get(kind, RuntimeError)(f"rank {rank}: {what}")
    for name in terms:
        if name.startswith(OWN):
            continue
        for rank, found in enumerate(theirs):
            if found.get(name) != theirs[0].get(name):
                kind = ShapeError if name.startswith("axis") else DtypeError if name == "dtype" else OptionError
                raise kind(f"{name}: rank 0 of the group has {theirs[0].get(name)}, rank {rank} has {found.get(name)}")
    return theirs


def pack(terms: Mapping[str, Any]) -> Tensor:
    """Terms as bytes, uint8 "SIZE". Those that do not fit are cut, with a hash of the whole."""
    text = json.dumps(terms)
    limit = SIZE
    while len(text.encode()) > SIZE:
        limit //= 2
        text = json.dumps({name: shorten(value, limit) for name, value in terms.items()})
    return torch.frombuffer(bytearray(text.encode().ljust(SIZE)), dtype=torch.uint8)


def unpack(x: Tensor) -> dict[str, Any]:
    """The inverse of `pack`."""
    return _read(x.numpy().tobytes())


@lru_cache(maxsize=256)
def _read(text: bytes) -> dict[str, Any]:
    """What calls say again and again; nobody changes it."""
    return json.loads(text)


def shorten(value: Any, limit: int) -> Any:
    """A value of few letters that differs wherever the value does."""
    if isinstance(value, list):
        return [shorten(x, limit) for x in value]
    return f"{value[:limit]}… {digest(value.encode())}" if isinstance(value, str) and len(value) > limit else value


def fingerprint(mask: Mask | None) -> str:
    """A mask in words that are the same on every rank: numbers as they are, arrays by what they hold, functions by name.

    >>> from tilewise import Causal, Documents
    >>> fingerprint(Causal() & Documents([0, 0, 1]))
    'causal() & documents(int64[3] d6097eebfa1083a0)'
    """
    if mask is None:
        return "full"
    if isinstance(mask, Both):
        return " & ".join(fingerprint(part) for part in mask.parts)
    if isinstance(mask, Where) and callable(mask.test):
        return f"where({getattr(mask.test, '__module__', '')}.{getattr(mask.test, '__qualname__', type(mask.test).__name__)})"
    text, ints, arrays = mask.encode()
    for number in ints:
        text = text.replace("INT", str(number), 1)
    for array in arrays:
        text = text.replace("ARRAY", describe(array), 1)
    return text


_described: WeakIdKeyDictionary = WeakIdKeyDictionary()


def describe(array: Array) -> str:
    """An array in words. What a device holds is read once, for as long as torch sees nobody change it."""
    on_device = isinstance(array, Tensor) and not array.is_cpu and not array.is_inference()
    known = _described.get(array) if on_device else None
    if known is not None and known[0] == array._version:
        return known[1]
    x = host(array)
    text = f"{x.dtype}{list(x.shape)} {digest(x.tobytes())}"
    if on_device:
        _described[array] = array._version, text
    return text


def digest(data: bytes) -> str:
    """A short name for some bytes."""
    return blake2b(data, digest_size=8).hexdigest()
