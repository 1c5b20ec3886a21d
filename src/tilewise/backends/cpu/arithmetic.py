"""Functions of a vector of float32 numbers that no instruction computes, as polynomials."""

from __future__ import annotations

import math

from .vector import F32, I32, Code, Value

LOG2_E, LN_2 = 1 / math.log(2), math.log(2)

EXP2 = (1.0, 0.6931472028550472, 0.24022647913631773, 0.0555033247115668, 0.009618437357459724, 0.0013398874404361918,
        0.00015353361942723856)  # fmt: skip
"""2ˣ on [−½, ½] as the polynomial of degree 6 that is 1 at 0 and whose largest relative error is least, 2.0e-9. Degree 5 comes
within 9.1e-8, about a rounding, but one that neighbouring scores share: gradients, which are differences, would show it."""

EXP2_ROUGH = (1.0, 0.69312419, 0.24024099, 0.05590642, 0.00958285)
"""The same of degree 4, within 2.9e-6: for weights that are rounded to bfloat16, which is a thousand times as much."""

HIDDEN = -(2**31)
"""The bits of -0.0: a weight, or its gradient, of a pair that is hidden. No other is negative zero, so a product can tell what
it must not read from what happens to count nothing."""

ROUNDER = 1.5 * 2**23
"""Added to a small number, the sum keeps the nearest integer in its lowest bits."""

LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
       2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
"""(log(1 + x) − x + x²/2) / x³ around 0, highest power first: Moshier, Cephes, logf."""

TANH_UP = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08, 1.48572235717979e-05,
           6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
TANH_DOWN = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
"""tanh x = x·up(x²) / down(x²) up to ±`TANH_FAR`, highest power first: Eigen, ptanh_float."""

TANH_FAR = 7.90531110763549805
"""From here on tanh is 1 to float32."""


def exp2(code: Code, x: Value, polynomial: tuple[float, ...] = EXP2) -> Value:
    """2ˣ for x ≤ 127: exactly 0 from −126.5 down, NaN for NaN."""
    x = code.select(x < -127.0, code.vector(-127.0), x)
    shifted = x + (ROUNDER + 127)  # its lowest bits hold the exponent of 2ⁿ, n the integer next to x
    f = x - (shifted - (ROUNDER + 127))
    return horner(code, f, polynomial[::-1]) * (shifted.bits(I32) << 23).bits(F32)


def log(code: Code, x: Value) -> Value:
    """The natural logarithm of a positive number; −inf for 0, NaN for NaN."""
    bits = x.bits(I32) - 0x3F3504F3  # of √½: the mantissa will lie in [√½, √2)
    exponent = (bits - (bits & 0x7FFFFF)).to(F32) * 2.0**-23
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).bits(F32) - 1.0
    square = f * f
    y = horner(code, f, LOG) * f * square
    y = code.fma(exponent, -2.12194440e-4, y) - square * 0.5
    y = code.fma(exponent, 0.693359375, f + y)
    return code.select(x.equals(0.0), code.vector(-math.inf), code.select(x.differs(x), x, y))


def tanh(code: Code, x: Value) -> Value:
    """The hyperbolic tangent, to a few roundings of its own size; NaN for NaN."""
    x = code.select(x > TANH_FAR, code.vector(TANH_FAR), code.select(x < -TANH_FAR, code.vector(-TANH_FAR), x))
    square = x * x
    return x * horner(code, square, TANH_UP) / horner(code, square, TANH_DOWN)


def horner(code: Code, x: Value, coefficients: tuple[float, ...]) -> Value:
    """A polynomial, its highest power first."""
    value = code.vector(coefficients[0])
    for c in coefficients[1:]:
        value = code.fma(value, x, code.vector(c))
    return value
