"""The explainer page: one HTML file that replays traces, with no network and nothing that was not computed here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .. import __version__, cost
from .._errors import OptionError
from ..machine import MACHINES, find
from . import byhand, exhibits, facts, limits, scenes
from .encode import Arrays, dump, encode
from .tour import Run
from .words import LANGUAGES, SITE, Words

VIEWS = tuple(f"v{x}" for x in range(11))

SCRIPTS = ("data", "numbers", "state", "totals", "transport", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "end")

SHADES = "".join(f".s{x}{{fill:color-mix(in oklab,var(--m) {2.5 * x + 5:g}%,var(--card))}}" for x in range(21))
"""The colours of heat maps, from the least number to the largest, on all of which the page's ink stands out."""

BYTES = 2_000_000
"""What a page weighs at most."""


def render(runs: Sequence[Run], lang: str = "en", device: str = "h200", measured: Sequence[limits.Measured] = ()) -> str:
    """The page over these runs, the first of which it opens with; `device` is the machine whose roofline it opens with, and
    `measured` stands beside the paper's figure 2. Equal arguments give equal bytes."""
    found = find(device)
    if found not in MACHINES.values():
        raise OptionError(
            f"device {device!r} is measured, and a page is the same wherever it is made: take one of {', '.join(MACHINES)}"
        )
    names = [run.name for run in runs]
    if len(set(names)) < len(names) or not names:
        raise OptionError(f"a page needs runs with names of their own, got {names}")
    arrays = Arrays()
    shown = [_shown(run, arrays) for run in runs]
    words = Words(lang, shown[0]["facts"])
    environment = Environment(
        loader=FileSystemLoader(SITE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(t=words.both, w=words.one, aria=words.aria, option=words.option)
    shared = _exhibits(runs[0])
    body = environment.get_template("body.html").render(
        views=VIEWS, lang=lang, runs=shown, main=shown[0], device=found, measured=measured, **shared
    )
    data = {
        "v": 1,
        "package": __version__,
        "main": names[0],
        "runs": [run["json"] for run in shown],
        "words": words.spoken(),
        "signs": facts.SIGNS,
        "machines": shared["machines"],
        "problems": limits.problems(),
        "presets": [{size["block"]: size["words"] for size in mask["sizes"]} for mask in shared["presets"]],
    }
    text = environment.get_template("page.html").render(
        lang=LANGUAGES[lang],
        title=words.one("js.title", name=shown[0]["json"]["title"]),
        style=Markup(_read("style.css") + SHADES),
        body=Markup(body),
        data=Markup(dump(data | {"arrays": list(arrays.texts)})),
        script=Markup('"use strict";\n' + "\n".join(_read(f"js/{name}.js") for name in SCRIPTS)),
    )
    if (size := len(text.encode())) > BYTES:
        raise OptionError(f"the page would be {size} bytes, at most {BYTES}: fewer pairs, tiles or runs make it smaller")
    return text


def _exhibits(run: Run) -> dict[str, Any]:
    """What the page shows once, whatever the run."""
    trace = run.trace
    masks = exhibits.presets(trace, run.mask)
    sizes = [size["block"] for size in masks[0]["sizes"]]
    size = 16 if 16 in sizes else sizes[-1]
    for mask in masks:
        mask["now"] = next(x["words"] for x in mask["sizes"] if x["block"] == size)
    return {
        "real": exhibits.long(),
        "seed": byhand.row(),
        "presets": masks,
        "preset_sizes": sizes,
        "preset_size": size,
        "ring": exhibits.ring(),
        "code": exhibits.code(),
        "machines": limits.machines(),
        "lengths": limits.LENGTHS,
        "axes": limits.ticks(),
        "published": limits.published(),
        "apart": limits.apart(),
        "chip": limits.chip(),
        **exhibits.backward(trace),
    }


def _shown(run: Run, arrays: Arrays) -> dict[str, Any]:
    """A run for the templates and, under "json", for the script."""
    trace, p = run.trace, run.trace.problem
    told = facts.of(trace, run.mask, run.source)
    flash, standard = cost.forward(p, trace.shape), cost.standard(p)
    most = max(standard.bytes, flash.bytes)
    versus = {
        name: round(exhibits.BAR * x / most, 1)
        for name, x in (("std", standard.bytes), ("flash", flash.bytes), ("least", flash.least_bytes))
    }
    script = {
        "name": run.name,
        "title": f"{run.mask}, {p.n} × {p.s}, d {p.d}",
        "facts": told,
        "versus": versus,
        "footprint": facts.footprint(trace),
        "peak": facts.peak(trace),
        "standard": {"fwd": standard.bytes, "bwd": cost.standard(p, backward=True).bytes},
    }
    return {
        "name": run.name,
        "facts": told,
        "json": encode(trace, arrays) | script,
        "loops": scenes.loops(trace),
        "last": len(trace.steps) - 1,
        "bars": scenes.bars(trace, scenes.KEPT, scenes.LATE if trace.backward else ()),
        "stored": scenes.bars(trace, scenes.STORED, scenes.STORED_LATE if trace.backward else ()),
        "peak": facts.exactly(facts.peak(trace)),
        "gauges": {
            "hbm-read": 100 * flash.read_bytes / most,
            "hbm-write": 100 * flash.write_bytes / most,
            "ghost": 100 * standard.bytes / most,
        },
        "finals": {
            "hbm-read": facts.exactly(flash.read_bytes),
            "hbm-write": facts.exactly(flash.write_bytes),
            "ghost": facts.exactly(standard.bytes),
        },
        "tensors": facts.tensors(dict(flash.tensors)),
        "tile": scenes.last_tile(trace),
        "versus": [{"name": name, "width": width} for name, width in versus.items()],
    }


def _read(name: str) -> str:
    """A style sheet or script without indentation and lines of comment, a style sheet without spaces that mean nothing."""
    lines = (line.strip() for line in (SITE / name).read_text(encoding="utf-8").splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith(("//", "/*", "*")))
    return re.sub(r" ?([{};,]) ?|(:) ", r"\1\2", text) if name.endswith(".css") else text
