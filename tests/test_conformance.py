"""Every backend on every named case and dtype, held to budgets that come from data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise import backends, testing
from tilewise.cases import CASES, Case
from tilewise.problem import Inputs, Partial, Problem

BY_NAME = {case.name: case for case in CASES}
HERE = [name for name in backends.ORDER if name != "hopper"]
"""Hopper's has a suite of its own, on numpy: `test_hopper_conformance.py`."""


def asked() -> list[tuple[str, str, Case]]:
    """Everything, but of Triton's interpreter, which takes its time: every third case in float16, to kernels a half type like
    bfloat16; and in float64 the first of those cases that kernels cannot tell apart."""
    kinds = [(d, b) for b in HERE for d in testing.dtypes_of(b)]
    found, told = [], set()
    for at, case in enumerate(CASES):
        left_out = {("float16", "triton"): at % 3 > 0, ("float64", "triton"): features(case) in told}
        told.add(features(case))
        for kind in kinds:
            if not left_out.get(kind, False):
                found.append((*kind, cut(case) if kind == ("float64", "triton") else case))
    return found


def features(case: Case) -> tuple:
    """What a Triton kernel learns of a case: an interval of keys is one to it, whichever mask has made it."""
    o, p = case.options, Problem.describe(case.inputs(), case.options)
    arrays = o.mask is not None and bool(o.mask.encode()[2])
    sizes = 0 in (p.b, p.n, p.s), max(p.n, p.s) > 512, p.d, p.e
    score = case.bias, case.alibi, case.sink, case.size, o.scale, o.softcap, o.dropout is not None
    return p.mask.kind, arrays, o.positions is None, o.ragged is None, sizes, score


def cut(case: Case) -> Case:
    """A case of several tiles, cut to as many of float64's, which are a quarter as long and more."""
    return replace(case, n=min(case.n, 263), s=min(case.s, 263)) if max(case.n, case.s) > 512 else case


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's own, where the interpreter multiplies infinities
@pytest.mark.parametrize(("dtype", "backend", "case"), asked(), ids=lambda x: getattr(x, "name", x))
def test_backend_is_within_budget(dtype, backend, case):
    results = testing.check(case, dtype, backend)
    assert {r.quantity for r in results} >= {"o", "lse", "dq", "dk", "dv"}
    assert not [r for r in results if not r.ok]


def test_only_float64_is_left_out_and_only_by_cpu():
    left = {(b, d) for b in HERE for d in testing.DTYPES if d not in testing.dtypes_of(b)}
    assert left <= {("cpu", "float64")}


def compiled_for(cases: Iterable[Case], dtype: str) -> set[Any]:
    """What Triton's forward kernels are compiled for, in these cases."""
    triton, call = backends.load("triton"), pytest.importorskip("tilewise.backends.triton.call")
    found = set()
    for case in cases:
        x = testing.tensors(case.inputs(), dtype, "cpu")
        problem = Problem.describe(x, case.options)
        if 0 not in (problem.b, problem.n, problem.s):
            config: Any = triton.configure(problem)
            found.add(call.Call.of(problem, x, config).variant(config.forward, config.hides))
    return found


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_every_kernel_of_tritons_is_asked_for(dtype: str):
    asked_for, every = [case for d, b, case in asked() if (d, b) == (dtype, "triton")], compiled_for(CASES, dtype)
    assert compiled_for(asked_for, dtype) == every
    without = [case for case in asked_for if case.options.softcap is None]
    assert compiled_for(without, dtype) < every  # what is left out is missed


def test_case_names_are_unique_and_counted():
    assert len(BY_NAME) == len(CASES)
    assert testing.count(["float32"]) == len(list(testing.conformance("torch", dtypes=["float32"])))


def wrong_answers(answer: testing.Answer) -> dict[str, testing.Answer]:
    """What subtle bugs return: one quantity slightly off, one row lost, a NaN, a shape."""

    def altered(name, change):
        return testing.Answer({**answer.arrays, name: change(answer.arrays[name].copy())})

    def lose_last_row(x):
        x[:, -1] = 0
        return x

    def poison(x):
        x.flat[3] = np.nan
        return x

    return {
        "o 1e-5 too large": altered("o", lambda x: x * (1 + 1e-5)),
        "dk lost its last row": altered("dk", lose_last_row),
        "dv has a NaN": altered("dv", poison),
        "lse in base 2": altered("lse", lambda x: x / np.log(2)),
        "dq and do confused": altered("dq", lambda x: x[:, ::-1]),
        "o transposed": altered("o", lambda x: x.swapaxes(1, 2)),
        "dsink missing the group": altered("dsink", lambda x: x * 0.999),
        "dbias of the wrong sign": altered("dbias", lambda x: -x),
    }


@pytest.mark.parametrize("name", wrong_answers(testing.Answer({k: np.ones((2, 3, 4, 5)) for k in
                                                               ("o", "lse", "dq", "dk", "dv", "dbias", "dsink")})))  # fmt: skip
def test_the_judge_rejects(name):
    case = BY_NAME["everything"]
    x = testing.tensors(case.inputs(), "float32", "cpu")
    do, dlse = case.upstream()
    grads = Partial(torch.from_numpy(do).float(), torch.from_numpy(dlse).float())
    answer = testing.ask(case, x, grads, "torch")
    assert all(r.ok for r in testing.judge(case, x, grads, answer))
    assert not all(r.ok for r in testing.judge(case, x, grads, wrong_answers(answer)[name]))


def test_a_backend_that_raises_fails_the_check():
    results = testing.check(BY_NAME["full"], "float32", "no such backend")
    assert [r.ok for r in results] == [False]
    assert "unknown" in results[0].detail


def test_assert_right_sees_a_wrong_upstream(monkeypatch):
    x = testing.tensors(BY_NAME["causal"].inputs(), "float32", "cpu")
    testing.assert_right(x, BY_NAME["causal"].options)
    real = testing.ask
    monkeypatch.setattr(testing, "ask", lambda *a: testing.Answer({k: v * 1.0001 for k, v in real(*a).arrays.items()}))
    with pytest.raises(AssertionError, match="quantity='o'"):
        testing.assert_right(x, BY_NAME["causal"].options)


def test_public_functions_agree_with_described_calls():
    """`attention` and `attention_with_lse` are the call that the suite makes."""
    case = BY_NAME["everything"]
    x: Inputs = testing.tensors(case.inputs(), "float32", "cpu")
    o, drop = case.options, case.options.dropout
    assert drop is not None
    options = {"mask": o.mask, "scale": o.scale, "softcap": o.softcap, "dropout": drop.rate, "seed": drop.seed}
    options |= {"bias": x.bias, "alibi": x.alibi, "sink": x.sink}
    partial = testing.call(case, x)
    assert torch.equal(tw.attention(x.q, x.k, x.v, **options), partial.o)
    assert torch.equal(tw.attention_with_lse(x.q, x.k, x.v, **options).lse, partial.lse)
