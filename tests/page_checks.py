"""What is wrong with a page, by its file alone: its numbers against runs made anew, its words, and that it asks for nothing.
Each check answers with what it found, so that pages that are known to be wrong can show that it looks."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from typing import Any

import numpy as np

from tilewise import cost
from tilewise.cost import Cost, keys_outside
from tilewise.explain import tour
from tilewise.explain.tour import Run
from tilewise.explain.trace import Trace
from tilewise.mask import Tile

KINDS = {kind.name[0]: kind for kind in Tile}
DATA = re.compile(r'<script type="application/json" id="trace">(.*?)</script>', re.S)


def data(html: str) -> dict[str, Any]:
    """What the page knows."""
    found = DATA.findall(html)
    assert len(found) == 1
    return json.loads(found[0])


def with_data(html: str, changed: dict[str, Any]) -> str:
    """The page with other knowledge."""
    text = json.dumps(changed, ensure_ascii=False).replace("<", "\\u003c")
    return DATA.sub(lambda _: f'<script type="application/json" id="trace">{text}</script>', html)


def runs() -> dict[str, Run]:
    """The default page's runs, made anew."""
    return {run.name: run for run in tour.default()}


def requests(html: str) -> list[str]:
    """Anything that would be fetched."""
    outside = DATA.sub("", html)
    words = ("http://", "https://", "//cdn", "src=", "@import", "<link", "<iframe", "fetch(", "XMLHttpRequest", "import(")
    return [word for word in words if word in outside] + [x for x in re.findall(r"url\(([^)]*)", outside) if x[:1] != "#"]


def prices(made: Trace) -> dict[tuple[str, str], Cost]:
    """What the cost model says of every order and pass."""
    p, shape = made.problem, made.shape
    found = {
        ("flash2", "fwd"): cost.forward(p, shape),
        ("flash1", "fwd"): keys_outside.forward(p, shape),
        ("standard", "fwd"): cost.standard(p),
    }
    if made.backward is not None:
        found["flash2", "bwd"] = cost.backward(p, shape)
        found["flash1", "bwd"] = keys_outside.backward(p, shape)
        found["standard", "bwd"] = cost.standard(p, backward=True)
    return found


def wrong_bytes(page: dict[str, Any], known: dict[str, Run]) -> list[str]:
    """Sums over steps that are not the cost model's, by tensor; and operations."""
    found = []
    for run in page["runs"]:
        for (order, way), price in prices(known[run["name"]].trace).items():
            sums: Counter[tuple[str, str]] = Counter()
            for step in run["orders"][order][way]:
                for side in ("load", "store"):
                    sums.update({(name, side): size for name, size in step.get(side, {}).items()})
            want = {
                (name, side): size for name, x in price.tensors.items() for side, size in (("load", x.read), ("store", x.write))
            }
            found += [f"{run['name']} {order} {way} {at}: {sums[at]}" for at in want | sums if sums[at] != want.get(at, 0)]
            flops = sum(step.get("flops", 0) for step in run["orders"][order][way])
            found += [f"{run['name']} {order} {way} flops"] if flops != price.flops else []
    return found


def wrong_steps(page: dict[str, Any], known: dict[str, Run]) -> list[str]:
    """Tiles of another kind than the mask's, and steps out of order or at the wrong tile."""
    found = []
    for run in page["runs"]:
        made = known[run["name"]].trace
        kinds = [[KINDS[x] for x in row] for row in run["tiles"]]
        found += [f"{run['name']} tiles"] if kinds != made.kinds.tolist() else []
        for name, steps in (("flash2", made.steps), ("flash1", made.keys_outside)):
            order = [(x.get("head", 0), x["i"], x["j"]) for x in run["orders"][name]["fwd"]]
            found += [f"{run['name']} {name} order"] if order != [(x.head, x.i, x.j) for x in steps] else []
            moving = {(x.get("head", 0), x["i"], x["j"]) for x in run["orders"][name]["fwd"] if x.get("flops")}
            seen = {(x.head, x.i, x.j) for x in steps if x.kind != Tile.EMPTY}
            found += [f"{run['name']} {name} visits"] if moving != seen else []
    return found


def wrong_states(page: dict[str, Any], known: dict[str, Run]) -> list[str]:
    """m, ℓ and α that are not the trace's to six digits, and rows whose last ones do not give L."""
    found = []
    for run in page["runs"]:
        made, lse = known[run["name"]].trace, np.full((run["problem"]["h"], run["problem"]["n"]), -np.inf)
        for step in made.steps:
            if step.after is None:
                continue
            at, told = f"{run['name']} ({step.i}, {step.j})", run["states"][step.head][step.i][step.j : step.j + 1]
            if not told or told[0] is None:
                found.append(f"{at} is not there")
                continue
            told = told[0]
            for name, want in step.after._asdict().items():
                have = np.array([-np.inf if x is None else x for x in told[name]])
                found += (
                    [f"{at} {name}"] if have.shape != want.shape or not np.allclose(have, want, rtol=1e-5, atol=1e-9) else []
                )
            rows = slice(step.i * made.shape.block_m, (step.i + 1) * made.shape.block_m)
            if len(told["m"]) == lse[step.head, rows].size:
                m, l = (np.array([-np.inf if x is None else x for x in told[name]]) for name in "ml")  # noqa: E741
                lse[step.head, rows] = m + np.log(l, where=l > 0, out=np.zeros_like(l))
        told = np.array([[-np.inf if x is None else x for x in row] for row in run["lse"]])
        found += [f"{run['name']} L"] if not np.allclose(lse, told, atol=1e-5) else []
    return found


def matrix(page: dict[str, Any], run: dict[str, Any], name: str) -> np.ndarray:
    """One of a run's matrices, float16, put together from its tiles where only those are kept."""
    array = run["arrays"][name]
    flat = np.frombuffer(base64.b64decode(page["arrays"][array["data"]]), "<f2")
    if "hidden" not in array:
        return flat.reshape(array["shape"])
    whole = np.full(array["shape"], -np.inf if array["hidden"] is None else array["hidden"], np.float16)
    m, n, at = run["problem"]["block_m"], run["problem"]["block_n"], 0
    for head in range(len(whole)):
        for i, row in enumerate(run["tiles"]):
            for j, kind in enumerate(row):
                if kind != "E":
                    tile = whole[head, i * m : (i + 1) * m, j * n : (j + 1) * n]
                    tile[:] = flat[at : at + tile.size].reshape(tile.shape)
                    at += tile.size
    assert at == flat.size
    return whole


def wrong_matrices(page: dict[str, Any], known: dict[str, Run]) -> list[str]:
    """Matrices that are not the trace's in float16."""
    found = []
    for run in page["runs"]:
        made = known[run["name"]].trace
        want = {"S": made.s} | {name: x[0].transpose(1, 0, 2) for name, x in made.inputs.present()}
        want["O"] = made.result.o[0].transpose(1, 0, 2)
        if made.backward is not None:
            want |= {"P": made.p, "dS": np.nan_to_num(made.backward.ds)}
            want |= {f"d{name}": x[0].transpose(1, 0, 2) for name, x in made.backward.grads.present()}
        for name, x in want.items():
            if not np.array_equal(matrix(page, run, name), x.astype(np.float16)):
                found.append(f"{run['name']} {name}")
    return found


def wrong_words(page: dict[str, Any]) -> list[str]:
    """Texts that one language has and the other does not, and English where Chinese should be."""
    en, zh = page["words"]["en"], page["words"]["zh"]
    found = [f"{key} is missing" for key in set(en) ^ set(zh)]
    found += [f"{key} is empty" for words in (en, zh) for key, text in words.items() if not text.strip()]
    return found + [f"{key} is English" for key, text in zh.items() if is_english(text)]


def is_english(text: str) -> bool:
    """Whether a text holds a sentence of more than six Latin words."""
    plain = re.sub(r"<[^>]*>|\{\w+\}", " ", text)
    return any(len(re.findall(r"[A-Za-z]{2,}", part)) > 6 for part in re.split(r"[\u3000-\u9fff\uff00-\uffef]", plain))


def problems(html: str, known: dict[str, Run]) -> dict[str, list[str]]:
    """Every check that a file alone allows."""
    page = data(html)
    return {
        "requests": requests(html),
        "bytes": wrong_bytes(page, known),
        "steps": wrong_steps(page, known),
        "states": wrong_states(page, known),
        "matrices": wrong_matrices(page, known),
        "words": wrong_words(page),
    }
