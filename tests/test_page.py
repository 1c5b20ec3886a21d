"""The explainer page as a file: the same bytes for the same arguments, nothing to fetch, every number that of a run made anew,
every word in both languages; and a page with one thing wrong is found out."""

from __future__ import annotations

import base64
import copy
import json
import re
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import numpy as np
import page_checks
import pytest
from page_checks import data, is_english, matrix, problems, with_data
from typer.testing import CliRunner, Result

from tilewise._errors import OptionError
from tilewise.cli import app
from tilewise.explain import exhibits, limits, page, tour, words
from tilewise.explain.tour import Run, Sizes
from tilewise.machine import MACHINES
from tilewise.tiles import TileShape

KNOWN = page_checks.runs()


@pytest.fixture(scope="module")
def html() -> str:
    return page.render(list(KNOWN.values()))


def test_nothing_is_wrong_with_the_page(html):
    found = problems(html, KNOWN)
    assert set(found) == {"requests", "bytes", "steps", "states", "matrices", "words"}
    assert not any(found.values()), found


def test_equal_arguments_give_equal_bytes(html):
    assert page.render(tour.default()) == html
    assert page.render(tour.default(), "zh") != html


def test_the_default_page_is_small_and_quick():
    start = time.perf_counter()
    size = len(page.render(tour.default()).encode())
    assert size <= 300_000
    assert time.perf_counter() - start < 2


def test_a_page_that_would_be_too_large_is_refused():
    run = tour.random("large", "full", Sizes(512, 512, 1, 1, 8, 8), TileShape(16, 16), backward=True)
    with pytest.raises(OptionError, match=r"the page would be \d+ bytes, at most 2000000"):
        page.render([run])


# every way of being wrong is noticed


def _swap(made: dict[str, Any]) -> None:
    steps = made["runs"][0]["orders"]["flash2"]["fwd"]
    steps[5], steps[8] = steps[8], steps[5]


def _scale(made: dict[str, Any]) -> None:
    state = made["runs"][0]["states"][0][2][1]
    state["l"] = [1.01 * x for x in state["l"]]


def _byte(made: dict[str, Any]) -> None:
    made["runs"][0]["orders"]["flash2"]["fwd"][4]["load"]["k"] += 1


def _kind(made: dict[str, Any]) -> None:
    rows = made["runs"][0]["tiles"]
    rows[0] = rows[0].replace("PE", "PF", 1)
    rows[3] = "E" + rows[3][1:]  # as many tiles as before


def _transpose(made: dict[str, Any]) -> None:
    run = made["runs"][0]
    turned = matrix(made, run, "P").transpose(0, 2, 1)
    tiles = [turned[0, 16 * i : 16 * i + 16, 16 * j : 16 * j + 16] for i in range(4) for j in range(i + 1)]
    flat = np.concatenate([x.ravel() for x in tiles])
    made["arrays"].append(base64.b64encode(np.ascontiguousarray(flat).tobytes()).decode())
    run["arrays"]["P"]["data"] = len(made["arrays"]) - 1


def _word(made: dict[str, Any]) -> None:
    del made["words"]["zh"]["play"]


CORRUPTIONS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "two steps swapped": (_swap, "steps"),
    "ℓ a hundredth larger": (_scale, "states"),
    "one byte more in a load": (_byte, "bytes"),
    "an EMPTY tile that is FULL": (_kind, "steps"),
    "P transposed": (_transpose, "matrices"),
    "a Chinese word missing": (_word, "words"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_page_with_one_thing_wrong_is_found_out(html, name):
    corrupt, check = CORRUPTIONS[name]
    made = copy.deepcopy(data(html))
    corrupt(made)
    found = problems(with_data(html, made), KNOWN)
    assert found[check], found


def test_what_would_be_fetched_is_found():
    assert page_checks.requests('<img src="https://a.b/c.png"><style>@import url(x.css)</style>') != []


def test_the_page_of_another_problem_is_found_out(html):
    other = tour.random("causal", "causal", Sizes(64, 64, 1, 1, 16, 16), TileShape(16, 32), backward=True)
    found = problems(page.render([other]), KNOWN)
    assert found["bytes"] and found["steps"]


# words


def test_every_text_is_in_both_languages_and_used(monkeypatch):
    made: list[words.Words] = []
    init = words.Words.__init__
    monkeypatch.setattr(words.Words, "__init__", lambda self, *a: (init(self, *a), made.append(self))[0])
    page.render(tour.default(), measured=[limits.Measured("one", {}, {})])
    assert set(words.table()) - made[0].used == set()
    for key, text in words.table().items():
        assert set(text) == {"en", "zh"} and all(part.strip() for part in text.values()), key
        assert not is_english(text["zh"]), key
        assert set(words.NAME.findall(text["en"])) == set(words.NAME.findall(text["zh"])), key


def test_english_among_chinese_is_found():
    assert is_english("标准 attention 把 S 写回。This one sentence has not been translated at all")
    assert not is_english("标准 attention 把 {n} × {s} 的 S、P 写回 HBM，running max m 和 running sum ℓ")


class Slots(HTMLParser):
    """Visible text with braces in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag in ("script", "style", "pre"):
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        if not self.inside and ("{" in data or "}" in data):
            self.found.append(data)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_slot_is_left_empty(lang):
    reader = Slots()
    reader.feed(page.render(tour.default(), lang))
    assert reader.found == []


def test_names_cannot_break_out_of_the_page():
    name = "</script><img onerror=alert(1)>"
    run = tour.row([1.0, 2.0])
    html = page.render([Run(name, name, name, run.trace)])
    assert "<img" not in html and html.count("</script>") == 2
    assert data(html)["runs"][0]["name"] == name


# what stands beside the runs


def test_the_ring_is_balanced_by_its_layout():
    work = {layout["name"]: layout["work"] for layout in exhibits.ring()["layouts"]}
    assert work == {"contiguous": [10, 26, 42, 58], "striped": [40] * 4, "zigzag": [34] * 4}


def test_figure_2_stands_beside_the_model():
    standard, flash = limits.published()
    assert [standard[x] for x in ("gflop", "gb", "ms")] == ["66.6", "40.3", "41.7"]
    assert [flash[x] for x in ("gflop", "gb", "ms")] == ["75.2", "4.4", "7.3"]
    assert [standard[f"our_{x}"] for x in ("gflop", "gb", "ms")] == ["824.6", "40.27", "25.9"]
    assert [flash[f"our_{x}"] for x in ("gflop", "gb", "ms")] == ["962.1", "4.43", "3.08"]
    assert (standard["binds"], flash["binds"]) == ("HBM", "matrix")


def test_every_machine_has_a_roof():
    made = {m["key"]: m for m in limits.machines()}
    assert set(made) == set(MACHINES)
    assert made["h200"]["ridge"] == "206" and made["a100-40gb"]["ridge"] == "201"


def test_presets_count_tiles():
    made = {
        p["text"]: {size["block"]: size["counts"] for size in p["sizes"]} for p in exhibits.presets(KNOWN["full"].trace, "full")
    }
    assert made["causal"][16] == "6 FULL, 4 PARTIAL, 6 EMPTY"
    assert made["causal"][64] == "0 FULL, 1 PARTIAL, 0 EMPTY"
    assert made["causal & window(left=3)"][16] == "0 FULL, 7 PARTIAL, 9 EMPTY"
    assert made["documents 21, 10, 33"][32] == "1 FULL, 3 PARTIAL, 0 EMPTY"


# the command


def tilewise(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "140"})


def test_the_command_writes_the_readers_own_problem(tmp_path):
    path = tmp_path / "mine.html"
    sizes = ("--n", 19, "--s", 23, "--d", 5, "--e", 3, "--heads", 4, "--kv-heads", 2, "--br", 8, "--bc", 16)
    result = tilewise("page", "causal & window(left=3)", "--also", "full", *sizes, "--dtype", "bfloat16", "-o", path)
    assert result.exit_code == 0, result.output
    assert f"wrote {path}" in result.stdout
    made = data(path.read_text())
    assert [run["name"] for run in made["runs"]] == ["causal & window(left=3)", "full", "row"]
    p = made["runs"][0]["problem"]
    assert {name: p[name] for name in ("n", "s", "d", "e", "h", "g", "dtype", "block_m", "block_n")} == {
        "n": 19, "s": 23, "d": 5, "e": 3, "h": 4, "g": 2, "dtype": "bfloat16", "block_m": 8, "block_n": 16
    }  # fmt: skip
    known = {name: tour.random(name, name, Sizes(19, 23, 4, 2, 5, 3), TileShape(8, 16), "bfloat16", i == 0)
             for i, name in enumerate(("causal & window(left=3)", "full"))} | {"row": tour.row(tour.ROW)}  # fmt: skip
    assert not any(problems(path.read_text(), known).values())


def test_the_command_takes_numbers_from_a_file(tmp_path):
    x = tour.draw(Sizes(20, 20, 1, 1, 8, 8), seed=3)
    np.savez(tmp_path / "mine.npz", **{name: getattr(x, name)[0, :, 0] for name in "qkv"})
    assert tilewise("page", "--npz", tmp_path / "mine.npz", "-o", tmp_path / "a.html").exit_code == 0
    made = data((tmp_path / "a.html").read_text())
    np.testing.assert_array_equal(matrix(made, made["runs"][0], "q")[0], x.q[0, :, 0].astype(np.float16))
    assert made["runs"][0]["facts"]["source"] == "mine.npz"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("page", "casual"), "expected one of full, causal, window"),
        (("page", "__import__('os').system('true')"), "expected one of"),
        (("page", "causal", "--n", 4096), "are 65536 steps, a trace holds at most 4096: take larger blocks"),
        (("page", "--h", 6, "--g", 4, "--n", 8), "axis h: the 6 query heads"),
        (("page", "--lang", "fr"), "lang must be one of en, zh, got 'fr'"),
        (("page", "--device", "abacus"), "machine 'abacus' is unknown"),
        (("page", "--device", "cpu"), "a page is the same wherever it is made"),
        (("page", "--dtype", "int8", "--n", 8), "dtype must be one of"),
    ],
)
def test_user_errors_are_one_line(arguments, says, tmp_path):
    result = tilewise(*arguments, "-o", tmp_path / "a.html")
    assert result.exit_code == 2
    assert says in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not (tmp_path / "a.html").exists()


def test_without_jinja_the_command_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "tilewise.explain.page")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = tilewise("page", "-o", tmp_path / "a.html")
    assert result.exit_code == 1 and result.stderr == "error: this needs jinja2: pip install 'tilewise[page]'\n"


def test_what_was_measured_stands_beside_the_paper(tmp_path):
    rows = [
        {"case": "figure 2", "pass": way, "who": who, "passes": passes, "ms": ms, "dram_bytes": size, "model": {}}
        for who, passes, ms, size in (("standard", "mask-add,dropout", 8.5, 20.5e9), ("tilewise", "", 1.25, None))
        for way in ("forward", "backward")
    ]
    (tmp_path / "a.json").write_text(json.dumps({"machine": {"gpus": ["H200"]}, "date": "2026-11-30", "rows": rows}))
    result = tilewise("page", "--measured", tmp_path / "a.json", "-o", tmp_path / "a.html")
    assert result.exit_code == 0, result.output
    html = (tmp_path / "a.html").read_text()
    cells = re.findall(r'data-testid="measured-(\w+-\w+)-0">([^<]*)<', html)
    assert dict(cells) == {"standard-gb": "41.00", "standard-ms": "17", "flash-gb": "–", "flash-ms": "2.5"}
    assert "measured, H200" in html
    (tmp_path / "b.json").write_text("[]")
    assert "is no record" in tilewise("page", "--measured", tmp_path / "b.json", "-o", tmp_path / "b.html").stderr
