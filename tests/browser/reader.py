"""How tests read the explainer page: by what it shows, and by its own account, `window.explain`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any


class Reader:
    """One window with a page in it."""

    def __init__(self, window: Any) -> None:
        self.window = window
        self.said: list[str] = []
        self.requests: list[str] = []
        self.opened = 0
        window.on("console", lambda message: self.said.append(message.text))
        window.on("pageerror", lambda error: self.said.append(str(error)))
        window.on("request", lambda request: self.requests.append(request.url))

    def open(self, url: str) -> None:
        self.opened += 1
        self.window.goto(url)
        self.settle()

    def busy(self, work: Callable[[], Any]) -> float:
        """Seconds that the page's thread computes meanwhile, however busy the machine is otherwise."""
        chromium = self.window.context.new_cdp_session(self.window)
        chromium.send("Performance.enable", {"timeDomain": "threadTicks"})

        def seconds() -> float:
            metrics = chromium.send("Performance.getMetrics")["metrics"]
            return next(x["value"] for x in metrics if x["name"] == "TaskDuration")

        before = seconds()
        work()
        return seconds() - before

    def reload(self) -> None:
        self.opened += 1
        self.window.reload()
        self.settle()

    def settle(self) -> None:
        """Wait until the page has drawn everything once; without its script there is nothing to wait for."""
        if self.window.evaluate("'explain' in window"):
            self.window.wait_for_selector("html.drawn", state="attached")

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script of the page's own answers."""
        return self.window.evaluate(script, *arguments)

    def text(self, name: str) -> str:
        """What the element with this test id shows."""
        return " ".join((self.window.get_by_test_id(name).text_content() or "").split())

    def texts(self, *names: str) -> list[str]:
        return [self.text(name) for name in names]

    def all(self, selector: str) -> list[str]:
        return [" ".join((text or "").split()) for text in self.window.locator(selector).all_text_contents()]

    def count(self, selector: str) -> int:
        return self.window.locator(selector).count()

    def click(self, selector: str) -> None:
        self.window.locator(selector).click()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.window.keyboard.press(key)

    def choose(self, name: str, value: str) -> None:
        """One of a row of choices."""
        self.window.locator(f"label:has(> input[name={name}][value='{value}'])").click()

    def state(self) -> dict[str, Any]:
        return self.run("explain.state()")

    def counters(self) -> dict[str, Any]:
        return self.run("explain.counters()")

    def goto(self, step: int) -> None:
        self.run("step => explain.goto(step)", step)

    def data(self) -> dict[str, Any]:
        return json.loads(self.run("document.getElementById('trace').textContent"))

    def steps(self) -> list[dict[str, Any]]:
        """The steps of the pass that is shown, as the page's data holds them."""
        state = self.state()
        run = next(run for run in self.data()["runs"] if run["name"] == state["run"])
        return run["orders"][state["order"]][state["pass"]]

    def last(self) -> int:
        return len(self.steps()) - 1

    def number(self, name: str) -> int:
        """The bytes that an element shows."""
        return int(re.sub(r"\D", "", self.text(name)))
