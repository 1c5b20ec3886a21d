"""A look at what this GPU's kernels compute, before any plan relies on them: a small problem, forward and backward, against the
definition. Once a machine: what was found in order is noted in the user's cache."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
import triton
from torch import Tensor

from ...problem import Inputs, Partial, Problem
from ..cache import folder, put
from ..made import on_device
from ..trial import OPTIONS, small, unseen_by_others, wrong
from .backward_pass import backward
from .config import configure
from .forward_pass import forward

ROWS, COLUMNS = 253, (64, 40)
"""Query rows, and columns of q and of v."""


def broken(device: str) -> str:
    """Why the kernels cannot be used on a GPU; empty where they can, and while a graph is being captured, in which nothing runs
    but what belongs to it. A GPU without memory left says nothing of its kernels: the next call looks again."""
    if torch.cuda.is_current_stream_capturing():
        return ""
    try:
        return _broken(device)
    except torch.OutOfMemoryError as error:
        return f"its kernels could not be tried on {device}: {error}"


@lru_cache
def _broken(device: str) -> str:
    note = f"hopper-{digest(device)}"
    with suppress(OSError, RuntimeError):
        if (folder() / note).read_bytes() == note.encode():
            return ""
    try:
        with unseen_by_others(), torch.autocast("cuda", enabled=False):
            found = differences(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a strange driver or compiler does
        return f"its kernels failed on {device}: {type(error).__name__}: {error}"
    if found:
        return f"its kernels compute a wrong {', '.join(found)} on {device}"
    with suppress(OSError, RuntimeError):
        put(folder() / note, note.encode())
    return ""


def differences(device: str) -> list[str]:
    """What comes out other than it should."""
    x, do = small("bfloat16", ROWS, COLUMNS)
    x, do = x.map(lambda t: t.to(device)), do.to(device)
    return wrong((x, do), *run(x, do))


def run(x: Inputs[Tensor], do: Tensor) -> tuple[Partial, Inputs[Tensor]]:
    """o and lse, and the gradients of q, k and v."""
    problem = Problem.describe(x, OPTIONS)
    config = configure(problem)
    with on_device(x.q):
        made = forward(problem, x, config)
        return made, backward(problem, x, made, Partial(do, None), config, ("q", "k", "v"))


def digest(device: str) -> str:
    """Of what the result depends on: the model of the GPU, the compilers, and the kernels' source."""
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    gpu = torch.cuda.get_device_properties(device)
    about = gpu.name, gpu.multi_processor_count, torch.__version__, torch.version.cuda, triton.__version__
    return hashlib.sha256(repr(about).encode() + sources).hexdigest()[:20]
