"""The gradients of the hopper backend on a CPU: its main kernels' own source on numpy, what comes before and after in Triton's
interpreter, against the float64 definition and the budgets of every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import gluon_on_numpy as emulator
import numpy as np
import pytest
import torch

from tilewise import backends, testing
from tilewise.cases import Case
from tilewise.mask import Causal, Chunked, Documents, Lengths, Prefix, Window
from tilewise.positions import Positions
from tilewise.problem import Options
from tilewise.ragged import Ragged

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from hopper_emulated import put_on_the_cpu

from tilewise.backends import hopper
from tilewise.backends.hopper import backward_pass, config

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's own, where infinities are subtracted


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hopper backend takes everything, makes gradients by its own kernels, and leaves forward to torch."""
    other = backends.load("torch")
    put_on_the_cpu(monkeypatch)
    monkeypatch.setattr(hopper, "forward", lambda problem, x, config: other.forward(problem, x, other.configure(problem)))


_IDS = np.repeat([0, 1, 2], [97, 1, 162])
_ROWS = np.sort(np.random.default_rng(3).choice(400, 197, replace=False))[None]


def case(name: str, mask: Any = None, n: int = 131, s: int = 261, **more: Any) -> Case:
    options = Options(mask, **{key: more.pop(key) for key in ("softcap", "positions", "ragged") if key in more})
    return Case(name, **{"b": 1, "n": n, "s": s, "h": 2, "g": 1, "d": 128, "e": 128, "options": options, **more})


CASES = (
    case("full", h=4, g=2),
    case("full", d=64, e=64),
    case("full", d=256, e=256),
    case("causal", Causal()),
    case("causal", Causal(), d=64, e=64),
    case("causal", Causal(), d=192, e=128),
    case("causal, more queries", Causal(), n=261, s=131),
    case("window, keys that nobody sees", Window(30, 20), s=521),
    case("documents", Documents(_IDS) & Causal(), n=260, s=260),
    case("documents", Documents(_IDS), n=260, s=260, d=256, e=256),
    case("lengths", Lengths([53, 149]), b=2, s=149, d=64, e=64),
    case("prefix", Prefix(200) & Chunked(150)),
    case("gaps", Causal() & Window(61), n=197, s=397, positions=(Positions.of(_ROWS), Positions(397)), d=64, e=64),
    case("packed", Causal(), ragged=Ragged.from_lengths([70, 0, 47], [120, 30, 111])),
    case("softcap", softcap=5.0, d=80, e=48),
    case("softcap", softcap=5.0, d=256, e=256),
    case("alibi", Causal(), alibi="h"),
    case("sink", Causal(), sink=True),
)


@pytest.mark.parametrize("one", CASES, ids=lambda one: f"{one.name} {one.d}")
def test_gradients(one: Case) -> None:
    results = testing.check(one, "bfloat16", "hopper")
    assert [result for result in results if not result.ok] == []
    assert {"dq", "dk", "dv"} <= {result.quantity for result in results}


@pytest.mark.parametrize("one", CASES[3:10], ids=lambda one: f"{one.name} {one.d}")
def test_gradients_of_heads_that_go_up(one: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_pass, "span", lambda problem, C: 1)
    grouped = replace(one, h=6, g=3 if one.b == 1 else 2)
    assert [result for result in testing.check(grouped, "bfloat16", "hopper") if not result.ok] == []


@pytest.mark.parametrize("group", (5, 10))
def test_gradients_of_large_groups(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose sections go down, all of them, where small groups take turns."""
    kept = []
    right = backward_pass.turns
    monkeypatch.setattr(backward_pass, "turns", lambda *given: kept.append(right(*given)) or kept[-1])
    grouped = replace(CASES[3], d=64, e=64, h=2 * group, g=2)
    assert [result for result in testing.check(grouped, "bfloat16", "hopper") if not result.ok] == []
    assert set(kept) == {0}


STAYING = (
    replace(CASES[3], h=4, g=4, b=2),
    replace(CASES[4], n=261, h=6, g=3),
    replace(CASES[3], n=261, h=4, g=2),
    replace(CASES[4], n=389, s=389, h=3, g=3),
    case("window", Window(200, 30), n=300, s=300, d=40, e=64, h=3, g=3),
    case("softcap", Causal(), n=261, softcap=5.0, d=80, e=48, h=4, g=4),
)


@pytest.fixture
def staying(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Three multiprocessors, and the variants of main kernels that run there."""
    ran: list[Any] = []
    launch = backward_pass.launch
    monkeypatch.setattr(config, "processors", lambda device: 3)
    monkeypatch.setattr(backward_pass, "STAY", True)
    monkeypatch.setattr(backward_pass, "launch", lambda kernel, *rest: ran.append(rest[2]) or launch(kernel, *rest))
    return ran


@pytest.mark.parametrize("one", STAYING, ids=lambda one: f"{one.name} {one.d}")
def test_gradients_by_programs_that_stay(one: Case, staying: list[Any]) -> None:
    assert [result for result in testing.check(one, "bfloat16", "hopper") if not result.ok] == []
    assert staying and all(C.PERSISTENT for C in staying)


def test_gradients_with_slopes_that_need_none(staying: list[Any]) -> None:
    import tilewise as tw

    def gradients(backend: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 261, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        o = tw.attention(q, k, v, mask=tw.Causal(), alibi=torch.tensor([[0.5, 0.1], [0.02, 1.0]]), backend=backend)
        return list(torch.autograd.grad(o.float().square().sum(), [q, k, v]))

    for found, right in zip(gradients("hopper"), gradients("torch"), strict=True):
        assert (found.float() - right.float()).norm() < 1e-2 * right.float().norm()
    assert [C.ALIBI and C.PERSISTENT for C in staying] == [True]


def test_a_roster_out_of_order_hangs(staying: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program's blocks of keys must come in the order in which they add to dq."""
    right = backward_pass.roster

    def turned(*given: Any) -> np.ndarray:
        table = right(*given)
        for count, column in zip(table[0], table[1:].T, strict=True):
            column[:count] = column[:count][::-1]
        return table

    monkeypatch.setattr(config, "processors", lambda device: 1)
    monkeypatch.setattr(backward_pass, "roster", turned)
    with mock.patch.object(emulator, "PATIENCE_S", 1.0):
        results = testing.check(replace(STAYING[2], n=262), "bfloat16", "hopper")
    assert any("hung at" in result.detail for result in results)


def test_gradients_in_half_precision() -> None:
    assert all(result.ok for result in testing.check(replace(CASES[1], name="half"), "float16", "hopper"))


def test_what_hidden_keys_hold_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN among padding reaches no gradient; and would, were noted blocks not run again."""
    import tilewise as tw

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 140, 2, 64).bfloat16() for _ in range(3))
        k[0, 53:], v[0, 60:] = torch.nan, torch.inf
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = tw.attention(*leaves, mask=tw.Lengths([53, 140]), backend="hopper")
        return list(torch.autograd.grad(o.float().square().sum(), leaves))

    assert all(bool(x.isfinite().all()) for x in gradients())
    monkeypatch.setattr(backward_pass, "mend", lambda *args: None)
    assert not all(bool(x.isfinite().all()) for x in gradients())


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same checks fail where a step's keys are taken for those of the other warpgroup."""
    from tilewise.backends.hopper import backward_walk

    right = backward_walk.gap.fn
    monkeypatch.setattr(
        backward_walk.gap, "fn", lambda x, first, apart, MINE, COLUMNS: right(x, first, apart, 1 - MINE, COLUMNS)
    )
    assert not all(result.ok for result in testing.check(CASES[3], "bfloat16", "hopper"))


def test_a_carrier_that_comes_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs add to dq in the order of keys; the emulator sees one that does not."""
    from tilewise.backends.hopper import backward_walk

    right = backward_walk.rank.fn
    monkeypatch.setattr(backward_walk.rank, "fn", lambda *given: right(*given) + 1)
    with mock.patch.object(emulator, "PATIENCE_S", 1.0):
        [result] = testing.check(CASES[3], "bfloat16", "hopper")
    assert "waits for a later one" in result.detail
