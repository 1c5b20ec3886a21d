"""English and 中文: the same page, the same numbers, every word."""

from __future__ import annotations

import re

import page_checks
import pytest

TERMS = set(
    """
    mask tile exp log acc acc/ℓ new old ij window left causal documents prefix full grouped row seed auto float16 dtype roofline
    HBM SRAM KB kB MB GB FLOP kFLOP MFLOP GFLOP FLOP/B TFLOP/s ms L2→SM FlashAttention standard flash SXM RTX tilewise FA-1 FA-2
    dQ dK dV dO dP dS QKᵀ/√d q·kᵀ p·v dv dp ds dq dk pᵀ·do do·vᵀ dsᵀ·q ds·k p∘ dp∘p softmax delta do EMPTY PARTIAL FULL
    Split-KV decode English softmax.py reference/flash.py
    """.split()
)
"""What is written alike in both: signs, units, names."""

VISIBLE = """() => {
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement, text = node.textContent.trim();
    if (!text || parent.closest('script, style, pre, math, template, dialog')) continue;
    if (parent.closest('option') || parent.checkVisibility()) found.push(text);
  }
  return found;
}"""


def shown(page) -> list[str]:
    page.run("document.querySelectorAll('details').forEach(x => x.open = true)")
    return page.run(VISIBLE)


def numbers(texts: list[str]) -> list[str]:
    return sorted(x for text in texts for x in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text))


def untranslated(texts: list[str]) -> list[str]:
    """Texts of a Chinese page that are neither Chinese nor terms nor numbers."""
    found = []
    for text in texts:
        words = [x for x in re.split(r"[\s,:|()=+−&。]+", text) if re.search(r"[A-Za-z]{2,}", x) and not re.search(r"\d", x)]
        chinese = re.search(r"[\u4e00-\u9fff]", text) and not page_checks.is_english(text)
        found += [] if chinese or set(words) <= TERMS else [text]
    return found


@pytest.mark.parametrize("view", ["", "#run=grouped&step=9", "#pass=bwd&step=2", "#order=standard", "#run=row&step=1"])
def test_every_word_changes_with_the_language(read, view):
    page = read(hash=view)
    english = shown(page)
    page.press("l")
    chinese = shown(page)
    assert page.run("document.documentElement.lang") == "zh-CN"
    assert untranslated(chinese) == []
    assert numbers(english) == numbers(chinese)
    page.press("l")
    assert shown(page) == english


def test_a_word_that_stays_is_found():
    assert untranslated(["数据在哪里", "Where the data is", "HBM", "2,048 B", "load"]) == ["Where the data is", "load"]


def test_titles_and_labels_change_too(read):
    page = read()
    labels = "() => [...document.querySelectorAll('[data-aria]')].map(x => x.getAttribute('aria-label'))"
    english, title = page.run(labels), page.window.title()
    page.press("l")
    chinese = page.run(labels)
    assert len(english) == len(chinese) > 30
    same = [a for a, b in zip(english, chinese, strict=True) if a == b]
    assert same == [] and page.window.title() != title


def test_a_chinese_word_that_is_missing_breaks_the_page(read, default, folder):
    html = default.read_text()
    made = page_checks.data(html)
    del made["words"]["zh"]["visit"]
    path = folder / "mute.html"
    path.write_text(page_checks.with_data(html, made), encoding="utf-8")
    page = read(path)
    page.press("l")
    assert page.said, "a word that is missing must not pass in silence"
    page.said.clear()


def test_chinese_is_drawn(read):
    """Its letters are those of a font, not the box of a missing one."""
    page = read(hash="#lang=zh")
    script = """() => {
      const pen = document.createElement('canvas').getContext('2d');
      pen.font = '40px ' + getComputedStyle(document.body).fontFamily;
      const draw = (text) => { pen.clearRect(0, 0, 300, 150); pen.fillText(text, 10, 60); return pen.canvas.toDataURL(); };
      return new Set(['必', '答', '点', '\\uffff'].map(draw)).size;
    }"""
    assert page.run(script) == 4


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_answer_has_no_empty_slot(read, lang):
    page = read(hash=f"#lang={lang}")
    for name in page.run("explain.runs()"):
        page.window.locator("#run").select_option(name)
        answer = page.window.get_by_test_id("answer").inner_text()
        facts = next(run["facts"] for run in page.data()["runs"] if run["name"] == name)
        assert "{" not in answer and "undefined" not in answer
        assert all(facts[slot] in answer for slot in ("std_bytes", "flash_bytes", "ratio", "err", "lse_bytes"))
