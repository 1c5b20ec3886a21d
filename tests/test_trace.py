"""A trace is a run that happened: its bytes are the cost model's and a count by hand, its m and ℓ those of a softmax taken of
the row's first tiles all at once."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import questions
from typer.testing import CliRunner, Result

from tilewise import cost
from tilewise._errors import DtypeError, OptionError, ShapeError
from tilewise.cli import app
from tilewise.cost import Cost, keys_outside
from tilewise.explain import tour, trace
from tilewise.explain.tour import Sizes
from tilewise.explain.trace import BACKWARD1, DKDV, DQ, FORWARD1, PRODUCTS, Step, Trace
from tilewise.mask import Causal, Full, Lengths, Tile, Window, parse
from tilewise.problem import DTYPES, Inputs, Options
from tilewise.reference import flash, plain
from tilewise.tiles import TileShape

SHAPES = st.builds(TileShape, st.integers(1, 9), st.integers(1, 9))


def passes(made: Trace) -> dict[str, tuple[tuple[Step, ...], Cost]]:
    """The steps of every pass of a trace, and what the cost model says of it."""
    p, shape = made.problem, made.shape
    found = {"forward": (made.steps, cost.forward(p, shape)), "forward1": (made.keys_outside, keys_outside.forward(p, shape))}
    if made.backward is not None:
        found["backward"] = made.backward.steps, cost.backward(p, shape)
        found["backward1"] = made.backward.keys_outside, keys_outside.backward(p, shape)
    return found


def differs(steps: tuple[Step, ...], price: Cost) -> list[str]:
    """Where the sums over steps are not what the cost model counts, tensor by tensor."""
    want = {(name, way): getattr(x, way) for name, x in price.tensors.items() for way in ("read", "write") if getattr(x, way)}
    have: dict[tuple[str, str], int] = {}
    for step in steps:
        for way, side in (("read", step.load), ("write", step.store)):
            for name, size in side.items():
                have[name, way] = have.get((name, way), 0) + size
    wrong = [f"{at}: {have.get(at, 0)}, not {want.get(at, 0)}" for at in have | want if have.get(at, 0) != want.get(at, 0)]
    sums = {"flops": sum(x.flops for x in steps), "exponentials": sum(x.exponentials for x in steps)}
    return wrong + [
        f"{name}: {sum_}, not {getattr(price, name)}" for name, sum_ in sums.items() if sum_ != getattr(price, name)
    ]


@given(questions(), SHAPES, st.sampled_from(sorted(DTYPES)))
@settings(max_examples=60, deadline=None)
def test_bytes_and_operations_of_all_steps_are_the_cost_models(question, shape, dtype):
    inputs, options = question
    assume(inputs.q.shape[0] == 1 and inputs.q.shape[1] > 0 and inputs.k.shape[1] > 0)
    made = trace.run(inputs, options, shape, dtype, backward=True)
    assert len(passes(made)) == 4
    for name, pair in passes(made).items():
        assert differs(*pair) == [], name
    assert made.error < 1e-12 and made.backward is not None and made.backward.error < 1e-11


def causal() -> Trace:
    """Two heads on one key head, ragged at every edge, with rows that see nothing."""
    return trace.run(tour.draw(Sizes(23, 17, 2, 1, 5, 3)), Options(Causal()), TileShape(4, 6), backward=True)


@pytest.mark.parametrize("at", ["load", "store", "flops", "exponentials"])
def test_a_step_that_is_off_by_one_is_found(at):
    made = causal()
    for steps, price in passes(made).values():
        touched = next(x for x in steps if getattr(x, at))
        whole = getattr(touched, at)
        changed = whole + 1 if isinstance(whole, int) else {**whole, next(iter(whole)): next(iter(whole.values())) + 1}
        assert len(differs(tuple(replace(x, **{at: changed}) if x is touched else x for x in steps), price)) == 1


def test_each_step_moves_what_a_count_by_hand_says():
    # float16, n = 5 rows in blocks of 2, s = 6 keys in blocks of 4, d = 3, e = 2, causal: row i sees keys up to i + 1.
    #   block 0, rows 0 1      keys 0-3 seen, 4 5 not        block 2, row 4       keys 0-5
    #   block 1, rows 2 3      keys 0-4
    made = trace.run(tour.draw(Sizes(5, 6, 1, 1, 3, 2)), Options(Causal()), TileShape(2, 4))
    q, q_last, k, k_last, v, v_last = 2 * 2 * 3, 2 * 3, 2 * 4 * 3, 2 * 2 * 3, 2 * 4 * 2, 2 * 2 * 2
    done, done_last = {"o": 2 * 2 * 2, "lse": 2 * 4}, {"o": 2 * 2, "lse": 4}
    assert [(x.i, x.j, x.kind, x.load, x.store) for x in made.steps] == [
        (0, 0, Tile.PARTIAL, {"q": q, "k": k, "v": v}, done),
        (0, 1, Tile.EMPTY, {}, {}),
        (1, 0, Tile.PARTIAL if not made.problem.keep()[0, 0, 2, 3] else Tile.FULL, {"q": q, "k": k, "v": v}, {}),
        (1, 1, Tile.PARTIAL, {"k": k_last, "v": v_last}, done),
        (2, 0, Tile.FULL, {"q": q_last, "k": k, "v": v}, {}),
        (2, 1, Tile.FULL, {"k": k_last, "v": v_last}, done_last),
    ]
    assert [x.flops for x in made.steps] == [2 * r * c * 5 for r, c in ((2, 4), (0, 0), (2, 4), (2, 2), (1, 4), (1, 2))]


def test_keys_outside_o_comes_and_goes():
    # Two blocks of two rows, three of two keys, d = e = 1, float16: o and lse are read at every visit of a row but its first.
    made = trace.run(tour.draw(Sizes(4, 6, 1, 1, 1, 1)), Options(), TileShape(2, 2))
    first, again = {"k": 4, "v": 4}, {"o": 4, "lse": 8}
    assert [(x.i, x.j) for x in made.keys_outside] == [(i, j) for j in range(3) for i in range(2)]
    assert [x.load for x in made.keys_outside] == [
        {**(first if i == 0 else {}), "q": 4, **(again if j else {})} for j in range(3) for i in range(2)
    ]
    assert all(x.store == again for x in made.keys_outside)


def test_every_tile_is_a_step_in_the_order_of_its_pass():
    made = causal()
    rows, cols, heads = 6, 3, 2
    by_rows = [(x, i, j) for x in range(heads) for i in range(rows) for j in range(cols)]
    by_keys = [(x, i, j) for x in range(heads) for j in range(cols) for i in range(rows)]
    grouped = [(x, i, j) for j in range(cols) for x in range(heads) for i in range(rows)]
    assert made.backward is not None
    dq, dkdv = ([x for x in made.backward.steps if x.part == part] for part in (DQ, DKDV))
    for steps, order in ((made.steps, by_rows), (dq, by_rows), (dkdv, by_keys), (made.keys_outside, grouped)):
        assert [(x.head, x.i, x.j) for x in steps] == order
    keep = np.broadcast_to(made.problem.keep(), (1, 2, 23, 17))[0, 0]
    for step in (*made.steps, *made.keys_outside, *dq, *dkdv):
        tile = keep[4 * step.i : 4 * step.i + 4, 6 * step.j : 6 * step.j + 6]
        assert step.kind == (Tile.FULL if tile.all() else Tile.PARTIAL if tile.any() else Tile.EMPTY)


def test_a_hidden_tile_moves_nothing_unless_its_whole_block_is_hidden():
    made = causal()
    seen = {i for i in range(6) if (made.kinds[i] != Tile.EMPTY).any()}
    assert seen != set(range(6))  # rows 0 to 5 come before the first key
    hidden = [x for x in made.steps if x.kind == Tile.EMPTY]
    assert all(not x.load and not x.store and not x.flops for x in hidden if x.i in seen)
    alone = [x for x in hidden if x.i not in seen and x.j == 2]
    assert alone and all(x.load == {"q": 2 * 4 * 5} and set(x.store) == {"o", "lse"} for x in alone)


@given(st.integers(1, 13), st.integers(1, 17), SHAPES, st.sampled_from([Full(), Causal(), Causal() & Window(3), Lengths([5])]))
@settings(max_examples=40, deadline=None)
def test_m_and_l_after_each_step_are_those_of_all_keys_so_far(n, s, shape, mask):
    made = trace.run(tour.draw(Sizes(n, s, 2, 1, 3, 2)), Options(mask), shape)
    for step in made.steps:
        if step.kind == Tile.EMPTY:
            assert step.after is None
            continue
        assert step.after is not None
        rows, past = slice(step.i * shape.block_m, (step.i + 1) * shape.block_m), (step.j + 1) * shape.block_n
        seen, before = made.s[step.head, rows, :past], made.s[step.head, rows, : step.j * shape.block_n]
        m, old = seen.max(1), before.max(1, initial=-np.inf)
        safe = np.where(np.isneginf(m), 0, m)
        np.testing.assert_array_equal(step.after.m, m)
        np.testing.assert_allclose(step.after.l, np.exp(seen - safe[:, None]).sum(1), rtol=1e-12)
        np.testing.assert_allclose(step.after.alpha, np.exp(old - safe), rtol=1e-12)


def test_matrices_are_those_of_the_definition():
    made = causal()
    p, x = made.problem, made.inputs
    q, k, v = (np.repeat(a, 2 // a.shape[2], 2)[0].transpose(1, 0, 2) for a in (x.q, x.k, x.v))
    s = np.where(np.broadcast_to(p.keep(), (1, 2, 23, 17))[0], q @ k.transpose(0, 2, 1) / 5**0.5, -np.inf)
    np.testing.assert_allclose(made.s, s, rtol=1e-12)
    np.testing.assert_allclose(made.p @ v, made.result.o[0].transpose(1, 0, 2), atol=1e-12)
    assert made.backward is not None
    do = made.backward.do[0].transpose(1, 0, 2)
    dp, delta = do @ v.transpose(0, 2, 1), (do * made.result.o[0].transpose(1, 0, 2)).sum(-1, keepdims=True)
    np.testing.assert_allclose(np.nan_to_num(made.backward.ds), made.p * (dp - delta), atol=1e-12)
    exact = plain.gradients(p, x, made.backward.do, np.zeros((1, 2, 23)))
    np.testing.assert_allclose(made.backward.grads.q, exact.q, atol=1e-11)


def test_a_reference_that_errs_shows_in_the_error(monkeypatch):
    right = flash.forward
    monkeypatch.setattr(flash, "forward", lambda *a: right(*a)._replace(o=1.001 * right(*a).o))
    assert causal().error > 1e-4


def test_products_are_counted_by_operations():
    made = trace.run(tour.draw(Sizes(8, 12, 1, 1, 4, 4)), Options(), TileShape(4, 4), backward=True)
    assert made.backward is not None
    for step in (*made.steps, *made.keys_outside, *made.backward.steps, *made.backward.keys_outside):
        assert step.flops == 2 * 4 * 4 * 4 * PRODUCTS[step.part]
    assert {FORWARD1, BACKWARD1} <= {x.part for x in (*made.keys_outside, *made.backward.keys_outside)}


def test_the_row_of_four_logits():
    made = tour.row(tour.ROW).trace
    first, second = made.steps
    assert [f"{x[0]:.3f}" for step in made.steps for x in step.after or ()] == [
        "3.000", "1.135", "0.000", "5.000", "1.203", "0.135"
    ]  # fmt: skip
    assert first.load == {"q": 2, "k": 4, "v": 4} and second.store == {"o": 2, "lse": 4}
    assert f"{made.result.lse[0, 0, 0]:.3f}" == "5.185"


@pytest.mark.parametrize(
    ("sizes", "shape", "says"),
    [
        (Sizes(0, 4, 1, 1, 2, 2), TileShape(2, 2), "axis n: a trace needs at least one row, got 0"),
        (Sizes(4, 0, 1, 1, 2, 2), TileShape(2, 2), "axis s: a trace needs at least one row, got 0"),
        (Sizes(130, 130, 1, 1, 1, 1), TileShape(2, 2), "1 heads × 130 × 130 in tiles of 2 × 2 are 4225 steps"),
        (Sizes(513, 512, 1, 1, 1, 1), TileShape(64, 64), "1 heads × 513 × 512 are 262656 logits"),
        (Sizes(4, 4, 3, 2, 2, 2), TileShape(2, 2), "axis h: the 3 query heads"),
        (Sizes(4, 4, 1, 1, 2, 2), TileShape(0, 2), "a block must hold at least one row, got 0"),
    ],
)
def test_what_cannot_be_followed_is_refused(sizes, shape, says):
    with pytest.raises((ShapeError, OptionError), match=says):
        trace.run(tour.draw(sizes), Options(), shape)


def test_other_refusals():
    x = tour.draw(Sizes(4, 4, 1, 1, 2, 2))
    with pytest.raises(ShapeError, match="axis b: a trace follows one batch entry, got 2"):
        trace.run(Inputs(*(np.repeat(a, 2, 0) for a in (x.q, x.k, x.v))), Options(), TileShape(2, 2))
    with pytest.raises(DtypeError, match="got 'int8'"):
        trace.run(x, Options(), TileShape(2, 2), dtype="int8")
    with pytest.raises(OptionError, match="one or more finite logits"):
        tour.row([1.0, np.inf])
    with pytest.raises(OptionError, match="cannot be negative"):
        trace.run(x, Options(parse("window(left=-1)")), TileShape(2, 2))


# the command


def tilewise(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "140"})


def test_the_command_prints_shapes_and_every_step(tmp_path):
    result = tilewise("trace", "causal", "--n", 10, "--d", 3, "--heads", 2, "--kv-heads", 1, "--json", tmp_path / "a.json")
    assert result.exit_code == 0, result.output
    made = trace.run(tour.draw(Sizes(10, 10, 2, 1, 3, 3)), Options(Causal()), TileShape(4, 4))
    assert "Q      2 × 10 × 3" in result.stdout and "never stored" in result.stdout
    assert "3 FULL, 3 PARTIAL, 3 EMPTY tiles of 4 × 4" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines() if "PARTIAL" in line or "FULL" in line or "EMPTY" in line]
    assert [line[:5] for line in lines[:-1]] == [
        [str(t), str(x), f"{i},", str(j), Tile(made.kinds[i, j]).name]
        for t, (x, i, j) in enumerate(product(range(2), range(3), range(3)))
    ]
    price = cost.forward(made.problem, made.shape)
    assert f"{price.read_bytes:,} B read, {price.write_bytes:,} B written" in result.stdout
    whole = json.loads((tmp_path / "a.json").read_text())
    assert whole["mask"] == "causal" and len(whole["orders"]["flash2"]["fwd"]) == 18


def test_the_command_follows_a_row_and_a_file(tmp_path):
    shown = tilewise("trace", "--row", "1, 3, 2, 5", "--block-n", 2)
    assert "1.135" in shown.stdout and "1.203" in shown.stdout and "0.135" in shown.stdout
    x = tour.draw(Sizes(6, 7, 2, 1, 3, 2), seed=5)
    np.savez(tmp_path / "mine.npz", **{name: getattr(x, name)[0] for name in "qkv"})
    shown = tilewise("trace", "full", "--npz", tmp_path / "mine.npz")
    assert "n=6 s=7 h=2 g=1 d=3 e=2, float16, mine.npz" in shown.stdout
    after = trace.run(x, Options(), TileShape(4, 4)).steps[0].after
    assert after is not None and f"{after.m[0]:.3f}".replace("-", "−") in shown.stdout
    assert "step" not in tilewise("trace", "--no-text").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("trace", "casual"), "expected one of full, causal, window"),
        (("trace", "__import__('os').getcwd()"), "expected one of"),
        (("trace", "--row", "1, x"), "'1, x' is not a list of numbers"),
        (("trace", "--n", 4096), "steps, a trace holds at most 4096"),
        (("trace", "--h", 6, "--g", 4), "axis h: the 6 query heads"),
        (("trace", "--npz", __file__), "it is no .npz file of numbers"),
        (("trace", "--npz", "nowhere.npz"), "No such file"),
    ],
)
def test_user_errors_are_one_line(arguments, says):
    result = tilewise(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"q": np.zeros((3, 2)), "k": np.zeros((3, 2))}, "holds q, k, and no v"),
        ({name: np.zeros(3) for name in "qkv"}, "q must have axes 'rows d'"),
        ({"q": np.zeros((3, 2)), "k": np.zeros((4, 2)), "v": np.zeros((5, 2))}, "axis s: k"),
        (
            {"q": np.full((3, 2), np.nan), "k": np.zeros((4, 2)), "v": np.zeros((4, 2))},
            "q (3, 2) holds numbers that are not finite",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, arrays, says):
    np.savez(tmp_path / "a.npz", **arrays)
    result = tilewise("trace", "--npz", tmp_path / "a.npz")
    assert result.exit_code == 2 and says in result.stderr
