"""The random words of `tilewise.dropout`, a vector of counters at a time."""

from __future__ import annotations

from collections.abc import Sequence

from ...dropout import MULTIPLIERS, ROUNDS, WEYL
from .vector import I32, I64, Code, Value


def philox(code: Code, counter: Sequence[Value], key: Sequence[Value]) -> list[Value]:
    """Philox4x32-10: four random words for each lane of four counter words, all int32; the two words of the key are single
    numbers or vectors."""
    words: list[Value] = [word if word.count else code.vector(word) for word in counter]
    keys: list[Value] = list(key)
    for _ in range(ROUNDS):
        (high, low), (other_high, other_low) = (_product(c, m) for c, m in zip(words[::2], MULTIPLIERS, strict=True))
        words = [other_high ^ words[1] ^ keys[0], other_low, high ^ words[3] ^ keys[1], low]
        keys = [k + _signed(w) for k, w in zip(keys, WEYL, strict=True)]
    return words


def choose(code: Code, words: Sequence[Value], lane: Value) -> Value:
    """Word 0, 1, 2 or 3 of each lane, as `lane` says."""
    low, high = (code.select(lane.equals(at), words[at], words[at + 1]) for at in (0, 2))
    return code.select(lane < 2, low, high)


def at_least(word: Value, threshold: Value) -> Value:
    """Whether a word, a number without sign, is at least a threshold: both signs turned, their order is that of signed ones."""
    return (word ^ -(2**31)) >= (threshold ^ -(2**31))


def _product(word: Value, number: int) -> tuple[Value, Value]:
    """The high and the low half of the 64 bits of a product without sign."""
    wide = word.unsigned(I64) * number
    return (wide >> 32).to(I32), wide.to(I32)


def _signed(word: int) -> int:
    """The same 32 bits as an int32."""
    return word - 2**32 if word >= 2**31 else word
