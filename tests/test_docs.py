"""The documents speak the truth: their examples run and every path they name exists. Docstring examples are collected by
pytest itself (`--doctest-modules`)."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(ROOT.glob("*.md"))
PATH = re.compile(r"`((?:src|tests|benchmarks|\.ci)/[\w./-]+|[A-Z]+\.md|[\w/]+\.py)`")


def missing_paths(text: str) -> list[str]:
    """Paths named in backquotes that are not in the repository, from its root or from the package."""
    roots = (ROOT, ROOT / "src" / "tilewise")
    return [name for name in PATH.findall(text) if not any((root / name).exists() for root in roots)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_every_path_that_a_document_names_exists(path):
    assert missing_paths(path.read_text()) == []


def test_a_path_that_does_not_exist_is_found():
    assert missing_paths("see `src/tilewise/nothing.py` and `softmax.py`") == ["src/tilewise/nothing.py"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_the_examples_of_a_document_run(path):
    failed, tried = doctest.testfile(str(path), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
    assert tried or path.name != "README.md"


def test_the_readme_is_short():
    assert (ROOT / "README.md").read_text().count("\n") <= 120


def test_the_readme_names_every_mask_and_command():
    import tilewise as tw

    text = (ROOT / "README.md").read_text()
    masks = [name for name, value in vars(tw).items() if isinstance(value, type) and issubclass(value, tw.Mask)]
    assert all(name in text for name in masks if name != "Mask")
    commands = [path.stem for path in (ROOT / "src/tilewise/cli").glob("*.py") if path.stem not in ("__init__", "console")]
    assert all(f"tilewise {name}" in text for name in commands)


@pytest.mark.parametrize("name", ["attention", "attention_with_lse", "attention_varlen", "merge", "plan"])
def test_public_functions_say_formula_shapes_and_source(name):
    import tilewise as tw

    text = getattr(tw, name).__doc__ or ""
    assert ">>>" in text
    if name in ("attention", "merge"):
        assert all(word in text for word in ("Shapes", "Numerics", "Source"))
