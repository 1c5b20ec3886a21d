"""A program whose kernel writes past the end of its tensor, for tests that must find it."""

# Kernels are in Triton's language, not Python's:
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def past_the_end_kernel(x_ptr, SIZE: tl.constexpr):
    """Fills SIZE elements, and as many behind them."""
    tl.store(x_ptr + tl.arange(0, 2 * SIZE), 1.0)


if __name__ == "__main__":
    past_the_end_kernel[(1,)](torch.empty(1024, device="cuda"), SIZE=1024)
    torch.cuda.synchronize()
