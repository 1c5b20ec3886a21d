"""The picture of a schedule: who computes which part of the score matrix, and what each rank does when."""

from __future__ import annotations

from itertools import pairwise
from os import PathLike
from typing import Any

import numpy as np

from ..mask import Tile
from ..ring.passes import passes
from ..ring.program import Plan
from ..ring.sight import dense
from ..ring.simulate import Forecast
from ..ring.survey import survey
from ..ring.teams import Teams

LANES = 16
"""Ranks that get a lane of their own; of more, the first ones do."""

ROUNDS = 24
"""Rounds that are drawn at most."""

CELLS = 160
"""Blocks of rows a side of the score matrix at most."""

LETTERS = 24
"""Blocks a side up to which each one says whose it is."""

KINDS = {
    "compute": ("#1f6f8b", "", "attention of a block"),
    "merge": ("#f2b35e", "", "merging, adding, finishing"),
    "copy": ("#8a6bbe", "", "copying"),
    "wait": ("#ffffff", "////", "waiting for a message"),
    "send": ("#9aa5ab", "", "its messages under way"),
}
"""Colour, hatch and words of everything a rank does: dark, light and hatched, so that grey print tells them apart."""


def save(plan: Plan, forecast: Forecast, path: str | PathLike[str], title: str = "") -> None:
    """Draw a plan's forecast (made with `keep=True`) into `path`, as its name ends. Needs matplotlib."""
    from matplotlib.figure import Figure

    lanes = min(plan.world, LANES)
    figure = Figure(figsize=(13.5, max(5.2, 2.6 + 0.34 * lanes)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.45])
    _matrix(left, plan)
    _lanes(right, plan, forecast, lanes)
    figure.suptitle(f"{title}: {1e3 * forecast.total_s:.2f} ms forward, efficiency {forecast.efficiency:.1%}", fontsize=12)
    figure.savefig(path, dpi=150)


def colours(world: int) -> list[Any]:
    """One colour a rank, from dark to light, neighbours well apart where there are few."""
    from matplotlib import colormaps

    return [colormaps["cividis"](x) for x in np.linspace(0.05, 0.95, max(world, 2))]


def _matrix(axes: Any, plan: Plan) -> None:
    """The score matrix in the colours of the ranks (or teams) that compute it, lighter where the mask cuts a cell; where there
    are few, each block says whose it is and in which round."""
    from matplotlib.colors import to_rgb
    from matplotlib.ticker import MaxNLocator

    p, teams = plan.problem, Teams(plan.problem, plan.q, plan.kv, plan.method)
    chunks = _edges(plan.q.shards, p.n), _edges(plan.kv.shards, p.s)
    rows, columns = (_finer(edges) for edges in chunks)
    shade = np.array([to_rgb(x) for x in colours(teams.count)])
    kinds = np.stack([
        p.mask.tiles(dense(p), slice(0, p.b), slice(rows[i], rows[i + 1]), columns) for i in range(len(rows) - 1)
    ])  # fmt: skip
    mine = _whose(teams, plan.q.replicated, rows, columns)[0]
    light = np.array([1.0, 0.4, 0.0])[kinds][..., None]
    axes.pcolormesh(columns, rows, shade[mine] * (1 - light) + light, rasterized=True)
    few = max(len(x) for x in chunks) <= LETTERS + 1
    if few:
        axes.hlines(chunks[0], 0, columns[-1], colors="white", linewidth=0.8)
        axes.vlines(chunks[1], 0, rows[-1], colors="white", linewidth=0.8)
        _letters(axes, plan, teams, (rows, columns), kinds, shade)
    axes.set(xlim=(0, columns[-1]), ylim=(rows[-1], 0), xlabel="key row", ylabel="query row")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.tick_params(labelsize=8)
    whose = "team" if teams.size > 1 else "rank"
    labels = f"{whose}" if plan.q.replicated else f"{whose} · round"
    text = f"who computes what ({labels})" if few else f"who computes what, from {whose} 0 (dark) to the last"
    part = f", the first {rows[-1]} of {p.n} rows" if rows[-1] < p.n else ""
    axes.set_title(f"{text}{part}\npale: cut by the mask; white: hidden, skipped", fontsize=9)


def _letters(axes: Any, plan: Plan, teams: Teams, edges: tuple, kinds: np.ndarray, shade: np.ndarray) -> None:
    """Rank and round of each block, on the visible cell nearest to the middle of what is visible of it."""
    from matplotlib.patheffects import withStroke

    when, (rows, columns) = _rounds(teams), edges
    middle = [(x[:-1] + x[1:]) / 2 for x in edges]
    cells = [
        np.searchsorted(_edges(side.shards, side.length), x, "right") for side, x in zip((plan.q, plan.kv), middle, strict=True)
    ]
    mine, owner = _whose(teams, plan.q.replicated, rows, columns)
    for i in np.unique(cells[0]):
        for j in np.unique(cells[1]):
            a, b = np.nonzero(kinds * (cells[0][:, None] == i) * (cells[1] == j))
            if not len(a):
                continue
            t, o = mine[a[0], b[0]], owner[b[0]]
            x, y = middle[1][b], middle[0][a]
            at = np.argmin(np.abs(x - x.mean()) / columns[-1] + np.abs(y - y.mean()) / rows[-1])
            dark = kinds[a[at], b[at]] == Tile.FULL and shade[t] @ [0.3, 0.59, 0.11] < 0.5
            ink, halo = ("white", "black") if dark else ("black", "white")
            text = axes.text(x[at], y[at], f"{t}" if plan.q.replicated else f"{t}·{when[t, o]}", color=ink,
                             ha="center", va="center", fontsize=8 if len(np.unique(cells[0])) <= 16 else 6)  # fmt: skip
            text.set_path_effects([withStroke(linewidth=1.4, foreground=halo)])


def _whose(teams: Teams, replicated: bool, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The team that computes each cell, and the one that holds each column's keys."""
    owner = _who(teams.kv_rows, columns)
    mine = owner[None] if replicated else _who(teams.q_rows, rows)[:, None]
    return np.broadcast_to(mine, (len(rows) - 1, len(owner))), owner


def _rounds(teams: Teams) -> np.ndarray:
    """In which round each team looks at the keys of each other one."""
    when = np.zeros((teams.count, teams.count), int)
    for j, x in reversed(list(enumerate(passes(teams, survey(teams))))):
        for owners in x.owners:
            when[np.arange(teams.count), owners] = j
    return when


def _edges(shards: Any, length: int) -> np.ndarray:
    """Where blocks of rows begin: at the ends of runs, or evenly where those are too many; of stripes, the first rows only."""
    edges = np.unique([0, length, *(edge for rows in shards for x in rows.ranges for edge in (x.start, x.stop))])
    if any(x.step > 1 for rows in shards for x in rows.ranges):
        return np.arange(min(length, LETTERS) + 1)
    return edges if len(edges) <= CELLS else np.unique(np.linspace(0, length, CELLS + 1).astype(int))


def _finer(edges: np.ndarray) -> np.ndarray:
    """The same edges and more between them, until there are about `CELLS`: masks are not made of chunks."""
    parts = max(1, CELLS // max(len(edges) - 1, 1))
    return np.unique([a + (b - a) * x // parts for a, b in pairwise(edges.tolist()) for x in range(parts + 1)])


def _who(shards: Any, edges: np.ndarray) -> np.ndarray:
    """The team that holds the middle row of each block."""
    middle, found = (edges[:-1] + edges[1:]) // 2, np.zeros(len(edges) - 1, int)
    for t, rows in enumerate(shards):
        at = rows.find(middle)
        found[rows.find(middle + 1) > at] = t
    return found


def _lanes(axes: Any, plan: Plan, forecast: Forecast, lanes: int) -> None:
    """What each rank does from left to right: work and waiting on a broad bar, its messages on a thin one below."""
    from matplotlib.patches import Patch

    for span in forecast.spans:
        kind = span.kind.split()[0]
        colour, hatch, _ = KINDS[kind]
        place, height = (0.26, 0.14) if kind == "send" else (-0.34, 0.52)
        start, length = 1e3 * span.start[:lanes], 1e3 * (span.stop - span.start)[:lanes]
        for r in np.flatnonzero(length > 0):
            edge = "#777777" if kind == "wait" else "white"
            axes.broken_barh(
                [(start[r], length[r])], (r + place, height), facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=0.4
            )
    axes.set_yticks(range(lanes), [f"rank {r}" for r in range(lanes)], fontsize=8)
    computed = [x for x in forecast.spans if x.kind == "compute"]
    last = 1e3 * (float(computed[ROUNDS - 1].stop.max()) if len(computed) > ROUNDS else forecast.total_s)
    axes.set(ylim=(lanes - 0.4, -0.6), xlim=(0, last * 1.005), xlabel="milliseconds, forward")
    some = f"the first {lanes} of {plan.world} ranks" if lanes < plan.world else "every rank"
    part = f", the first {ROUNDS} of {len(computed)} rounds" if len(computed) > ROUNDS else ""
    axes.set_title(f"what {some} does, and when{part}", fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    used = {x.kind.split()[0] for x in forecast.spans if (x.stop > x.start).any()}
    key = [
        Patch(facecolor=c, hatch=hatch, edgecolor="#777777", label=text)
        for kind, (c, hatch, text) in KINDS.items()
        if kind in used
    ]
    axes.figure.legend(handles=key, loc="outside lower center", ncols=len(key), frameon=False, fontsize=9)
