"""A mask from text, parsed and never evaluated: the command line's `"causal & window(left=3)"` and what operators carry."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache

from .._errors import DtypeError, OptionError, ShapeError
from .._typing import Array
from .band import Causal, Full, Window
from .base import Mask
from .sequence import Chunked, Documents, Lengths, Prefix
from .where import Where, function

_MASKS: dict[str, type[Mask]] = {
    m.__name__.lower(): m for m in (Full, Causal, Window, Prefix, Documents, Chunked, Lengths, Where)
}


def parse(text: str, ints: Iterable[int] = (), arrays: Iterable[Array] = ()) -> Mask:
    """The mask that `text` describes; each INT and ARRAY in it takes the next of `ints` and `arrays`.

    >>> parse("causal & window(left=3)")
    Both(parts=(Causal(align='bottom-right'), Window(left=3, right=None)))
    """
    if not isinstance(text, str):
        raise DtypeError(f"a mask is read from text, got {type(text).__name__}")
    try:
        return _Reader(iter(ints), iter(arrays), text).mask(_tree(text))
    except RecursionError:
        raise OptionError(f"mask {text[:80]!r}… of {len(text)} characters is nested too deeply") from None


@lru_cache(maxsize=256)
def _tree(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise OptionError(f"mask {text[:80]!r} cannot be read: {error}") from None


class _Reader:
    """Reads one mask expression: names, calls with literal arguments, and `&` between them."""

    def __init__(self, ints: Iterator[int], arrays: Iterator[Array], text: str) -> None:
        self.ints, self.arrays, self.text = ints, arrays, text

    def mask(self, node: ast.expr) -> Mask:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            return self.mask(node.left) & self.mask(node.right)
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name not in _MASKS:
            raise OptionError(f"mask {self.text!r}: expected one of {', '.join(_MASKS)}, got {ast.unparse(call.func)!r}")
        args = [self.value(a) for a in call.args]
        keywords = {str(k.arg): self.value(k.value) for k in call.keywords}
        if name == "where" and isinstance(args[0] if args else None, int):
            args[0] = function(args[0])
        try:
            return _MASKS[name](*args, **keywords)
        except (TypeError, ValueError) as error:
            if isinstance(error, OptionError | ShapeError):
                raise
            raise OptionError(f"mask {self.text!r}: {str(error).replace('.__init__()', '')}") from None

    def value(self, node: ast.expr) -> Array:
        if isinstance(node, ast.Name) and node.id in ("INT", "ARRAY"):
            value = next(self.ints if node.id == "INT" else self.arrays, None)
            if value is None:
                raise OptionError(f"mask {self.text!r}: there is no {node.id} left to take")
            return value
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise OptionError(f"mask {self.text!r}: {ast.dump(node)[:80]} is not a number, a list or a string") from None
