"""The conformance suite on the hopper backend's kernels, in head sizes that it takes, run on numpy: every named case that it
does not refuse, forward and gradients through the public functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from hopper_emulated import put_on_the_cpu

from tilewise import testing
from tilewise.backends.hopper import refusals
from tilewise.cases import CASES, Case
from tilewise.problem import Problem

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's own, where infinities are subtracted


def fitted(case: Case, number: int) -> Case:
    """A case with head sizes in steps of 8, which differ from case to case."""
    return replace(case, d=(64, 40, 128, 72)[number % 4], e=(48, 64, 128, 40)[number % 4])


def refused(case: Case) -> bool:
    return bool(refusals.reasons_of(Problem.describe(testing.tensors(case.inputs(), "bfloat16", "cpu"), case.options)))


FITTED = [fitted(case, number) for number, case in enumerate(CASES)]
TAKEN = [case for case in FITTED if not refused(case)]


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_the_kernels_conform(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_the_cpu(monkeypatch)
    dtype = "float16" if len(case.name) % 3 == 0 else "bfloat16"
    assert [result for result in testing.check(case, dtype, "hopper") if not result.ok] == []


def test_what_is_refused_is_what_kernels_lack() -> None:
    left_out = {case.name for case in FITTED if refused(case)}
    assert all("where" in name or "bias" in name or "dropout" in name or "everything" in name for name in left_out)
    assert len(TAKEN) > 35
