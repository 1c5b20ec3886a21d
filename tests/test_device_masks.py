"""Masks, positions and packed layouts answer where the positions are: as NumPy does, and without a look at any value there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from strategies import questions
from torch import Tensor

from tilewise._errors import DtypeError, ShapeError
from tilewise.arrays import FOREVER, HOST, indices, placed, wide
from tilewise.cases import CASES
from tilewise.mask import Causal, Documents, Full, Lengths, Mask, Prefix, Where
from tilewise.positions import Dense, Positions
from tilewise.problem import Problem
from tilewise.ragged import Packed, Ragged

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device of its own")
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def moved(x: Any, like: Tensor) -> Any:
    """A description with each array in it moved to where `like` is."""
    if hasattr(x, "shape"):
        return (x if isinstance(x, Tensor) else torch.from_numpy(np.array(x))).to(like.device)
    if isinstance(x, tuple):
        return tuple(moved(part, like) for part in x)
    return replace(x, **{f.name: moved(getattr(x, f.name), like) for f in fields(x)}) if is_dataclass(x) else x  # type: ignore


def on(problem: Problem, like: Tensor) -> Problem:
    return replace(problem, mask=moved(problem.mask, like), layout=moved(problem.layout, like))


def answers(p: Problem, like: Any) -> dict[str, Any]:
    """Everything that is answered where `like` is."""
    b, i, j = slice(0, p.b), slice(0, p.n), slice(0, p.s)
    some, half = (slice(p.b // 2, p.b), slice(p.n // 3, p.n)), slice(p.h // 2, p.h)
    q, kv = p.layout.queries(b, i, like), p.layout.keys(b, j, like)
    pairs = q.position[:, None, :, None], kv.position[:, None, None, :], q.sequence[:, None, :, None]
    found = {f"{name} of {side}": x for side, rows in (("q", q), ("k", kv)) for name, x in rows._asdict().items()}
    found["first"], found["past"] = p.mask.bounds(p.layout, b, i, like)
    found["first of some"], found["past of some"] = p.mask.bounds(p.layout, *some, like)
    found["first column"], found["past column"] = p.layout.columns(b, i, (q.position - 3, q.position + 5))
    found["grid"] = p.mask.grid(p.layout, b, i, slice(p.s // 4, p.s), half, like)
    found["keep"] = p.mask.keep(*pairs, indices(half, p.h, like)[None, :, None, None])
    return found | ({"points": p.mask.points(*pairs, half)} if p.mask.pointwise else {})


def check(problem: Problem, like: Tensor, watched: Callable[[], Any]) -> None:
    """The answers where `like` is are those of NumPy, for arrays on the host and for arrays that are there already."""
    expected = answers(problem, HOST)
    for asked in (problem, on(problem, like)):
        with watched():
            found = answers(asked, like)
        for name, right in expected.items():
            answer = found[name]
            assert isinstance(right, np.ndarray) and isinstance(answer, Tensor), name
            assert answer.device == like.device and str(answer.dtype) == f"torch.{right.dtype}", name
            assert tuple(answer.shape) == right.shape, name
            if like.device.type != "meta":
                np.testing.assert_array_equal(answer.cpu().numpy(), right, name)


@contextmanager
def unwatched() -> Iterator[None]:
    yield


@contextmanager
def no_waiting() -> Iterator[None]:
    """An error for whatever makes the host wait for a CUDA device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_case
def test_torch_answers_as_numpy_does(case):
    check(Problem.describe(case.inputs(), case.options), torch.zeros(0), unwatched)


@given(questions())
@settings(max_examples=200, deadline=None)
def test_torch_answers_as_numpy_does_to_any_question(question):
    check(Problem.describe(*question), torch.zeros(0), unwatched)


@every_case
def test_no_value_is_looked_at(case):
    """Tensors on the meta device have none, so that whoever looks raises."""
    check(Problem.describe(case.inputs(), case.options), torch.zeros(0, device="meta"), unwatched)


@cuda
@every_case
def test_no_answer_waits_for_a_device(case):
    check(Problem.describe(case.inputs(), case.options), torch.zeros(0, device="cuda"), no_waiting)


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool((x > 0).any()),
    "list": lambda x: x.tolist(),
    "host": lambda x: x.cpu(),
    "choice": lambda x: x[x > 0],
    "wide": wide,
    "positions": lambda x: Positions(3, x).array(),
    "bounds": lambda x: Lengths(x).bounds(Dense(2, Positions(3), Positions(5)), slice(0, 2), slice(0, 3)),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=list(LOOKS))
def test_a_look_at_values_is_seen(look):
    """A meta-test: each of these needs values, so the guards of the two tests above must trip."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        look(torch.tensor([2, 1], device="meta"))
    if torch.cuda.is_available():
        with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
            look(torch.zeros(2, dtype=torch.int64, device="cuda"))


def test_a_mask_that_looks_is_seen():
    class Looks(Lengths):
        def interval(self, b, i):
            return 0 * i, 0 * i + int(self.kv[0])

    problem = Problem.describe(CASES[0].inputs(), CASES[0].options)
    with pytest.raises(RuntimeError, match="meta"):
        check(replace(problem, mask=Looks(np.array([7, 9]))), torch.zeros(0, device="meta"), unwatched)


# arrays


KINDS = [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64]


@pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.__name__)
def test_integers_of_every_kind_are_wide(dtype):
    limits = np.iinfo(dtype)
    x = np.array([limits.min, 0, 5, limits.max // 2 + 1, limits.max], dtype)
    expected = [int(np.clip(int(v), -FOREVER, FOREVER)) for v in x.tolist()]
    tensor = torch.from_numpy(x.copy())
    found = [wide(x), wide(tensor), wide(x, torch.zeros(0)), wide(tensor, torch.zeros(0)), wide(tensor[::2], tensor)]
    assert [type(y) for y in found] == [np.ndarray, np.ndarray, Tensor, Tensor, Tensor]
    assert [y.tolist() for y in found] == [expected] * 4 + [expected[::2]]
    assert {str(y.dtype).removeprefix("torch.") for y in found} == {"int64"}


def test_an_array_that_cannot_be_written_goes_anywhere_and_is_left_alone():
    x = np.broadcast_to(np.array(3), (2,))
    moved = placed(x, torch.zeros(0))
    moved += 1
    assert x.tolist() == [3, 3]


def test_answers_stay_where_they_are_asked_whatever_device_is_the_default():
    like, mask = torch.zeros(0), Documents([0, 0, 1]) & Lengths([2])
    with torch.device("meta"):
        first, past = mask.bounds(Dense(1, Positions(3), Positions(3)), slice(0, 1), slice(0, 3), like)
        packed = Packed(Ragged.from_lengths([1, 2]), 3, 3).queries(slice(0, 1), slice(0, 3), like)
    assert first.tolist() == [[0, 0, 2]] and past.tolist() == [[2, 2, 2]]
    assert packed.sequence.tolist() == [[0, 1, 1]]


def test_arrays_that_change_between_calls_change_the_answer():
    ids, table, starts = torch.tensor([0, 0, 1]), torch.eye(3, dtype=torch.bool), torch.tensor([0])
    mask, layout = Documents(ids) & Where(table, start=0), Dense(1, Positions(3, starts), Positions(3))

    def grid() -> list:
        return mask.grid(layout, slice(0, 1), slice(0, 3), slice(0, 3), like=ids)[0, 0].int().tolist()

    assert grid() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    table[:] = True
    assert grid() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    ids[1] = 1
    assert grid() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    starts += 1
    assert grid() == [[0, 1, 1], [0, 1, 1], [0, 0, 0]]


@cuda
def test_a_pinned_array_may_change_right_after_the_call():
    lengths, like = torch.full((1 << 16,), 3).pin_memory(), torch.zeros(1, dtype=torch.int64, device="cuda")

    def sent(send: Callable[[], Tensor]) -> list[int]:
        """What arrives of 3s that become 5s while the device is still busy with something else."""
        lengths[:] = 3
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 30)
        there = send()
        lengths[:] = 5
        return there.unique().tolist()

    assert sent(lambda: placed(lengths, like)) == [3]
    assert sent(lambda: lengths.to(like.device, non_blocking=True)) != [3]  # the device was late indeed


# point tests


def points(test: Any) -> Any:
    like = torch.zeros(0)
    i, j = (indices(slice(0, 2), 2, like).reshape(shape) for shape in ((1, 1, 2, 1), (1, 1, 1, 2)))
    return Where(test, heads=1).points(i, j, 0 * i, slice(0, 1))


def test_a_function_is_asked_where_the_positions_are_and_may_answer_in_anything():
    def test(b, h, i, j):
        assert all(isinstance(x, Tensor) and x.dtype == torch.int64 for x in (b, h, i, j))
        return i >= j

    lower = [[[[True, False], [True, True]]]]
    ways = [test, lambda *x: test(*x).float(), lambda *x: test(*x).int(), lambda *x: test(*x).numpy()]
    for way in ways:
        assert points(way).tolist() == lower and points(way).dtype == torch.bool
    assert points(lambda *x: True).tolist() == [[[[True]]]]
    for nothing in (None, "yes", 0.5):
        with pytest.raises(DtypeError, match="must return booleans"):
            points(lambda *x: nothing)  # noqa: B023


# corners


@pytest.mark.parametrize("like", [HOST, torch.zeros(0)], ids=["numpy", "torch"])
@pytest.mark.parametrize("mask", [Full(), Causal(), Prefix([]), Lengths([]), Documents(np.zeros((1, 0), int))], ids=repr)
def test_no_batch_entries_have_no_bounds(mask: Mask, like: Any):
    none = np.zeros((0, 5), int)
    for kv in (Positions(5), Positions.of([1, 2, 3, 4, 9]), Positions(5, none[:, 0]), Positions.of(none)):
        first, past = mask.bounds(Dense(0, Positions(3), kv), slice(0, 0), slice(0, 3), like)
        assert tuple(first.shape) == tuple(past.shape) == (0, 3)


@pytest.mark.parametrize("like", [HOST, torch.zeros(0)], ids=["numpy", "torch"])
def test_no_sequences_own_no_rows(like):
    layout = Packed(Ragged([0], [0]), 3, 5)
    q, kv = layout.queries(slice(0, 1), slice(0, 3), like), layout.keys(slice(0, 1), slice(0, 5), like)
    assert q.sequence.tolist() == [[-1] * 3] and kv.sequence.tolist() == [[-2] * 5]
    assert [x.tolist() for x in Causal().bounds(layout, slice(0, 1), slice(0, 3), like)] == [[[0] * 3]] * 2


def test_starts_have_one_axis():
    for start in (np.zeros((2, 3), int), torch.zeros(2, 1, dtype=torch.int64)):
        with pytest.raises(ShapeError, match=r"start must be one number or 'b', got \(2, "):
            Positions(3, start)
