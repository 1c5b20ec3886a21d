"""Plans run on tensors, by virtual ranks: the numbers are those of the definition, whatever the number of ranks, the layout,
the method, the mask and the order in which things happen; and a plan with one thing wrong is found out by its numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from ring_plans import LAYOUTS, Question, error, exact, shuffled
from torch import Tensor

import tilewise as tw
from tilewise import DtypeError, OptionError, ShapeError
from tilewise.dropout import Dropout
from tilewise.mask import Causal, Chunked, Documents, Full, Lengths, Mask, Prefix, Where, Window
from tilewise.positions import Positions
from tilewise.problem import Inputs, Options, Partial, Problem
from tilewise.ring import local, owners
from tilewise.ring.execute import backward_given, forward_given
from tilewise.ring.kernel import Kernel
from tilewise.ring.program import Method

METHODS = (
    Method(), Method(direction=-1), Method("double", node=2), Method("direct"), Method("direct", at_once=3), Method("gather"),
    Method("gather", groups=3), Method(heads=2), Method(heads=4), Method("direct", heads=2),
    Method("gather", groups=2, heads=2),
)  # fmt: skip
LENGTH = 37
TABLE = np.random.default_rng(0).random((6, LENGTH, LENGTH)) < 0.4

MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal() & Window(7),
    "documents": Causal() & Documents(np.array([0] * 5 + [1] * 17 + [-1] * 4 + [2] * 11)),
    "prefix": Prefix(9),
    "chunks": Chunked(11),
    "padding": Lengths(np.array([30])),
    "function of heads": Where(lambda b, h, i, j: (i + 2 * j + 3 * h) % 5 != 0) & Causal(),
    "table of heads": Where(TABLE),
}


@cache
def asked(name: str) -> Question:
    return Question.ask(LENGTH, LENGTH, Options(MASKS[name]))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "shuffled"])
def test_every_method_mask_and_layout(layout, mask):
    question = asked(mask)
    made = shuffled(LENGTH, 4, 5) if layout == "shuffled" else LAYOUTS[layout](LENGTH, 4)
    for method in METHODS:
        assert exact(errors := question.errors(question.answer(question.plans(made, made, method)))), (str(method), errors)


def test_documents_dealt_out_by_area():
    question = asked("documents")
    made = owners.balanced(question.problem, 5)
    for method in (Method(), Method("direct", at_once=4), Method("gather")):
        assert exact(question.errors(question.answer(question.plans(made, made, method))))


@pytest.mark.parametrize("length", [3, 4, 9])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_lengths_that_divide_nothing_and_ranks_without_rows(length, method):
    question = Question.ask(length, length, Options(Causal()), b=2)
    for layout in (owners.contiguous, owners.zigzag):
        made = layout(length, 4)
        assert exact(question.errors(question.answer(question.plans(made, made, method)))), layout


@pytest.mark.parametrize("method", [Method(direction=-1), Method("gather")], ids=str)
def test_2999_tokens_on_four_ranks(method):
    question = Question.ask(2999, 2999, Options(Causal()), heads=(1, 1), size=(4, 4))
    made = owners.zigzag(2999, 4)
    assert exact(question.errors(question.answer(question.plans(made, made, method))))


@pytest.mark.parametrize("n, s", [(11, 29), (29, 11), (0, 9), (9, 0), (1, 40)])
def test_queries_and_keys_of_different_lengths(n, s):
    for mask in (Causal(), Causal("top-left"), Window(3, 2)):
        question = Question.ask(n, s, Options(mask))
        for method in (Method(), Method("direct", at_once=3), Method("gather"), Method(heads=3), Method("gather", heads=3)):
            sides = owners.zigzag(n, 3), owners.striped(s, 3)
            assert exact(question.errors(question.answer(question.plans(*sides, method)))), (mask, str(method))


@pytest.mark.parametrize("heads", [(4, 1), (8, 2), (6, 2), (1, 1)])
def test_shared_key_heads(heads):
    question = Question.ask(23, 23, Options(Causal()), heads=heads)
    made = owners.zigzag(23, 4)
    for method in (Method(), *(x for x in METHODS if x.heads > 1 or x.groups > 1)):
        assert exact(question.errors(question.answer(question.plans(made, made, method)))), str(method)


@pytest.mark.parametrize("world", [1, 2, 4, 5])
def test_a_decoding_step(world):
    for n, extras in ((1, ""), (3, "sink")):
        question = Question.ask(n, 41, Options(Causal() & Window(30)), b=2, extras=extras)
        plans = question.plans(owners.replicated(n, world), owners.contiguous(41, world), Method("tree"))
        assert exact(question.errors(question.answer(plans)))
        given = [forward_given(plans[0], r, question.x.q, *(x.split(plans[0].kv.counts, 1)[r] for x in
                 (question.x.k, question.x.v))) for r in range(world)]  # fmt: skip
        outs = [found["out"] for found in local.results(plans[0], question.kernel(), given)]
        assert all(torch.equal(outs[0], out) for out in outs)  # every rank has the same bits


OPTIONS: dict[str, tuple[Options, str]] = {
    "softcap": (Options(Causal(), softcap=1.5, scale=0.7), ""),
    "alibi": (Options(Causal()), "alibi"),
    "sink": (Options(Causal() & Window(4)), "sink"),
    "dropout": (Options(Causal(), dropout=Dropout(0.3, 7)), ""),
    "all": (Options(Prefix(6), softcap=2.0, dropout=Dropout(0.2, 2**40 + 1)), "alibi sink"),
    "positions": (Options(Causal(), positions=(Positions(23, 40), Positions(23, np.array([3, 30]), 2))), "alibi"),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("world", [1, 3, 4])
def test_every_option(name, world):
    options, extras = OPTIONS[name]
    question = Question.ask(23, 23, options, b=2, extras=extras)
    for method in METHODS if world == 4 else (Method(), Method("gather", groups=3), Method(heads=world)):
        made = owners.zigzag(23, world)
        assert exact(errors := question.errors(question.answer(question.plans(made, made, method)))), (str(method), errors)


def test_every_option_changes_the_answer():
    bare = Question.ask(23, 23, Options(Causal()), b=2)
    made = owners.zigzag(23, 3)
    plain = bare.answer(bare.plans(made, made, Method()))
    for options, extras in OPTIONS.values():
        question = Question.ask(23, 23, options, b=2, extras=extras)
        found = question.answer(question.plans(made, made, Method()))
        assert all(error(found[x], plain[x].numpy()) > 1e-3 for x in (0, 2, 3, 4))  # dropout does not change lse


def test_another_call_with_the_same_kernel_has_its_own_seed_slopes_and_sinks():
    question = Question.ask(23, 23, OPTIONS["all"][0], extras="alibi sink")
    other = Question.ask(23, 23, replace(question.options, dropout=Dropout(0.2, 9)), extras="alibi sink")
    other = replace(other, x=replace(other.x, alibi=question.x.alibi * 2, sink=question.x.sink - 1))  # type: ignore[operator]
    kernel, made = question.kernel(), owners.zigzag(23, 3)
    plans = question.plans(made, made, Method(heads=3))
    for one in (question, other, question):
        again = kernel.with_arrays(one.x.alibi, one.x.sink, one.options.dropout)
        assert exact(one.errors(one.answer(plans, again)))
        assert again.plans is kernel.plans


# ---- the number of ranks makes no difference


def test_the_error_does_not_grow_with_the_number_of_ranks():
    """bfloat16 on up to 64 ranks, so that each row is merged 63 times: at most 1.5 times the error of one device, and no slope.
    Sums in bfloat16 would grow as √N, a slope of 0.5 in logarithms; a hundredth of that is allowed."""
    question = Question.ask(8, 128, heads=(4, 1), size=(16, 16), dtype=torch.bfloat16)
    leaves = question.x.map(lambda t: t.clone().requires_grad_())
    alone = tw.attention_with_lse(leaves.q, leaves.k, leaves.v)
    single = question.errors((*alone, *torch.autograd.grad(alone, (leaves.q, leaves.k, leaves.v), question.grads)))
    worlds, found = (1, 4, 16, 64), []
    for world in worlds:
        sides = owners.contiguous(8, world), owners.contiguous(128, world)
        found.append(question.errors(question.answer(question.plans(*sides, Method()))))
    for name in ("o", "dq", "dk", "dv"):
        errors = [x[name] for x in found]
        assert max(errors) <= 1.5 * single[name], (name, errors, single[name])
        assert abs(np.polyfit(np.log(worlds), np.log(errors), 1)[0]) < 0.005, (name, errors)
    assert max(x["lse"] for x in found) < 4 * torch.finfo(torch.float32).eps  # float32, and a merge rounds it


@dataclass(frozen=True, eq=False)
class Rounded(Kernel):
    """Rounds parts to bfloat16, and what is merged of them too."""

    def forward(self, block, q, k, v):
        o, lse = super().forward(block, q, k, v)
        return Partial(o.bfloat16().float(), lse.bfloat16().float())


def test_rounded_parts_would_be_seen():
    question = Question.ask(8, 128, heads=(4, 1), size=(16, 16), dtype=torch.bfloat16)
    plans = question.plans(owners.contiguous(8, 8), owners.contiguous(128, 8), Method())
    right, wrong = (question.errors(question.answer(plans, kind(question.problem))) for kind in (Kernel, Rounded))
    assert wrong["o"] > 1.5 * right["o"] and wrong["lse"] > 1e3 * right["lse"]


@pytest.mark.parametrize("world", [1, 2, 3, 7, 16, 64])
def test_float64_is_exact_on_any_number_of_ranks(world):
    question = Question.ask(65, 65, Options(Causal(), dropout=Dropout(0.1, 3)), heads=(2, 1))
    made = owners.zigzag(65, world)
    methods = [Method(), Method("direct", at_once=8), Method("gather")] if world < 16 else [Method("gather")]
    for method in methods:
        assert exact(question.errors(question.answer(question.plans(made, made, method)))), str(method)


def test_a_narrow_wire_rounds_gradients_once():
    question = Question.ask(64, 64, Options(Causal()), size=(16, 16), dtype=torch.float32)
    made = owners.zigzag(64, 8)
    forward, backward = question.plans(made, made, Method())
    wide = question.errors(question.answer((forward, backward)))
    narrow = question.errors(question.answer((forward, replace(backward, wire={"dkv": 2}))))
    assert narrow["dq"] == wide["dq"] < 1e-6
    for name in ("dk", "dv"):
        assert wide[name] < 1e-6 < narrow[name] < torch.finfo(torch.bfloat16).eps


# ---- pieces


def test_what_does_not_fit_is_refused():
    question = Question.ask(40, 40)
    forward, backward = question.plans(owners.contiguous(40, 4), owners.contiguous(40, 4), Method())
    made = forward.q
    q, k, v, do = (local.shards(made, x)[1] for x in (question.x.q, question.x.k, question.x.v, question.grads.o))
    lse = torch.zeros(1, 6, made.counts[1], dtype=torch.float64)
    with pytest.raises(ShapeError, match="axis n: q"):
        forward_given(forward, 1, q[:, 1:], k, v)
    with pytest.raises(ShapeError, match="axis e: v"):
        forward_given(forward, 1, q, k, v[..., 1:])
    with pytest.raises(ShapeError, match="must have the axes"):
        forward_given(forward, 1, q[0], k, v)
    with pytest.raises(DtypeError, match=r"k .* of rank 1 is torch\.float32"):
        forward_given(forward, 1, q, k.float(), v)
    with pytest.raises(DtypeError, match="lse"):
        backward_given(backward, 1, (q, k, v), do, lse.float(), lse)
    biased = Problem.describe(Inputs(question.x.q, question.x.k, question.x.v, bias=torch.zeros(40, 40)))
    with pytest.raises(OptionError, match="bias"):
        Kernel(biased)
    with pytest.raises(OptionError, match="sink"):
        Kernel(question.problem, sink=torch.zeros(6))


def _call(problem: Problem, x: Inputs[Tensor], backend: str) -> Partial:
    from tilewise.backends import make_plan as planned
    from tilewise.ops import launch

    return launch(planned(problem, backend), x)


BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.filterwarnings("ignore::RuntimeWarning"))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_of_a_model_drop_what_the_model_does(backend):
    pytest.importorskip("triton") if backend == "triton" else None
    options = Options(Causal(), dropout=Dropout(0.4, 11))
    question = Question.ask(20, 20, options, heads=(4, 2), size=(16, 16), dtype=torch.float32)
    whole = _call(question.problem, question.x, backend).o
    x = question.x
    part = Inputs(x.q[:, :, 2:], x.k[:, :, 1:], x.v[:, :, 1:])
    for seed in (11, torch.tensor(11)):
        problem = Problem.describe(part, Options(Causal(), dropout=Dropout(0.4, seed, head=2)))
        assert error(_call(problem, part, backend).o, whole[:, :, 2:].double().numpy()) < 1e-6
    first = Problem.describe(part, Options(Causal(), dropout=Dropout(0.4, 11)))
    assert error(_call(first, part, backend).o, whole[:, :, 2:].double().numpy()) > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_results_are_not_rounded(backend):
    """Forward and backward of bfloat16 blocks in float32, by a ring of two."""
    pytest.importorskip("triton") if backend == "triton" else None
    question = Question.ask(
        24, 24, Options(Causal(), dropout=Dropout(0.25, 4)), heads=(2, 2), size=(16, 16), dtype=torch.bfloat16
    )
    made = owners.zigzag(24, 2)
    for method in (Method(), Method(heads=2)) if backend == "torch" else (Method(heads=2),):
        plans, kernel = question.plans(made, made, method), question.kernel(backend)
        errors = question.errors(question.answer(plans, kernel))
        assert max(errors.values()) < 2 * torch.finfo(torch.bfloat16).eps
        given = [forward_given(plans[0], r, *(local.shards(made, t)[r] for t in (question.x.q, question.x.k, question.x.v)))
                 for r in range(2)]  # fmt: skip
        assert local.results(plans[0], kernel, given)[0]["out"].dtype == torch.bfloat16
        used = [kernel.plan(*key) for key in kernel.plans]
        assert {plan.backend for plan in used} == {backend} and any(plan.problem.wide for plan in used)
    wide = replace(question.problem, dropout=None, wide=True)
    bare = Question(question.x, Options(Causal()), question.grads)
    found = _call(wide, question.x, backend).o
    assert found.dtype == torch.float32
    assert error(found, bare.right[0]) < (1e-6 if backend == "torch" else torch.finfo(torch.bfloat16).eps / 2)
