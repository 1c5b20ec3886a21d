"""For everybody: axe finds nothing in either language and theme; keyboard, screen reader, zoom, forced colours, no motion."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def violations(page) -> list[str]:
    """What axe-core objects to, every follow-up question open."""
    from axe_playwright_python.sync_playwright import Axe

    page.run("document.querySelectorAll('details').forEach(x => x.open = true)")
    page.run("document.documentElement.classList.remove('drawn')")
    answer: dict[str, Any] = Axe().run(page.window, options={"runOnly": TAGS}).response
    assert len(answer["passes"]) > 25
    return [f"{x['id']}: {node['html'][:90]}" for x in answer["violations"] for node in x["nodes"]]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing(read, lang, theme, width):
    other = "#run=grouped&order=flash1&step=3" if theme == "light" else "#pass=bwd&order=standard"
    hash = other if width == 360 else "#step=5"
    page = read(hash=f"{hash}&lang={lang}", color_scheme=theme, width=width, reduced_motion="reduce")
    assert violations(page) == []


def test_axe_finds_what_is_planted(read):
    page = read(reduced_motion="reduce")
    page.run("document.querySelector('.lead').style.color = '#ccc'")
    page.run("document.getElementById('next').removeAttribute('aria-label')")
    found = " ".join(violations(page))
    assert "color-contrast" in found and "button-name" in found


PALETTE = """() => {
  const probe = document.body.appendChild(document.createElement('i'));
  const pen = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (colour) => {
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const all = {};
  for (const name of ['i', 'j', 'o', 'm', 'ink', 'muted', 'edge', 'bad', 'card', 'page', 'sunk']) {
    probe.style.color = `var(--${name})`;
    all[name] = rgb(getComputedStyle(probe).color);
  }
  for (let x = 0; x <= 20; x++) {
    probe.className = `s${x}`;
    all[`s${x}`] = rgb(getComputedStyle(probe).fill);
  }
  probe.remove();
  return all;
}"""


def contrast(a: list[int], b: list[int]) -> float:
    def light(x: list[int]) -> float:
        parts = [v / 255 / 12.92 if v / 255 <= 0.04045 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in x]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out(read, theme):
    colours = read(color_scheme=theme).run(PALETTE)
    for name in ("i", "j", "o", "m", "ink", "muted", "bad"):
        assert all(contrast(colours[name], colours[ground]) >= 4.5 for ground in ("card", "sunk", "page")), name
    assert all(contrast(colours["edge"], colours[ground]) >= 3 for ground in ("card", "sunk"))
    assert all(contrast(colours["ink"], colours[f"s{shade}"]) >= 4.5 for shade in range(21))
    assert len({tuple(colours[f"s{shade}"]) for shade in range(21)}) == 21
    assert abs(contrast([0, 0, 0], [255, 255, 255]) - 21) < 0.01 and contrast([120, 120, 120], [130, 130, 130]) < 1.2


def test_tab_visits_everything_in_order_and_shows_where(read):
    page = read()
    script = """() => {
      const x = document.activeElement, box = x.getBoundingClientRect(), style = getComputedStyle(x);
      const ring = x.matches('.segmented input') ? getComputedStyle(x.nextElementSibling) : style;
      const name = x.tagName + '#' + x.id, bar = !!x.closest('.transport');
      return [name, box.top + scrollY, ring.outlineStyle !== 'none', bar, x.tagName === 'BODY'];
    }"""
    tops, seen = [], 0
    for _ in range(400):
        page.press("Tab")
        name, top, ring, bar, end = page.run(script)
        if end:
            break
        seen += 1
        assert ring, f"{name} does not show that it has the focus"
        if not bar:
            tops.append(top)
    assert end and seen > 40, "there is a way out"
    assert sum(b < a - 60 for a, b in pairwise(tops)) <= 4  # side by side, not up and down


def test_every_control_has_a_name(read):
    page = read()
    script = """() => [...document.querySelectorAll('button, input, select, a, [tabindex="0"]')]
      .filter((x) => x.checkVisibility())
      .filter((x) => !(x.getAttribute('aria-label') || x.textContent.trim() || x.labels?.[0]?.textContent.trim()))
      .filter((x) => !x.matches('.scroll'))
      .map((x) => x.outerHTML.slice(0, 80))"""
    assert page.run(script) == []
    assert 'button "Play"' in page.window.locator(".transport").aria_snapshot()


def test_steps_are_told(read):
    page = read()
    page.press("ArrowRight")
    assert page.text("live") == page.text("sentence") == "Step 1 of 0 to 15: tile (0, 1) is EMPTY, skipped."
    page.goto(6)
    assert page.text("live") == "Step 6 of 0 to 15: tile (1, 2) is EMPTY, skipped."
    assert page.window.locator("#live").get_attribute("aria-live") == "polite"


def test_fast_steps_are_not_told_one_by_one(read):
    page = read()
    page.window.clock.install()
    page.reload()
    page.window.locator("#speed").select_option("8")
    page.window.locator("#speed").blur()
    page.press("Space")
    page.window.clock.run_for(400)
    assert page.state()["step"] >= 2 and page.text("live").startswith("Step 0 ")
    page.press("Space")
    assert page.text("live") == page.text("sentence")


def test_no_motion_where_none_is_wanted(read):
    page = read(reduced_motion="reduce")
    page.press("ArrowRight", "Shift+ArrowRight")
    assert page.run("document.getAnimations().length") == 0


def test_the_tile_is_marked_without_colour(read):
    page = read(forced_colors="active", hash="#step=4")
    width = "x => parseFloat(getComputedStyle(x).strokeWidth)"
    now = page.window.locator(".loops:not([hidden]) .tile.now").evaluate(width)
    other = page.window.locator(".loops:not([hidden]) .tile:not(.now)").first.evaluate(width)
    assert now >= other + 2


def test_wide_letters_fit(read):
    """WCAG 1.4.12: text spacing set by the reader loses nothing."""
    page = read(width=360)
    page.window.add_style_tag(
        content="* { line-height: 1.5 !important; letter-spacing: 0.12em !important; word-spacing: 0.16em !important }"
    )
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def test_targets_are_large_enough(read):
    page = read(width=360)
    script = """() => [...document.querySelectorAll('button, select, summary, label.check, .segmented label, input')]
      .filter((x) => !x.matches('[type=radio], [type=checkbox]')) // their labels are the targets
      .filter((x) => x.checkVisibility())
      .filter((x) => { const box = x.getBoundingClientRect(); return box.width < 23 || box.height < 23; })
      .map((x) => x.outerHTML.slice(0, 80))"""
    assert page.run(script) == []
    box = page.window.locator("#play").bounding_box()
    assert box["width"] >= 44 and box["height"] >= 44
