"""A kernel that cannot be compiled, for tests that must find it."""

# Kernels are in Triton's language, not Python's:
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wrong_kernel(SIZE: tl.constexpr):
    """Adds a block to one of another size."""
    tl.device_print("", tl.arange(0, SIZE) + tl.arange(0, 2 * SIZE))
