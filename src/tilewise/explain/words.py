"""The page's words in both languages, from one table: `site/words.json`, key → {"en": ..., "zh": ...}."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from markupsafe import Markup, escape

SITE = Path(__file__).with_name("site")

LANGUAGES = {"en": "en", "zh": "zh-CN"}
"""What a language is called here, and in HTML."""

SPOKEN = "js."
"""Keys that begin so are said by the page's script; all others are in the markup."""

NAME = re.compile(r"\{(\w+)\}")


@cache
def table() -> dict[str, dict[str, str]]:
    """Every text. They hold markup of their own, `<sub>` or a link, and slots such as {ratio}; what fills one is escaped."""
    return json.loads((SITE / "words.json").read_text(encoding="utf-8"))


class Words:
    """Texts for a template, in one language or in both. `live` are the numbers of the run that is shown; `used` is what was
    asked for."""

    def __init__(self, lang: str, live: Mapping[str, str]) -> None:
        self.lang, self.live = lang, live
        self.used: set[str] = set()
        self.labels: set[str] = set()

    def both(self, key: str, **values: object) -> Markup:
        """The text in both languages, one of which the style sheet hides: what is seen is in the language of the page."""
        span = Markup('<span class="{}">{}</span>')
        return Markup("").join(span.format(lang, self.one(key, lang, **values)) for lang in LANGUAGES)

    def one(self, key: str, lang: str | None = None, **values: object) -> Markup:
        """The text in one language. A name that is not among `values` is a live number, which the script keeps up to date."""
        self.used.add(key)

        def fill(found: re.Match) -> Markup:
            name = found[1]
            if name in values:
                return escape(values[name])
            return Markup('<span data-slot="{}">{}</span>').format(name, self.live[name])

        return Markup(NAME.sub(fill, table()[key][lang or self.lang]))

    def aria(self, key: str) -> Markup:
        """An `aria-label` that the script puts into the other language."""
        self.labels.add(key)
        return Markup('data-aria="{}" aria-label="{}"').format(key, self.one(key))

    def option(self, key: str) -> Markup:
        """An <option>'s attribute and text, which the script puts into the other language."""
        self.labels.add(key)
        return Markup('data-t="{}">{}').format(key, self.one(key))

    def spoken(self) -> dict[str, dict[str, str]]:
        """language → key → text of all that the script says, the labels that were asked for among them."""
        keys = {key.removeprefix(SPOKEN): key for key in table() if key.startswith(SPOKEN)}
        keys |= {f"aria.{key}": key for key in self.labels}
        self.used |= set(keys.values())
        return {lang: {short: table()[key][lang] for short, key in keys.items()} for lang in LANGUAGES}
