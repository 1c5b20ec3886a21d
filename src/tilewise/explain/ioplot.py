"""Figures of memory traffic: theorem 2 on logarithmic axes, with counted runs on the model's lines, and figure 2 beside the
model. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from ..cost import paper
from ..machine import find
from .iomodel import BASE, THEORY, VARIED, Point

STYLES = {
    "standard": ("#b23a48", "standard attention"),
    "keys outside": ("#1f6f8b", "keys outside, the paper's tile"),
    "queries outside": ("#f2a33a", "queries outside, the same tile"),
    "the best tile": ("#5b8c5a", "queries outside, their best tile"),
}
"""Colour and words of each order."""

AXES = {"N": "rows N", "d": "head size d", "M": "numbers on chip M"}

LINES = {"N": (512, 1024, 2048, 4096, 8192, 16384), "d": (16, 32, 64, 128, 256), "M": (16384, 32768, 65536, 131072, 262144)}
"""Where the model is evaluated."""

MACHINE = "a100-40gb"

BARS = {"published": "#8d99ae", "model": "#1f6f8b", "measured": "#f2a33a"}


def save(path: str | PathLike[str], runs: Mapping[str, list[Point]], measured: Mapping[str, Mapping[str, float]]) -> None:
    """Draw everything into `path`. `measured`: by device, GB of "standard" and "flash" in figure 2's setting."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(13, 9), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.05, 1))
    _theorem(top, runs)
    left, right = bottom.subplots(1, 2)
    _bytes(left, measured)
    _middle(right)
    figure.savefig(path, dpi=130)


def _theorem(figure: Any, runs: Mapping[str, list[Point]]) -> None:
    """Three panels: accesses of one forward head by N, d and M."""
    figure.suptitle("Theorem 2: memory accesses of one forward head, counted in numbers moved", fontsize=13)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, name in zip(panels, AXES, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for order, (colour, words) in STYLES.items():
            values = [paper.traffic(order, *(BASE | {name: x}).values()) for x in LINES[name]]
            axes.plot(LINES[name], values, color=colour, linewidth=2, label=words)
        counts = [point.accesses for point in runs[name]]
        axes.plot(VARIED[name], counts, "o", color="#111111", markersize=7, label="keys outside, counted in runs", zorder=5)
        fixed = ", ".join(f"{other} = {BASE[other]:,}" for other in BASE if other != name)
        axes.set_title(f"grows as {name}{_power(THEORY[name])} with keys outside\n({fixed})", fontsize=10)
        axes.set_xlabel(AXES[name])
        axes.set_xticks(LINES[name], [_short(x) for x in LINES[name]])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("accesses")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)


def _short(x: int) -> str:
    """ "16 K" for 16,384."""
    return f"{x // 1024} K" if x >= 1024 else str(x)


def _power(exponent: int) -> str:
    return {2: "²", -1: "⁻¹"}[exponent]


def _bytes(axes: Any, measured: Mapping[str, Mapping[str, float]]) -> None:
    """Bars of figure 2's bytes: published, model, measured."""
    ways = {"standard": paper.standard_ways()["mask-add,dropout"], "flash": paper.flash_ways()[0]}
    bars = {"published, A100": {who: one.gb for who, one in paper.FIGURE2.items()}}
    bars["model"] = {who: way.cost.bytes / 1e9 for who, way in ways.items()}
    bars |= {f"measured, {device}": dict(found) for device, found in measured.items()}
    width = 0.8 / len(bars)
    for at, (name, found) in enumerate(bars.items()):
        places = [i + (at - (len(bars) - 1) / 2) * width for i, who in enumerate(ways) if who in found]
        heights = [found[who] for who in ways if who in found]
        drawn = axes.bar(places, heights, width * 0.92, color=BARS[name.partition(",")[0]], label=name)
        axes.bar_label(drawn, [f"{x:.1f}" for x in heights], padding=2, fontsize=9)
    axes.set_xticks(range(len(ways)), ["standard attention\nadditive mask, dropout", "FlashAttention\n(measured: tilewise)"])
    axes.set_ylabel("GB of HBM, forward and backward")
    axes.set_title("Figure 2: batch 64, 16 heads, N = 1024, d = 64, float16", fontsize=11)
    axes.margins(y=0.12)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _middle(axes: Any) -> None:
    """Forward by block size: what HBM and arithmetic take, and where blocks no longer fit."""
    machine = find(MACHINE)
    rows = paper.middle(machine)
    sizes = [row.block_n for row in rows]
    axes.set_xscale("log", base=2)
    hbm, matrix = ([1e3 * getattr(row, name) for row in rows] for name in ("hbm_s", "matrix_s"))
    axes.plot(sizes, hbm, "-o", color="#b23a48", linewidth=2, label="HBM takes at least")
    axes.plot(sizes, matrix, "-s", color="#1f6f8b", linewidth=2, label="arithmetic takes at least")
    for row in rows:
        offset, at = (7, 6) if row.hbm_s > row.matrix_s else (-50, -6), (row.block_n, 1e3 * row.hbm_s)
        axes.annotate(f"{row.lean / 1e9:.2f} GB", at, offset, textcoords="offset points", fontsize=9)
    largest = max(row.block_n for row in rows if row.kilobytes * 1024 <= machine.block_bytes)
    axes.axvspan(largest * 2**0.5, sizes[-1] * 2**0.5, color="#eeeeee", zorder=0)
    axes.set_xlim(sizes[0] / 2**0.5, sizes[-1] * 2**0.5)
    axes.set_ylim(0, 1.15e3 * rows[0].hbm_s)
    axes.text(sizes[-1], 0.55e3 * rows[0].hbm_s, "does not\nfit on chip", ha="center", fontsize=10)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("keys of a block, B_c")
    axes.set_ylabel("ms, forward")
    axes.set_title(f"Figure 2, block size: the model on {machine.name}", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="upper center")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
