"""A page that shows anything else than the run that happened is found out, by what it shows."""

from __future__ import annotations

import copy

import numpy as np
import page_checks
import pytest
from test_page import CORRUPTIONS

from tilewise.explain import page as maker
from tilewise.explain import tour
from tilewise.explain.tour import Sizes
from tilewise.explain.trace import Trace
from tilewise.tiles import TileShape

KNOWN = page_checks.runs()

SHOWN = """() => {
  const text = (id) => document.getElementById(id).textContent, seen = [];
  for (let t = 0; t <= Number(document.getElementById('scrub').max); t++) {
    explain.goto(t);
    const { i, j, kind, row } = explain.state();
    const P = [...document.querySelectorAll('#back-P .cell-number')].map((x) => x.textContent).filter((x) => x);
    const state = { m: text('now-m'), l: text('now-l'), alpha: text('now-alpha') };
    seen.push({ i, j, kind, row, read: text('hbm-read'), write: text('hbm-write'), P, ...state });
  }
  return seen;
}"""


def wrong(page, made: Trace) -> list[str]:
    """What the page shows of the forward pass that the run did not do."""
    found, read, write = [], 0, 0
    try:
        shown = page.run(SHOWN)
    except Exception as error:  # Playwright's, of a script that broke
        return [f"the page breaks: {error}"]
    if len(shown) != len(made.steps):
        return [f"{len(shown)} steps, not {len(made.steps)}"]
    for t, (have, step) in enumerate(zip(shown, made.steps, strict=True)):
        read, write = read + sum(step.load.values()), write + sum(step.store.values())
        want = {"i": step.i, "j": step.j, "kind": step.kind.name, "read": f"{read:,} B", "write": f"{write:,} B"}
        if step.after is not None:
            x = have["row"] - step.i * made.shape.block_m
            if not 0 <= x < len(step.after.m):
                found.append(f"step {t}: row {have['row']}")
                continue
            want |= {name: said(float(side[x])) for name, side in step.after._asdict().items()}
            m, n = made.shape
            tile = np.s_[step.i * m : (step.i + 1) * m, step.j * n : (step.j + 1) * n]
            p = made.p[0][tile][~np.isneginf(made.s[0][tile])]
            told = np.array([float(x.replace("−", "-")) for x in have["P"]])
            if made.backward is not None and not (told.shape == p.shape and np.allclose(told, p, atol=0.0075)):
                found.append(f"step {t}: P")
        found += [f"step {t}: {name} is {have[name]}, not {x}" for name, x in want.items() if have[name] != x]
    return found


def said(x: float) -> str:
    """Three digits, as the page writes them."""
    return f"{x + 0:.3f}".replace("-0.000", "0.000").replace("-", "−")


def test_the_honest_page_is_right(read):
    assert wrong(read(), KNOWN["causal"].trace) == []


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if "word" not in name])
def test_a_page_with_one_thing_wrong_shows_it(read, default, folder, name):
    html = default.read_text()
    made = copy.deepcopy(page_checks.data(html))
    CORRUPTIONS[name][0](made)
    path = folder / "corrupt.html"
    path.write_text(page_checks.with_data(html, made), encoding="utf-8")
    assert wrong(read(path), KNOWN["causal"].trace) != []


def test_the_page_of_another_problem_shows_it(read, folder):
    path = folder / "other.html"
    other = tour.random("causal", "causal", Sizes(64, 64, 1, 1, 16, 16), TileShape(16, 16), dtype="float32", backward=True)
    path.write_text(maker.render([other]), encoding="utf-8")
    page = read(path)
    assert any("read is" in x for x in wrong(page, KNOWN["causal"].trace))
    page.goto(page.last())
    assert page.text("hbm-read") != "12,288 B" and page.text("std-bytes") == "81,920 B"
