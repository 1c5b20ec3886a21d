"""The lists of what is measured, by kind of device. Adding a case is adding a line; every case belongs to a group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ..dropout import Dropout
from ..mask import Causal, Documents, Full, Mask, Window
from ..problem import Options
from ..ragged import Ragged
from .cases import CALLS, QKV, Case

TOKENS, WIDTH = 16384, 2048
"""b·n and h·d of the published tables of attention kernels, which the group "issue" repeats."""


def grid(d: int, mask: Mask, n: int) -> Case:
    """One cell of those tables: bfloat16, as many heads and batch entries as keep b·n and h·d."""
    h, name = WIDTH // d, "causal" if isinstance(mask, Causal) else "full"
    return Case(f"{name}-d{d}-n{n}", TOKENS // n, n, n, h, h, d, d, "bfloat16", Options(mask))


def long(name: str, options: Options, n: int = TOKENS, **more: Any) -> Case:
    """One sequence of n tokens, 16 heads of 128."""
    return replace(Case(name, 1, n, n, 16, 16, 128, 128, "bfloat16", options), **more)


def lengths(total: int, count: int) -> list[int]:
    """`count` unequal lengths that add up to `total`, always the same."""
    cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, total), count - 1, replace=False))
    return np.diff(cuts, prepend=0, append=total).tolist()


DOCUMENTS = lengths(TOKENS, 64)
PAGES = lengths(4096, 11)

TINY = Case("tiny", 1, 64, 64, 4, 4, 64, 64, "bfloat16", Options(Causal()), passes=CALLS)
"""So little that the call itself is what takes time."""


def tiny(device: str) -> Case:
    """That case in the dtype of this kind of device."""
    return TINY if device.partition(":")[0] == "cuda" else replace(TINY, dtype="float32")


GROUPS: dict[str, dict[str, Iterable[Case]]] = {
    "cpu": {
        "main": (
            Case("causal", 1, 2048, 2048, 8, 8, 64, 64, options=Options(Causal())),
            Case("full", 1, 1024, 1024, 8, 8, 64, 64),
            Case("bfloat16", 1, 2048, 2048, 8, 8, 128, 128, "bfloat16", Options(Causal())),
            Case("window", 1, 2048, 2048, 8, 2, 64, 64, options=Options(Causal() & Window(left=255))),
            Case("documents", 1, 2048, 2048, 8, 8, 64, 64,
                 options=Options(Causal() & Documents.from_lengths([350, 750, 198, 750]))),
            Case("softcap", 1, 1024, 1024, 8, 8, 64, 64, options=Options(Causal(), softcap=30.0)),
            Case("decode", 8, 1, 4096, 8, 2, 64, 64, options=Options(Causal()), passes=("decode",)),
        ),
        "prefill": tuple(
            Case(f"{name}-n{n}-d{d}" + (f"-b{b}" if b > 1 else ""), b, n, n, h, h, d, d, options=Options(mask))
            for b, n, h, d in ((1, 1024, 8, 64), (1, 4096, 8, 64), (1, 4096, 8, 128), (2, 2048, 16, 128), (1, 16384, 4, 64))
            for name, mask in (("full", Full()), ("causal", Causal()))
        ),
        "masks": (
            Case("window-n4096", 1, 4096, 4096, 8, 8, 64, 64, options=Options(Causal() & Window(left=255))),
            Case("documents-n4096", 1, 4096, 4096, 8, 8, 64, 64, options=Options(Causal() & Documents.from_lengths(PAGES))),
            Case("grouped-n2048", 1, 2048, 2048, 32, 4, 128, 128, options=Options(Causal())),
        ),
        "half": tuple(
            Case(f"bfloat16-{name}-n{n}-d{d}", 1, n, n, 8, 8, d, d, "bfloat16", Options(mask))
            for n, d in ((1024, 64), (4096, 128)) for name, mask in (("full", Full()), ("causal", Causal()))
        ),
        "decode": tuple(
            Case(f"decode-b{b}-{dtype}", b, 1, 8192, 32, 8, 128, 128, dtype, Options(Causal()), passes=("decode",))
            for b in (1, 8) for dtype in ("float32", "bfloat16")
        ),
        "heads": (
            *(Case(f"d{d}", 1, 1024, 1024, 8, 8, d, d, options=Options(Causal())) for d in (40, 72, 80, 96, 192, 256)),
            Case("d96-e40", 1, 1024, 1024, 8, 8, 96, 40),
            Case("few-queries", 1, 128, 8192, 8, 8, 64, 64),
            Case("few-keys", 1, 8192, 128, 8, 8, 64, 64),
        ),
        "small": (
            tiny("cpu"),
            *(Case(f"tiny-b{b}-n{n}-h{h}", b, n, n, h, h, 64, 64, options=Options(Causal()), passes=("call",))
              for b, n, h in ((1, 32, 1), (4, 64, 8), (1, 128, 8))),
        ),
    },
    "cuda": {
        "issue": (
            *(grid(d, mask, 2**k) for d in (64, 128) for mask in (Full(), Causal()) for k in range(9, 15)),
            *(grid(256, mask, n) for mask in (Full(), Causal()) for n in (2048, 16384)),
        ),
        "masks": (
            long("causal", Options(Causal())),
            long("window", Options(Causal() & Window(left=1023))),
            long("documents", Options(Causal() & Documents.from_lengths(DOCUMENTS))),
            long("packed", Options(Causal(), ragged=Ragged.from_lengths(DOCUMENTS))),
            long("grouped", Options(Causal()), 8192, h=32, g=8),
        ),
        "groups": tuple(
            Case(f"groups-h{h}-n{n}", TOKENS // n, n, n, h, 8, 128, 128, "bfloat16", Options(Causal()))
            for h in (32, 64) for n in (4096, 8192)
        ),
        "float32": tuple(
            Case(f"float32-{name}-d{d}", 1, 4096, 4096, WIDTH // d, WIDTH // d, d, d, options=Options(mask))
            for name, mask in (("full", Full()), ("causal", Causal())) for d in (64, 128)
        ),
        "scores": (
            Case("bias", 4, 2048, 2048, 16, 16, 64, 64, "bfloat16", bias="1 h n s"),
            Case("bias-gradient", 4, 2048, 2048, 16, 16, 64, 64, "bfloat16", bias="1 h n s", needs=(*QKV, "bias")),
            long("softcap", Options(Causal(), softcap=30.0), 8192),
            long("alibi", Options(Causal()), 8192, alibi=True),
            long("dropout", Options(Causal(), dropout=Dropout(0.1, seed=1)), 8192),
            long("sink", Options(Causal() & Window(left=127)), 8192, sink=True, h=32, g=8, d=64, e=64, needs=(*QKV, "sink")),
        ),
        "heads": tuple(
            Case(f"d{d}" if d == e else f"d{d}-e{e}", 2, 4096, 4096, 16, 16, d, e, "bfloat16")
            for d, e in ((40, 40), (72, 72), (80, 80), (96, 96), (192, 192), (192, 128), (256, 256), (512, 512))
        ),
        "small": (
            TINY,
            Case("decode", 32, 1, 16384, 32, 8, 128, 128, "bfloat16", Options(Causal()), passes=("decode",)),
            Case("decode-one", 1, 1, 8192, 32, 8, 128, 128, "bfloat16", Options(Causal()), passes=("decode",)),
        ),
    },
}  # fmt: skip
"""By kind of device, then by group; a kind that is not here takes the cases of "cpu"."""

CASES: dict[str, dict[str, Case]] = {
    kind: {case.name: replace(case, group=group) for group, cases in groups.items() for case in cases}
    for kind, groups in GROUPS.items()
}
"""The same by name."""

QUICK = ("causal", "window", "decode")
"""What `--quick` measures."""
