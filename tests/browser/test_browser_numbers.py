"""The numbers of the row 1, 3 | 2, 5, and counters that are sums of the trace at every step of every run."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tilewise.softmax import absorb, empty, finish


def test_the_row_of_four_scores(read):
    page = read()
    assert page.texts("row-m-1", "row-l-1", "row-m-2", "row-l-2") == ["3", "1.135", "5", "1.203"]
    assert page.texts("row-alpha-2", "row-l-once", "row-l-final", "row-lse") == ["0.135", "1.203", "1.203", "5.185"]
    assert page.text("row-p") == "0.015 0.112 0.041 0.831"
    assert page.texts("merge-l1", "merge-l2", "merge-l", "merge-w") == ["3.127", "5.049", "5.185", "0.128 0.872"]


def cut(page, length: int) -> None:
    page.window.get_by_test_id("cut").fill(str(length))


def write(page, cell: int, text: str) -> None:
    page.window.get_by_test_id(f"row-cell-{cell}").fill(text)


def test_moving_the_cut_changes_nothing(read):
    page = read()
    for length in (1, 2, 3, 4):
        cut(page, length)
        assert page.texts("row-l-final", "row-lse") == ["1.203", "5.185"]
        assert page.count("#folding tr") == -(-4 // length)


def test_other_scores(read):
    page = read()
    write(page, 3, "1000")
    assert page.texts("row-l-final", "row-lse") == ["1.000", "1000.000"]
    assert "overflow" in page.text("row-naive")
    write(page, 3, "-5")  # a block that does not raise the max
    assert page.texts("row-m-2", "row-l-final") == ["5", "1.154"]
    write(page, 4, "-5")
    assert page.texts("row-m-2", "row-alpha-2") == ["3", "1.000"]
    for cell in (1, 2, 3, 4):
        write(page, cell, "-inf")
    assert page.texts("row-o", "row-lse", "row-l-final") == ["0", "−∞", "0.000"]
    assert page.texts("merge-w") == ["0.000 0.000"]
    page.click("#row-seed")
    page.click("#row-big")
    assert page.texts("row-l-final", "row-lse", "row-p") == ["1.203", "1005.185", "0.015 0.112 0.041 0.831"]
    page.click("#row-hidden")
    assert page.texts("row-o", "row-lse") == ["0", "−∞"]


def test_the_scripts_fold_is_the_packages(read):
    page, rng = read(), np.random.default_rng(0)
    for _ in range(200):
        n, e, length = rng.integers(1, 9), rng.integers(1, 4), int(rng.integers(1, 5))
        s = np.where(rng.random(n) < 0.2, -np.inf, rng.normal(size=n) * 10.0 ** rng.integers(0, 3))
        v = rng.normal(size=(n, e))
        state = empty(1, int(e))
        for at in range(0, n, length):
            state = absorb(state, s[None, at : at + length], v[at : at + length])
        o, lse = finish(state)
        script = """([s, v, length]) => {
          const x = explain.fold(s.map(t => t === null ? -Infinity : t), v, length).at(-1), done = explain.finish(x);
          return [x.m, x.l, done.lse, ...done.o].map(t => t === -Infinity ? null : t);
        }"""
        told = page.run(script, [[None if np.isneginf(x) else x for x in s.tolist()], v.tolist(), length])
        have = np.array([-np.inf if x is None else x for x in told])
        np.testing.assert_allclose(have, [state.m[0], state.l[0], lse[0], *o[0]], rtol=1e-9, atol=1e-12)


def test_the_default_run_comes_to_its_bytes(read):
    page = read()
    page.goto(page.last())
    assert page.texts("hbm-read", "hbm-write", "std-bytes") == ["12,288 B", "2,304 B", "40,960 B"]
    assert page.texts("ratio", "tiles") == ["2.8×", "6 FULL, 4 PARTIAL, 6 EMPTY"]
    assert "2,304 B" in page.text("bar-write") and "12,288 B" in page.text("bar-read")


def wrong_counters(page) -> list[str]:
    """Steps at which the page's counters are not sums of the trace, made here; or go down; or move at a skipped tile."""
    found, totals = [], {side: Counter() for side in ("load", "store")}
    flops, before = 0, {"read": 0, "write": 0}
    kinds = next(run for run in page.data()["runs"] if run["name"] == page.state()["run"])["tiles"]
    for t, step in enumerate(page.steps()):
        page.goto(t)
        have = page.counters()
        for side, total in totals.items():
            total.update(step.get(side, {}))
        flops += step.get("flops", 0)
        want = (dict(totals["load"]), dict(totals["store"]), sum(totals["load"].values()), sum(totals["store"].values()), flops)
        if (have["load"], have["store"], have["read"], have["write"], have["flops"]) != want:
            found.append(f"step {t}: {have} is not {want}")
        if page.number("hbm-read") != have["read"] or page.number("hbm-write") != have["write"]:
            found.append(f"step {t}: the meters show {page.texts('hbm-read', 'hbm-write')}")
        if have["read"] < before["read"] or have["write"] < before["write"]:
            found.append(f"step {t}: a counter falls")
        hidden = "i" in step and kinds[step["i"]][step["j"]] == "E" and "E" * len(kinds[0]) != kinds[step["i"]]
        if hidden and (have["read"], have["write"]) != (before["read"], before["write"]):
            found.append(f"step {t}: a skipped tile moves bytes")
        if have["chip"]["S"] or have["chip"]["P"]:
            found.append(f"step {t}: scores are left on chip")
        before = have
    return found


@pytest.mark.parametrize("name", ["causal", "full", "grouped", "row"])
@pytest.mark.parametrize("order", ["flash2", "flash1", "standard"])
def test_counters_are_sums_of_the_trace_at_every_step(read, name, order):
    page = read(hash=f"#run={name}&order={order}")
    assert page.state()["run"] == name and page.state()["order"] == order
    assert wrong_counters(page) == []
    if name == "causal":
        page.choose("pass", "bwd")
        assert page.state()["pass"] == "bwd" and wrong_counters(page) == []


def test_counters_that_lie_are_found(read):
    page = read()
    page.run("() => { const honest = explain.counters; explain.counters = () => ({ ...honest(), read: honest().read + 2 }); }")
    assert len(wrong_counters(page)) >= 16


def test_scores_are_in_memory_only_where_they_are_stored(read):
    page = read()
    stored = "[data-testid=hbm] li[data-tensor=S], [data-testid=hbm] li[data-tensor=P]"
    for order in ("flash2", "flash1"):
        page.choose("order", order)
        for t in range(page.last() + 1):
            page.goto(t)
            assert page.count(stored) == 0
    page.choose("order", "standard")
    assert page.count(stored) == 2


def test_the_chip_holds_scores_only_while_it_computes(read):
    page = read(hash="#step=4")
    sizes = {}
    for phase in ("load", "scores", "softmax", "output", "done"):
        page.click(f"[data-phase={phase}] button")
        sizes[phase] = page.counters()["chip"]
    base = {"q": 512, "k": 512, "v": 512, "O": 1024, "ml": 128}
    assert sizes["load"] == base | {"S": 0, "P": 0}
    assert sizes["scores"] == base | {"S": 1024, "P": 0}
    assert sizes["softmax"] == sizes["output"] == base | {"S": 0, "P": 1024}
    assert sizes["done"] == base | {"k": 0, "v": 0, "S": 0, "P": 0}
    page.choose("order", "flash1")
    page.goto(5)  # tile (1, 1): keys stay for the next block of rows, o does not
    assert page.counters()["chip"] == {"q": 0, "k": 512, "v": 512, "S": 0, "P": 0, "O": 0, "ml": 0}
    assert page.counters()["peak"] == sum(sizes["scores"].values()) == page.number("chip-peak")
