"""The page opens from disk: quickly, alone, at any width, and without its script."""

from __future__ import annotations

import re

import pytest

VIEWS = [f"v{x}" for x in range(11)]


def test_it_opens_ready_and_named(read):
    page = read()
    assert page.run("explain.ready") is True
    assert "64 × 64" in page.window.title() and "causal" in page.window.title()
    assert page.run("explain.runs()") == ["causal", "full", "grouped", "row"]
    assert page.run("explain.version") == page.data()["package"]


@pytest.mark.parametrize("width", [320, 360, 768, 1440, 3840])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_nothing_is_wider_than_the_window(read, width, lang):
    page = read(width=width, hash=f"#lang={lang}&step=9")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    page.run("document.querySelectorAll('details').forEach(x => x.open = true)")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def test_what_is_too_wide_is_found(read):
    page = read(width=360)
    page.run("document.querySelector('.lead').style.width = '900px'")
    assert not page.run("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_without_its_script_it_has_the_text_and_the_pictures(read, default, folder, lang):
    from tilewise.explain import page as maker
    from tilewise.explain import tour

    path = folder / f"{lang}.html"
    path.write_text(maker.render(tour.default(), lang), encoding="utf-8")
    page = read(path, java_script_enabled=False)
    assert page.texts("row-l-1", "row-l-2", "row-lse") == ["1.135", "1.203", "5.185"]
    assert page.texts("hbm-read", "hbm-write", "std-bytes", "ratio") == ["12,288 B", "2,304 B", "40,960 B", "2.8×"]
    answer = page.window.get_by_test_id("answer").inner_text()
    assert "40,960 B" in answer and "14,592 B" in answer and ("写回 HBM" in answer) == (lang == "zh")
    for view in VIEWS[:-1]:
        assert page.window.locator(f"#{view} svg:visible").count() >= 1, view
    assert page.window.locator("#v10 pre:visible").count() == 2
    assert page.window.locator(".js:visible").count() == 0


def test_with_and_without_its_script_the_last_step_says_the_same(read):
    still = read(java_script_enabled=False)
    page = read()
    page.goto(page.last())
    same = [
        "hbm-read",
        "hbm-write",
        "ghost",
        "chip-peak",
        "tiles",
        "ratio",
        "std-bytes",
        "row-l-final",
        "row-lse",
        "row-p",
        "row-o",
    ]
    same += ["row-naive", "merge-l1", "merge-l2", "merge-l", "merge-w", "br", "bc", "footprint", "ratio-dm", "ridge", "row-m-2"]
    same += ["v5-visited", "v5-waste", "v5-saved-bytes"]
    assert page.texts(*same) == still.texts(*same)
    assert page.all("#by-tensor th, #by-tensor td") and sorted(page.all("#by-tensor tr")) == sorted(still.all("#by-tensor tr"))


def test_paper_has_the_end_of_the_run(read):
    page = read(hash="#step=3")
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.state()["step"] == 15
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.state()["step"] == 3
    pages = len(re.findall(rb"/Type\s*/Page\b[^s]", page.window.pdf()))
    assert 4 <= pages <= 30


def test_it_is_quick(read):
    """Of the page's own thread: parsed, laid out and ready in half a second, and 16 ms a step."""
    page = read()
    assert page.busy(page.reload) < 0.5
    assert page.busy(lambda: page.run(STEPS, 200)) < 200 * 0.016
    assert page.run("performance.memory.usedJSHeapSize") < 80e6


def test_a_large_run_is_quick_too(read, large):
    page = read(large)
    assert page.busy(lambda: page.run(STEPS, 200)) < 200 * 0.05


STEPS = """steps => {
  const all = Number(document.getElementById('scrub').max) + 1;
  for (let t = 0; t < steps; t++) explain.goto(t % all), document.body.offsetHeight;
}"""
