"""A real browser for the explainer page: Chromium, driven by Playwright, offline. Where there is none these tests are skipped
and say why; with TILEWISE_BROWSER=required, as in CI, they fail instead."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reader import Reader

from tilewise.explain import page, tour
from tilewise.explain.tour import Run, Sizes
from tilewise.tiles import TileShape

collect_ignore = ["conftest.py"]
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
"""apt-get install chromium fonts-noto-cjk."""


def missing() -> str:
    """What these tests need and do not find."""
    absent = [name for name in ("playwright", "axe_playwright_python") if importlib.util.find_spec(name) is None]
    if absent:
        return f"needs {', '.join(absent)}: pip install 'tilewise[browser]'"
    return "" if CHROMIUM else "needs Chromium: apt-get install chromium fonts-noto-cjk, or its path in CHROMIUM"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    if reason := missing():
        if os.environ.get("TILEWISE_BROWSER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="session")
def default(folder: Path) -> Path:
    """The page that `tilewise page` writes."""
    return written(folder / "default.html", tour.default())


@pytest.fixture(scope="session")
def large(folder: Path) -> Path:
    """256 × 256 in 256 tiles."""
    return written(folder / "large.html", [tour.random("large", "causal", Sizes(256, 256, 1, 1, 64, 64), TileShape(16, 16))])


def written(path: Path, runs: list[Run]) -> Path:
    path.write_text(page.render(runs), encoding="utf-8")
    return path


@pytest.fixture
def read(chromium: Any, default: Path) -> Iterator[Callable[..., Reader]]:
    """Opens a page, the default one unless told otherwise, in a window of its own. Whatever else a test finds, a page asks for
    nothing but itself and says nothing on the console."""
    opened: list[tuple[Any, Reader]] = []

    def open_page(path: Path | None = None, hash: str = "", width: int = 1280, height: int = 900, **options: Any) -> Reader:
        context = chromium.new_context(**({"offline": True, "viewport": {"width": width, "height": height}} | options))
        made = Reader(context.new_page())
        opened.append((context, made))
        made.open((path or default).as_uri() + hash)
        return made

    yield open_page
    for context, made in opened:
        context.close()
        assert made.said == [], "a page is silent on the console"
        assert len(made.requests) == made.opened, "a page asks for nothing but itself"
