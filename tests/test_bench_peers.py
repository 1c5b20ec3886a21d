"""What others are asked is what we are asked: every peer's words for masks, scores and packing, held against tilewise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.bench.cases import QKV, Case, Task
from tilewise.bench.peers import PEERS, choose, contender, flash, peer, tilewise
from tilewise.bench.peers.masks import Band, band, point_test, visible
from tilewise.bench.run import Setting, contenders, ieee, tolerance
from tilewise.dropout import Dropout
from tilewise.mask import Causal, Chunked, Documents, Full, Lengths, Mask, Prefix, Where, Window
from tilewise.problem import Options, Problem
from tilewise.ragged import Ragged

BY_NAME = {one.name: one for one in PEERS}
BASE = Case("base", 2, 37, 53, 4, 2, 8, 8)
PACKED = Ragged.from_lengths([5, 0, 17, 15], [9, 2, 17, 25])


def task(name: str = "forward", mask: Mask | None = None, **more) -> Task:
    options = Options(mask, **{key: more.pop(key) for key in ("softcap", "dropout", "ragged", "scale") if key in more})
    return Task.of(replace(BASE, options=options, **more), name, "cpu")


def problem(mask: Mask, **more) -> Problem:
    return task(mask=mask, **more).problem


# masks


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (Full(), Band(None, None)),
        (Causal(), Band(None, 0)),
        (Window(7, 3), Band(7, 3)),
        (Causal() & Window(7) & Window(9, 5), Band(7, 0)),
        (Causal("top-left"), None),
        (Causal() & Chunked(4), None),
    ],
)
def test_bands(mask: Mask, seen: Band | None) -> None:
    assert band(problem(mask)) == seen
    assert seen is None or seen.causal == (seen.right == 0)


MASKS = (
    Full(), Causal(), Causal("top-left"), Window(7, 3), Causal() & Window(7), Prefix(9), Chunked(8) & Causal(),
    Documents.from_lengths([7, 20, 26]),
)  # fmt: skip


@pytest.mark.parametrize("ragged", [None, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_point_test_is_the_definition(mask: Mask, ragged: Ragged | None) -> None:
    if ragged is not None and mask.align == "top-left":
        return
    p = problem(mask, ragged=ragged, b=2 if ragged is None else 1)
    test = point_test(p)
    assert test is not None
    i, j = torch.arange(p.n)[:, None], torch.arange(p.s)
    right = np.broadcast_to(p.keep()[0, 0], (p.n, p.s))
    assert np.array_equal(np.broadcast_to(test(i, j).numpy(), (p.n, p.s)), right)
    keep = visible(p)
    assert right.all() if keep is None else np.array_equal(np.broadcast_to(keep.numpy(), (p.n, p.s)), right)


def test_masks_without_a_point_test_are_tables() -> None:
    for mask in (Lengths([3, 50]), Where(lambda b, h, i, j: (i + j + h) % 3 == 0), Prefix([2, 3])):
        p = problem(mask)
        keep = visible(p)
        assert point_test(p) is None and keep is not None and np.array_equal(keep.numpy(), p.keep())
        assert "point test" in BY_NAME["flex"].reasons(task(mask=mask))


# what is computed

TASKS: dict[str, Any] = {
    "causal": {"mask": Causal(), "s": 37},
    "bottom-right": {"mask": Causal()},
    "window, grouped": {"mask": Causal() & Window(5), "h": 6, "g": 2},
    "documents": {"mask": Causal() & Documents.from_lengths([7, 20, 26])},
    "packed": {"mask": Causal(), "ragged": PACKED, "b": 1},
    "bias": {"mask": Causal() & Window(30), "bias": "1 h n s", "s": 37},
    "bias by key": {"bias": "b 1 1 s"},
    "alibi": {"mask": Causal(), "alibi": True},
    "alibi and bias": {"alibi": True, "bias": "h n s", "scale": 0.1},
    "softcap": {"mask": Causal(), "softcap": 2.0},
    "sink": {"mask": Causal() & Window(9), "sink": True},
}
SDPA_HAS_NOT = {"softcap", "sink"}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("who", ["sdpa", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_peer_computes_what_we_compute(monkeypatch: pytest.MonkeyPatch, who: str, name: str) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    asked = task(**TASKS[name])
    if who == "sdpa" and name in SDPA_HAS_NOT:
        assert BY_NAME[who].reasons(asked) == f"has no {name}"
        return
    ready, notes = contenders(asked, Setting(peers=(BY_NAME[who],)), lambda text: None)
    assert list(ready) == ["tilewise", who] and not notes


@pytest.mark.parametrize("name", ["causal", "bias", "packed"])
@pytest.mark.parametrize("how", ["backward", "step"])
def test_gradients_of_everything_that_is_needed_are_compared(how: str, name: str) -> None:
    needs = (*QKV, "bias") if name == "bias" else QKV
    asked = task(how, needs=needs, **TASKS[name])
    ready, notes = contenders(asked, Setting(peers=(BY_NAME["sdpa"],)), lambda text: None)
    assert list(ready) == ["tilewise", "sdpa"] and not notes
    assert [len(call()) for call in ready.values()] == [len(needs)] * 2


def test_a_bias_whose_gradient_is_wrong_is_found() -> None:
    asked = task("backward", needs=(*QKV, "bias"), **TASKS["bias"])
    sdpa = BY_NAME["sdpa"]

    def halved(asked: Task) -> peer.Attention:
        run = sdpa.prepare(asked)
        return lambda q, k, v, bias: run(q=q, k=k, v=v, bias=(bias + bias.detach()) / 2)

    _, (note,) = contenders(asked, Setting(peers=(replace(sdpa, prepare=halved),)), lambda text: None)
    assert note.reason.startswith("computes something else (relative difference 5")


def test_dropout_is_compared_without_it() -> None:
    asked = task(mask=Causal(), s=37, dropout=Dropout(0.5, seed=1))
    ready, notes = contenders(asked, Setting(peers=(BY_NAME["sdpa"], BY_NAME["flex"])), lambda text: None)
    assert list(ready) == ["tilewise", "sdpa"] and [note.reason for note in notes] == ["has no dropout"]
    first, again = ready["sdpa"](), ready["sdpa"]()
    assert not torch.equal(first, again)  # it is timed with it
    ours = contender(tilewise(), asked)()
    x = asked.x
    assert torch.equal(ours, tw.attention(x.q, x.k, x.v, mask=Causal(), dropout=0.5, seed=1))


def test_tf32_would_be_something_else() -> None:
    x = torch.randn(64, 64)
    rounded = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)  # ten bits of mantissa
    difference = float((x @ x - rounded @ rounded).norm() / (x @ x).norm())
    assert 10 * tolerance(torch.float32) < difference < tolerance(torch.bfloat16)
    torch.set_float32_matmul_precision("high")
    try:
        with ieee():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


# packages that may not be here


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A package with the functions of FlashAttention, computed by tilewise."""

    def mask(causal: bool, window: tuple) -> Mask:
        left, right = (None if side in (None, -1) else side for side in window)
        return Window(left, right) & (Causal() if causal else Full())

    def func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), learnable_sink=None, **rest):
        options = {"scale": softmax_scale, "softcap": rest.pop("softcap", None), "sink": learnable_sink}
        assert not rest
        return tw.attention(q, k, v, mask=mask(causal, window_size), **options), "lse"

    def varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, **rest):
        assert (rest.pop("max_seqlen_q"), rest.pop("max_seqlen_k"), cu_seqlens_q.dtype) == (17, 25, torch.int32)
        seen = mask(rest.pop("causal"), rest.pop("window_size"))
        ragged, scale = Ragged.from_offsets(cu_seqlens_q, cu_seqlens_k), rest.pop("softmax_scale")
        assert not rest
        return tw.attention_varlen(q, k, v, ragged=ragged, mask=seen, scale=scale)

    def varlen_attn(query, key, value, *sequences, window_size=(-1, -1), enable_gqa=False):
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        assert enable_gqa
        options = {"causal": False, "softmax_scale": None, "window_size": window_size}
        return varlen_func(query, key, value, **dict(zip(names, sequences, strict=True)), **options)

    made = SimpleNamespace(flash_attn_func=func, flash_attn_varlen_func=varlen_func, varlen_attn=varlen_attn)
    monkeypatch.setitem(sys.modules, "made_up_attention", made)  # type: ignore[arg-type]
    flash.missing.cache_clear()
    yield made
    flash.missing.cache_clear()


HALF: Any = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    "more", [{"mask": Causal()}, {"mask": Causal() & Window(5)}, {"mask": Window(5, 3)}, {}, {"softcap": 2.0, "scale": 0.2},
             {"mask": Causal(), "ragged": PACKED, "b": 1}, {"mask": Window(3), "ragged": PACKED, "b": 1}, {"sink": True}],
)  # fmt: skip
@pytest.mark.parametrize("unbounded", [-1, None])
def test_flash_attention_is_asked_the_same(package: SimpleNamespace, more: dict, unbounded: int | None) -> None:
    made = replace(flash.of("made", "made_up_attention", unbounded), absent=peer.present)
    ready, notes = contenders(task(**more, **HALF), Setting(peers=(made,)), lambda text: None)
    assert list(ready) == ["tilewise", "made"] and not notes


def test_torch_is_asked_the_same_about_packed_sequences(package: SimpleNamespace) -> None:
    made = replace(flash.packed("made", "made_up_attention"), absent=peer.present)
    for mask in (Causal(), Full(), Causal() & Window(4)):
        asked = task(mask=mask, ragged=PACKED, b=1, **HALF)
        assert list(contenders(asked, Setting(peers=(made,)), lambda text: None)[0]) == ["tilewise", "made"]
    assert made.reasons(task(**HALF)) == "is for packed sequences"
    package.varlen_attn = lambda query, key, value, *sequences, is_causal=False: query
    _, (note,) = contenders(task(mask=Window(2), ragged=PACKED, b=1, **HALF), Setting(peers=(made,)), lambda text: None)
    assert note.reason == "this torch has no windows for packed sequences (NotImplementedError)"


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("forward", {}, "half precision"),
        ("forward", {"mask": Chunked(4), **HALF}, "causal and windows"),
        ("forward", {"bias": "h n s", "alibi": True, **HALF}, "has no bias; has no alibi"),
        ("forward", {"dropout": Dropout(0.1, 1), **HALF}, "has no dropout"),
        ("backward", HALF, "computes no gradients"),
        ("forward", {"sink": True, **HALF}, "has no sink"),
        ("forward", {"sink": True, "needs": (*QKV, "sink"), **HALF}, "gradient of the sink"),
    ],
)
def test_what_flash_attention_has_not(name: str, more: dict, says: str) -> None:
    made = replace(flash.of("made", "not_there_at_all", -1, gradients=False), absent=peer.present)
    assert says in made.reasons(task(name, **more))


def test_packages_that_are_not_here_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash.missing("not_there_at_all.part") == "not_there_at_all is not installed"
    assert BY_NAME["fa4"].absent("cpu") == "needs CUDA"
    assert [one.name for one in choose(None, "cpu")] == ["sdpa", "sdpa-folded", "sdpa-documents", "flex"]
    assert [one.name for one in choose(None, "cpu", quick=True)] == ["sdpa", "sdpa-folded", "sdpa-documents"]
    assert choose("all", "cpu") == PEERS and choose("none", "cpu") == ()
    assert [one.name for one in choose("flex, sdpa", "cpu")] == ["flex", "sdpa"]
    monkeypatch.setattr(flash, "import_module", lambda name: 1 / 0)
    flash.missing.cache_clear()
    assert flash.missing("broken") == "broken cannot be imported: ZeroDivisionError: division by zero"
    flash.missing.cache_clear()


def test_torch_is_heard_when_it_has_no_kernel() -> None:
    cudnn = replace(BY_NAME["sdpa-flash"], absent=peer.present)
    asked = task("backward", bias="1 h n s", needs=(*QKV, "bias"))
    _, (note,) = contenders(asked, Setting(peers=(cudnn,)), lambda text: None)
    assert note.reason.startswith("no such kernel:") and note.who == "sdpa-flash"


def test_tricks_by_hand_compute_the_same() -> None:
    documents = Documents.from_lengths([7, 1, 20, 25]) & Causal()
    cases = {
        "sdpa-folded": task(mask=Causal(), n=1, h=6),
        "sdpa-documents": task(mask=documents, n=53),
    }
    for name, one in cases.items():
        assert not BY_NAME[name].reasons(one)
        right, found = contender(tilewise("torch"), one)(), contender(BY_NAME[name], one)()
        assert torch.allclose(found.transpose(1, 2), right, atol=1e-6)
        others = (task(mask=Causal(), softcap=2.0), task(mask=Window(3), n=1), task(n=1, g=4), task(mask=Prefix(3), n=53))
        assert all(BY_NAME[name].reasons(other) for other in others)
