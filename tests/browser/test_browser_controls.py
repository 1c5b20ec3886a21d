"""Keys, buttons, the scrub bar, grids and links move one cursor, and nothing else."""

from __future__ import annotations

import pytest


def test_arrow_keys_home_end_and_space(read):
    page = read()
    for key, step in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 15), ("Home", 0)):
        page.press(key)
        assert page.state()["step"] == step, key
    page.press("ArrowLeft")
    assert page.state()["step"] == 0
    page.press("Space")
    assert page.state()["playing"]
    page.press("Space")
    assert not page.state()["playing"]


def test_buttons_step_too(read):
    page = read()
    for name, step in (("next", 1), ("next", 2), ("back", 1), ("end", 15), ("home", 0)):
        page.click(f"#{name}")
        assert page.state()["step"] == step, name


def test_the_scrub_bar_is_the_same_as_stepping(read):
    page, other = read(), read()
    page.window.get_by_test_id("scrub").fill("7")
    other.press(*["ArrowRight"] * 7)
    assert page.state() == other.state() and page.state()["step"] == 7
    page.window.get_by_test_id("scrub").focus()
    page.press("ArrowRight")
    assert page.state()["step"] == 8
    assert page.window.get_by_test_id("scrub").get_attribute("aria-valuetext") == page.text("sentence")


def test_playing_reaches_the_end_and_stops(read):
    page = read()
    page.window.clock.install()
    page.reload()
    page.window.clock.pause_at(page.run("Date.now() + 1000"))
    page.press("Space")
    page.window.clock.run_for(1600)
    assert page.state()["step"] == 3 and page.state()["playing"]
    page.window.clock.run_for(60_000)
    assert page.state()["step"] == 15 and not page.state()["playing"]
    page.press("Space")
    assert page.state()["step"] == 0 and page.state()["playing"]


def test_shift_moves_by_blocks_of_the_outer_loop(read):
    page = read()
    page.press("ArrowRight", "Shift+ArrowRight")
    assert (page.state()["i"], page.state()["j"]) == (1, 0)
    page.press("Shift+ArrowRight", "ArrowRight", "Shift+ArrowLeft")
    assert (page.state()["i"], page.state()["j"]) == (1, 0)
    page.choose("order", "flash1")
    page.press("ArrowRight", "Shift+ArrowRight")
    assert (page.state()["i"], page.state()["j"]) == (0, 1)


def test_a_tile_can_be_clicked_and_reached_by_keys(read):
    page = read()
    page.click(".loops:not([hidden]) .tile[data-i='2'][data-j='1']")
    assert (page.state()["i"], page.state()["j"], page.state()["step"]) == (2, 1, 9)
    assert page.count(".loops:not([hidden]) .tile[tabindex='0']") == 1
    page.window.locator(".loops:not([hidden]) .tile[tabindex='0']").focus()
    page.press("ArrowDown", "ArrowLeft")
    assert page.state()["step"] == 9  # moving the focus moves nothing else
    page.press("Enter")
    assert (page.state()["i"], page.state()["j"]) == (3, 0)


def test_rows_are_followed(read):
    page = read()
    page.press("ArrowDown", "ArrowDown")
    assert page.state()["row"] == 2
    run = page.data()["runs"][0]
    shown = [page.window.get_by_test_id(f"row-cell-{t + 1}").input_value() for t in range(run["problem"]["s"])]
    script = "() => [...RUNS.causal.S.row(0, 2)].map(x => x === -Infinity ? null : x)"
    want = page.run(script)
    assert [x is None for x in want] == [t > 2 for t in range(64)]
    assert shown == ["−∞" if x is None else f"{x:.3f}".replace("-", "−") for x in want]
    page.press("ArrowUp")
    assert page.state()["row"] == 1 and page.text("row") == "1"
    page.press("Shift+ArrowRight")
    assert page.state()["row"] == 17  # the same place in the next block


def test_typing_in_a_cell_is_no_command(read):
    page = read()
    page.window.get_by_test_id("row-cell-2").focus()
    page.press("l", "ArrowRight", "Space", "t")
    assert page.state() == read().state()


def test_letters_change_language_and_theme(read):
    page = read()
    page.press("l")
    assert page.state()["lang"] == "zh" and page.run("document.documentElement.lang") == "zh-CN"
    page.press("L", "t")
    assert page.state()["lang"] == "en" and page.state()["theme"] == "light"
    page.press("t")
    assert page.state()["theme"] == "dark" and page.run("getComputedStyle(document.body).colorScheme") == "dark"


def test_digits_go_to_views_and_help_opens(read):
    page = read(reduced_motion="reduce")
    for digit in "5819":
        page.press(digit)
        page.window.wait_for_function(f"Math.abs(document.getElementById('v{digit}').getBoundingClientRect().top) < 60")
    page.press("?")
    assert page.window.locator("#help").is_visible()
    page.press("ArrowRight")
    assert page.state()["step"] == 0  # the page behind does not hear
    page.press("Escape")
    assert not page.window.locator("#help").is_visible()


def test_a_link_shows_exactly_this(read):
    hash = "#run=causal&pass=bwd&order=flash2&step=7&row=3&lang=zh&theme=dark"
    page = read(hash=hash)
    before = page.state()
    assert {name: before[name] for name in ("run", "pass", "step", "row", "lang", "theme")} == {
        "run": "causal", "pass": "bwd", "step": 7, "row": 3, "lang": "zh", "theme": "dark"
    }  # fmt: skip
    page.press("ArrowRight")
    before = page.state()
    page.reload()
    assert page.state() == before


@pytest.mark.parametrize(
    "hash",
    ["#run=nothing&step=-4", "#step=999&row=999", "#order=x&pass=y&lang=fr&theme=z", "#run=row&pass=bwd", "#%%%", "#step=1e9"],
)
def test_a_link_to_nothing_shows_the_nearest_that_there_is(read, hash):
    state = read(hash=hash).state()
    assert state["run"] in ("causal", "row") and 0 <= state["step"] <= 15 and state["lang"] == "en" and state["theme"] == "auto"


def test_back_undoes_a_jump(read):
    page = read()
    page.press("ArrowRight")
    page.click(".loops:not([hidden]) .tile[data-i='3'][data-j='2']")
    assert page.state()["step"] == 14
    page.window.go_back()
    assert page.state()["step"] == 1
    page.window.locator("#run").select_option("full")
    assert page.state()["run"] == "full" and page.text("tiles") == "16 FULL, 0 PARTIAL, 0 EMPTY"
    page.window.go_back()
    assert page.state()["run"] == "causal" and page.text("tiles") == "6 FULL, 4 PARTIAL, 6 EMPTY"


@pytest.mark.parametrize(("by", "step"), [(-90, 6), (90, 4), (-10, 5)])
def test_touch_swipes_step(read, by, step):
    page = read(width=360, height=740, has_touch=True, is_mobile=True, hash="#step=5")
    swipe = """by => {
      const target = document.querySelector('.loops:not([hidden]) .tile');
      const touch = (x) => ({ bubbles: true, pointerType: 'touch', clientX: x });
      const fire = (name, x) => target.dispatchEvent(new PointerEvent(name, touch(x)));
      fire('pointerdown', 150), fire('pointerup', 150 + by);
    }"""
    page.run(swipe, by)
    assert page.state()["step"] == step
    assert page.run("getComputedStyle(document.querySelector('.loops')).touchAction") == "pan-y"
