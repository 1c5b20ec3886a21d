"""What differs between the Tritons whose Gluon this backend knows: names, and nothing else in this folder asks for a
version."""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import triton
from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

load_tile = tma.async_copy_global_to_shared if VERSION < (3, 7) else tma.async_load
"""(descriptor, coordinates, mbarrier, tile): the copy engine brings a tile, and completes the mbarrier."""

store_tile = tma.async_copy_shared_to_global if VERSION < (3, 7) else tma.async_store
"""(descriptor, coordinates, tile): the copy engine takes a tile away; `tma.store_wait` waits for it."""


@builtin
def add_tile(descriptor, coordinates, tile, _semantic=None):
    """The copy engine adds a tile to what lies in memory. Gluon has a name for it only in later versions."""
    places = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, places, tile.handle)


barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Waits for every warp of the partition that calls it."""


@builtin
def recast(tile, dtype, shape, layout, _semantic=None):
    """The same shared memory as a tile of another dtype and shape. Gluon's method for it has two names."""
    shape = [_unwrap_if_constexpr(size) for size in shape]
    return _semantic.memdesc_reinterpret(tile, _unwrap_if_constexpr(dtype), shape, _unwrap_if_constexpr(layout))
