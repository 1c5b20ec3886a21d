"""What binds: the rooflines of machines, problems on them, the paper's figure 2 beside them, and what blocks fit and move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import log10
from typing import Any, NamedTuple

from .. import cost
from ..cost import Cost
from ..cost.blocks import footprint, paper_blocks
from ..cost.count import STATISTICS
from ..cost.paper import FIGURE2, flash_ways, problem_of, setting, standard_ways
from ..cost.roofline import roofline
from ..machine import KB, MACHINES, TERA, find
from ..tiles import TileShape

DTYPE = "float16"


class Measured(NamedTuple):
    """What one device took of the paper's setting, "standard" and "flash": GB that its memory moved, where it was counted, and
    milliseconds."""

    device: str
    gb: Mapping[str, float]
    ms: Mapping[str, float]

    def words(self, who: str) -> tuple[str, str]:
        """As the page says it; a dash where it was not measured."""
        gb, ms = self.gb.get(who), self.ms.get(who)
        return "–" if gb is None else f"{gb:.2f}", "–" if ms is None else f"{ms:.3g}"


LENGTHS, HEADS, TILE = (1024, 2048, 4096, 8192, 16384), 16, TileShape(128, 128)
"""Problems that a reader can choose: forward, no mask, so many rows and heads, in these tiles."""

PAPERS = "a100-40gb"
"""What the paper's figure 2 was measured on."""

LEFT, RIGHT, BOTTOM, TOP = 0.0, 4.0, -0.5, 3.7
"""Powers of ten in the picture: FLOP a byte across, TFLOP/s up."""

WIDTH, HEIGHT = 420, 220


def across(intensity: float) -> float:
    """Where so many operations a byte stand in the picture."""
    return round(WIDTH * (log10(intensity) - LEFT) / (RIGHT - LEFT), 1)


def up(tera: float) -> float:
    """Where so many TFLOP/s stand."""
    return round(HEIGHT * (TOP - log10(tera)) / (TOP - BOTTOM), 1)


def machines() -> list[dict[str, Any]]:
    """Each machine's rates, and its roof: memory's slope up to the ridge, then the peak."""
    made = []
    for key, m in MACHINES.items():
        peak, ridge = m.rate(DTYPE) / TERA, m.ridge(DTYPE)
        roof = f"M0 {up(m.hbm / TERA)}L{across(ridge)} {up(peak)}H{WIDTH}"
        rates = {"matrix": m.rate(DTYPE), "exp": m.exponentials, "hbm": m.hbm, "l2": m.l2, "kilobytes": m.shared_bytes // KB}
        made.append({"key": key, "name": m.name, "roof": roof, "ridge": f"{ridge:.0f}", **rates})
    return made


def problems() -> dict[str, dict[str, dict[str, int]]]:
    """What each problem that can be chosen asks for, stored and by tiles; "figure" is that of the paper's figure 2."""
    made = {"figure": {name: counts(price) for name, price in figure().items()}}
    for d in (64, 128):
        for n in LENGTHS:
            p = problem_of(n, d, (1, HEADS))
            made[f"{n}/{d}"] = {"standard": counts(cost.standard(p)), "flash": counts(cost.forward(p, TILE))}
    return made


@cache
def figure() -> dict[str, Cost]:
    """The paper's setting, forward and backward, counted in the way that comes to its bytes; row statistics, which it leaves
    out, would add a hundredth."""
    prices = {"standard": standard_ways()["mask-add,dropout"].cost, "flash": flash_ways()[0].cost}
    kept = {who: {name: x for name, x in price.tensors.items() if name not in STATISTICS} for who, price in prices.items()}
    return {who: replace(price, tensors=kept[who]) for who, price in prices.items()}


def counts(price: Cost) -> dict[str, int]:
    """What a roofline needs of a cost."""
    return {"flops": price.flops, "exps": price.exponentials, "bytes": price.bytes, "least": price.least_bytes}


def published() -> list[dict[str, str]]:
    """Figure 2: published and model side by side, neither scaled to meet the other."""
    device, rows = find(PAPERS), []
    prices = figure()
    for who, price in prices.items():
        theirs, times = FIGURE2[who], roofline(price, device, setting().dtype, cached=False)
        binds = max(("matrix", "HBM", "exp"), key=lambda part: times.seconds[part])
        rows.append(
            {
                "who": who,
                "gflop": f"{theirs.gflop}", "gb": f"{theirs.gb}", "ms": f"{theirs.ms}",
                "our_gflop": f"{price.flops / 1e9:.1f}", "our_gb": f"{price.bytes / 1e9:.2f}",
                "our_ms": f"{1e3 * times.seconds[binds]:.3g}", "binds": binds,
            }
        )  # fmt: skip
    return rows


def apart() -> str:
    """How many times the model's operations are the published ones."""
    return " / ".join(f"{price.flops / 1e9 / FIGURE2[who].gflop:.1f}" for who, price in figure().items())


def ticks() -> dict[str, list[dict[str, Any]]]:
    """Powers of ten along the axes of the roofline."""
    return {
        "x": [{"at": across(10**power), "text": f"{10**power:,}"} for power in range(int(LEFT), int(RIGHT) + 1)],
        "y": [{"at": up(10**power), "text": f"{10**power:,}"} for power in range(int(TOP) + 1)],
    }


def chip(kilobytes: int = 100, d: int = 64) -> dict[str, Any]:
    """What the paper's rule makes of so much memory, in float16: how the page opens."""
    elements = kilobytes * KB // 2
    shape = paper_blocks(elements, d)
    parts = {name: size / elements for name, size in footprint(shape, d, d).items()}
    at, bars = 0.0, []
    for name, share in parts.items():
        bars.append({"name": name, "x": round(280 * at, 1), "w": round(280 * share, 1)})
        at += share
    return {
        "kilobytes": kilobytes,
        "d": d,
        "shape": shape,
        "ratio": f"{d * d / elements:.2f}",
        "bars": bars,
        "whole": f"{at:.0%}",
    }
