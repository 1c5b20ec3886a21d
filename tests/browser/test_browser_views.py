"""Each view shows what the package computes: tiles, flows, scores, masks, backward, the ring, rooflines, block sizes."""

from __future__ import annotations

from math import ceil

import numpy as np
import page_checks
import pytest

from tilewise import cost
from tilewise.cost import keys_outside
from tilewise.cost.blocks import footprint, least_traffic, paper_blocks
from tilewise.cost.count import Cost, Moved
from tilewise.cost.paper import problem_of
from tilewise.cost.roofline import roofline
from tilewise.machine import KB, MACHINES
from tilewise.mask import Tile
from tilewise.tiles import TileShape

KNOWN = page_checks.runs()


@pytest.mark.parametrize("name", ["causal", "full", "grouped", "row"])
def test_the_loops_are_to_scale_and_mark_one_tile(read, name):
    page, made = read(hash=f"#run={name}"), KNOWN[name].trace
    p, shape, picture = made.problem, made.shape, f".loops[data-run='{name}'] "
    assert page.count(picture + ".tile") == made.kinds.size
    assert page.count(".loops:visible") == 1
    heights = page.run(f"[...document.querySelectorAll(\"{picture}.block.q\")].map(x => Number(x.getAttribute('height')))")
    rows = [min(shape.block_m, p.n - at) for at in range(0, p.n, shape.block_m)]
    np.testing.assert_allclose(np.array(heights) / heights[0], np.array(rows) / rows[0], rtol=1e-3)
    for t in range(page.last() + 1):
        page.goto(t)
        state = page.state()
        assert page.count(picture + ".tile.now") == 1
        assert page.count(picture + f".tile.now[data-i='{state['i']}'][data-j='{state['j']}']") == 1
        assert state["kind"] == Tile(made.kinds[state["i"], state["j"]]).name


def test_every_load_and_store_is_a_flow(read):
    page = read()
    for order, way in (("flash2", "fwd"), ("flash1", "fwd"), ("flash2", "bwd"), ("standard", "fwd")):
        page.choose("order", order)
        page.choose("pass", way)
        for t, step in enumerate(page.steps()):
            page.goto(t)
            moved = [*step.get("load", {}).values(), *step.get("store", {}).values()]
            assert [int("".join(x for x in text.split()[1] if x.isdigit())) for text in page.all(".flow")] == moved


def test_inside_a_tile_stand_its_scores(read):
    page, made = read(), KNOWN["causal"].trace
    cells = """name => [...document.querySelectorAll(`#heat-${name} .cellbox`)].map(x =>
      [Number(x.dataset.r), Number(x.dataset.c), x.classList.contains('hidden') ? null : x.nextElementSibling.textContent])"""
    for t, step in enumerate(made.steps):
        if step.after is None or t not in (0, 4, 5, 15):
            continue
        page.goto(t)
        s = made.s[0, 16 * step.i : 16 * step.i + 16, 16 * step.j : 16 * step.j + 16]
        for name, exact in (("S", s), ("P", np.exp(s - step.after.m[:, None]))):
            told = page.run(cells, name)
            assert {(r, c) for r, c, text in told if text is None} == {(int(r), int(c)) for r, c in np.argwhere(np.isneginf(s))}
            for r, c, text in told:
                assert text is None or abs(float(text.replace("−", "-")) - exact[r, c]) < 0.0075  # two digits, from float16
    page.goto(1)
    assert page.count("#heat-S .cellbox") == 0 and "EMPTY" in page.text("tile-name")


def test_a_pair_shows_its_dot_product(read):
    page, made = read(hash="#step=4"), KNOWN["causal"].trace
    page.window.locator("#heat-S .cellbox[data-r='3'][data-c='5']").hover()
    assert f"S[19, 5] = q·k/√d = {made.s[0, 19, 5]:.3f}".replace("-", "−") in page.text("probe").replace(
        "S[19, 5] = q·k/√d = -", "−"
    )
    page.window.locator("#heat-S").focus()
    page.press("ArrowRight")
    assert "S[19, 6]" in page.text("probe") and page.state()["step"] == 4


def test_o_of_a_row_is_the_references_at_the_last_tile(read):
    page, made = read(hash="#step=15&row=53"), KNOWN["causal"].trace
    shown = [float(x.replace("−", "-")) for x in page.text("now-o").split()]
    np.testing.assert_allclose(shown, made.result.o[0, 53, 0, :3], atol=0.0075)


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_masks_count_their_tiles(read, size):
    page = read()
    page.choose("size", str(size))
    for index, name in enumerate(page.all("#preset option")):
        page.window.get_by_test_id("preset").select_option(str(index))
        if name == "causal":
            tiles, all_tiles = (64 // size) * (64 // size + 1) // 2, (64 // size) ** 2
            area = tiles * size * size
            assert page.text("v5-visited") == f"{tiles} / {all_tiles}" and page.text("v5-skipped") == str(all_tiles - tiles)
            assert page.text("v5-exact") == "50.8%" and page.text("v5-waste") == f"{1 - 2080 / area:.1%}"
        if name.startswith("documents"):
            edges = np.cumsum([0, *map(int, name.split(" ", 1)[1].split(", "))])
            ids = np.searchsorted(edges, np.arange(64), "right")
            keep = ids[:, None] == ids
            blocks = [keep[i : i + size, j : j + size].any() for i in range(0, 64, size) for j in range(0, 64, size)]
            assert page.text("v5-visited") == f"{sum(blocks)} / {len(blocks)}"
        assert page.count(".map:visible") == 1


def test_backward_recomputes_the_forwards_weights(read):
    page, made = read(hash="#pass=bwd&step=1"), KNOWN["causal"].trace
    assert made.backward is not None
    numbers = "name => [...document.querySelectorAll(`#back-${name} .cell-number`)].map(x => x.textContent).filter(x => x)"
    for t in (1, 6, 16, 17, 27, 32):
        page.goto(t)
        state = page.state()
        if state["kind"] == "EMPTY":
            continue
        tile = np.s_[16 * state["i"] : 16 * state["i"] + 16, 16 * state["j"] : 16 * state["j"] + 16]
        seen = ~np.isneginf(made.s[0][tile])
        for name, whole in (("P", made.p[0]), ("dS", made.backward.ds[0])):
            have = np.array([float(x.replace("−", "-")) for x in page.run(numbers, name)])
            np.testing.assert_allclose(have, whole[tile][seen], atol=0.0075)
    visited = 10
    assert page.texts("products-flash1", "products-flash2", "products-standard") == [str(5 * visited), str(7 * visited), "64"]
    data = page.data()
    grads = made.backward.grads
    for name, grad in (("dq", grads.q), ("dk", grads.k), ("dv", grads.v)):
        assert np.abs(page_checks.matrix(data, data["runs"][0], name)[0] - grad[0, :, 0]).max() < 2e-3


def test_with_keys_outside_o_crosses_again_and_again(read):
    page = read(hash="#run=full&order=flash1&step=15")
    columns = ceil(64 / 16)
    assert page.counters()["load"]["o"] + page.counters()["store"]["o"] == (2 * columns - 1) * 64 * 16 * 2


def test_the_ring_shows_the_work_of_each_rank(read):
    page = read()
    for layout, work in (("contiguous", ["10", "26", "42", "58"]), ("striped", ["40"] * 4), ("zigzag", ["34"] * 4)):
        page.choose("layout", layout)
        assert page.texts(*(f"work-{layout}-{rank}" for rank in range(4))) == work
        assert page.count(".ring [data-layout]:visible") == 1
    page.click("#ring-next")
    assert page.text("ring-hop") == "1"


def test_figure_2_is_labelled(read):
    page = read()
    standard, flash = (page.texts(*(f"published-{who}-{x}" for x in ("gflop", "gb", "ms"))) for who in ("standard", "flash"))
    assert (standard, flash) == (["66.6", "40.3", "41.7"], ["75.2", "4.4", "7.3"])
    assert page.texts("model-standard-gflop", "model-standard-gb") == ["824.6", "40.27"]
    assert page.texts("model-flash-gflop", "model-flash-gb") == ["962.1", "4.43"]
    for cell in page.run("[...document.querySelectorAll('.figure2 td')].map(x => [x.className, x.textContent])"):
        assert cell[0] in ("published", "model") or not cell[1], cell


def test_the_roofline_turns_where_the_machine_does(read):
    page = read()
    assert page.text("ridge") == "206"
    page.window.get_by_test_id("device").select_option("a100-40gb")
    assert page.text("ridge") == "201"
    point = page.window.locator("#roof-points circle[data-who=flash]")
    assert 201 < float(point.get_attribute("data-intensity") or 0) < 218
    assert page.count(".roof.now") == 1 and "matrix units" in page.all("#bounds tr")[1]
    assert "HBM" in page.all("#bounds tr")[0].split()[-1]


def test_the_scripts_roofline_is_the_packages(read):
    page, rng = read(), np.random.default_rng(0)
    for _ in range(200):
        key, machine = list(MACHINES.items())[rng.integers(len(MACHINES))]
        flops, exps, least, walk = (int(x) for x in 10 ** rng.uniform(3, 15, 4))
        price = Cost(flops, exps, {"q": Moved(walk, 0, least)})
        cached = bool(rng.integers(2))
        want = roofline(price, machine, "float16", cached=cached).seconds
        work = {"flops": flops, "exps": exps, "bytes": walk, "least": least}
        have = page.run(
            "([w, key, cached]) => roofline(w, DATA.machines.find(m => m.key === key), cached)", [work, key, cached]
        )
        assert set(have) == {"matrix", "exp", "HBM"} | ({"L2"} if machine.l2 else set())
        for part, seconds in have.items():
            np.testing.assert_allclose(seconds, want[part], rtol=1e-9)


def test_blocks_of_the_papers_rule(read):
    page = read()
    assert page.texts("bc", "br", "ratio-dm") == ["200", "64", "0.08"]
    page.choose("headsize", "128")
    assert page.texts("bc", "br", "ratio-dm", "footprint") == ["100", "100", "0.32", "120%"]
    assert page.window.locator("#too-big").is_visible()
    page.window.get_by_test_id("memory").fill("228")
    assert page.texts("kilobytes", "bc") == ["228", "228"] and page.count("#fits .part") == 6


def test_the_scripts_blocks_are_the_packages(read):
    page, rng = read(), np.random.default_rng(1)
    script = """([m, d]) => {
      const shape = paperBlocks(m, d);
      return [shape, footprint(shape, d, d), leastTraffic(m, d, 8192)];
    }"""
    for _ in range(200):
        elements, d = int(rng.integers(1, 300) * KB // 2), int(rng.integers(1, 300))
        shape = paper_blocks(elements, d)
        told, parts, best = page.run(script, [elements, d])
        want = least_traffic(elements, problem_of(8192, d))
        assert (told, parts, best) == (list(shape), footprint(shape, d, d), None if want is None else list(want))


def test_the_scripts_traffic_is_the_cost_models(read):
    page, rng = read(), np.random.default_rng(2)
    for _ in range(40):
        n, d, r, c = (int(x) for x in rng.integers(1, [200, 20, 70, 70]))
        problem, shape = problem_of(n, d), TileShape(r, c)
        want = {
            "flash2": cost.forward(problem, shape).bytes,
            "flash1": keys_outside.forward(problem, shape).bytes,
            "standard": cost.standard(problem).bytes,
        }
        for order, size in want.items():
            assert page.run("([x, r, c, n, d]) => walkBytes(x, [r, c], n, d, 2)", [order, r, c, n, d]) == size


def test_code_follows_the_phase(read):
    page = read(hash="#step=4")
    page.click("[data-phase=softmax] button")
    marked = page.run("[...document.querySelectorAll('[data-code].now')].map(x => x.textContent.trim())")
    assert any(line.startswith("alpha, p =") for line in marked) and all("finish" not in line for line in marked)
