"""Virtual ranks: the order of events makes no difference, a fault ends every rank that it concerns, and a plan or a kernel with
one thing wrong is found out by its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from ring_plans import NAMES, Question, at, changed, exact, find, posts, with_posts

from tilewise._errors import PeerLost
from tilewise.dropout import Dropout
from tilewise.mask import Causal, Full, Mask
from tilewise.problem import Options, Partial
from tilewise.ring import kernel as kernel_module
from tilewise.ring import local, owners
from tilewise.ring.execute import Memory, forward_given, run
from tilewise.ring.kernel import Kernel
from tilewise.ring.local import LocalTransport
from tilewise.ring.program import Add, Backward, Forward, Make, Merge, Method, Op, Plan, Post
from tilewise.ring.schedule import make_plan

LENGTH = 37


@cache
def asked(mask: Mask) -> Question:
    return Question.ask(LENGTH, LENGTH, Options(mask))


# ---- the order of events makes no difference


LAST = Method("gather", groups=2, heads=2)
INTERLEAVED = Method(direction=-1), Method("double", node=2), Method("direct", at_once=3), Method("gather", groups=3), LAST


@pytest.mark.parametrize("method", INTERLEAVED, ids=str)
def test_any_interleaving_gives_the_same_bits(method):
    question = Question.ask(29, 29, Options(Causal(), dropout=Dropout(0.2, 5)), dtype=torch.float32)
    made = owners.zigzag(29, 4)
    plans, kernel = question.plans(made, made, method), question.kernel()
    first = question.answer(plans, kernel)
    assert all(torch.equal(a, b) for a, b in zip(first, question.answer(plans, kernel), strict=True))
    for seed in range(3):
        again = question.answer(plans, kernel, lambda seed=seed: LocalTransport(4, seed=seed, delay=10 * seed))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), seed


def test_what_is_written_while_it_is_sent_is_found_out():
    """The first slot is overwritten before anybody has waited for the message that leaves it."""
    question = asked(Full())
    made = owners.contiguous(LENGTH, 4)
    forward, backward = question.plans(made, made, Method())
    (x, _), (y, later) = posts(forward, 1)[1:3]

    def early(old: list[Op]) -> list[Op]:
        return [*old[: x + 1], later, *old[x + 1 : y], *old[y + 1 :]]

    found = question.errors(question.answer((changed(forward, 1, early), backward), None, lambda: LocalTransport(4, 3, 9)))
    assert found["o"] > 1e-3


# ---- faults


def drive(plan: Plan, question: Question, transport: LocalTransport) -> list[local.Outcome]:
    kernel, x = question.kernel(), question.x
    parts = zip(*(local.shards(o, t) for o, t in ((plan.q, x.q), (plan.kv, x.k), (plan.kv, x.v))), strict=True)
    given = [forward_given(plan, r, *part) for r, part in enumerate(parts)]
    return transport.run([run(plan, r, given[r], kernel, partial(transport.post, r)) for r in range(plan.world)])


@pytest.mark.parametrize("method", [Method(), Method("direct"), Method("gather", heads=2), Method(heads=4)], ids=str)
def test_a_rank_that_dies_is_named_by_all_others(method):
    question = asked(Full())
    made = owners.zigzag(LENGTH, 4)
    plan = make_plan(question.problem, made, made, method)
    steps = max(op.step for op in plan.programs[0].ops if isinstance(op, Post)) + 1
    for seed, step in enumerate(range(steps)):
        found = drive(plan, question, LocalTransport(4, seed, 3, killed={2: step}))
        assert found[2] is None
        for r in (0, 1, 3):
            lost = found[r]
            if isinstance(lost, PeerLost):
                assert lost.rank == 2 and lost.step >= step and "rank 2" in str(lost)
        # whoever has results had all that they needed of rank 2 before it died
        assert any(isinstance(x, PeerLost) for x in found)
        right = [x["out"] for x in drive(plan, question, LocalTransport(4)) if isinstance(x, dict)]
        assert all(torch.equal(x["out"], right[r]) for r, x in enumerate(found) if isinstance(x, dict))


def test_a_lost_message_ends_every_rank_that_waits_for_it():
    question = asked(Full())
    made = owners.contiguous(LENGTH, 4)
    plans = question.plans(made, made, Method())
    with pytest.raises(PeerLost, match="never arrived"):
        question.answer(plans, None, lambda: LocalTransport(4, lost={(1, 2, 3)}))
    found = drive(plans[0], question, LocalTransport(4, lost={(1, 2, 3)}))
    assert isinstance(found[3], PeerLost) and (found[3].rank, found[3].step) == (2, 1)


def test_what_is_given_is_not_written():
    question = asked(Causal())
    made = owners.zigzag(LENGTH, 4)
    for method in INTERLEAVED:
        before = question.x.map(torch.clone)
        question.answer(question.plans(made, made, method))
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before.present(), question.x.present(), strict=True))


# ---- a plan, or a kernel, with one thing wrong


def ring() -> tuple[Question, tuple[Plan, Plan]]:
    question = Question.ask(40, 40, size=(4, 4))
    made = owners.contiguous(40, 4)
    return question, question.plans(made, made, Method())


def swapped(plan: Plan, kind: type) -> Plan:
    """At the second hop every rank's keys go back to where they came from."""
    which = [x for x, (_, post) in enumerate(posts(plan, 0)) if post.channel == "keys"][1]

    def turned(r: int, post: Post) -> Post:
        sends, recvs = (tuple(x._replace(peer=(2 * r - x.peer) % 4) for x in ends) for ends in (post.sends, post.recvs))
        return post._replace(sends=sends, recvs=recvs)

    return with_posts(plan, which, turned)


def doubled(plan: Plan, kind: type) -> Plan:
    """Rank 1 counts what it computed at its second hop twice."""
    x, op = find(plan, 1, kind)
    return changed(plan, 1, at(x, op, plan.programs[1].ops[x - 1], op))


def lost(plan: Plan, kind: type) -> Plan:
    """Rank 1 does not count what it computed at its second hop."""
    return changed(plan, 1, at(find(plan, 1, kind)[0]))


BREAKS = {
    "a swapped hop": (lambda plan: swapped(plan, Forward), lambda plan: swapped(plan, Backward)),
    "a doubled hop": (lambda plan: doubled(plan, Merge), lambda plan: doubled(plan, Add)),
    "a lost hop": (lambda plan: lost(plan, Merge), lambda plan: lost(plan, Add)),
}


def off(errors: dict[str, float], names: tuple[str, ...]) -> bool:
    """Wrong by far more than the budget, and by a number."""
    return any(1e-3 < errors[name] < float("inf") for name in names)


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("backward", [False, True])
def test_a_broken_plan_gives_wrong_numbers(name, backward):
    question, plans = ring()
    assert exact(question.errors(question.answer(plans)))
    broken = list(plans)
    broken[backward] = BREAKS[name][backward](plans[backward])
    errors = question.errors(question.answer((broken[0], broken[1])))
    assert off(errors, NAMES[2:] if backward else NAMES[:2]), errors


def test_every_sum_of_a_backward_plan_counts():
    question, plans = ring()
    sums = [x for x, op in enumerate(plans[1].programs[2].ops) if isinstance(op, Add)]
    assert len(sums) == 7  # of dq at three hops, and of dk, dv that three ranks send home beside its own
    for x in sums:
        assert off(question.errors(question.answer((plans[0], changed(plans[1], 2, at(x))))), NAMES[2:]), x


@dataclass(frozen=True, eq=False)
class Exchanged(Kernel):
    """Takes dk for dv."""

    def backward(self, block, qkv, do, lse, total, nothing):
        dq, dk, dv = super().backward(block, qkv, do, lse, total, nothing)
        return dq, dv, dk


@dataclass(frozen=True, eq=False)
class Local(Kernel):
    """Takes the lse of a block for that of whole rows."""

    def backward(self, block, qkv, do, lse, total, nothing):
        return super().backward(block, qkv, do, self.forward(block, *qkv).lse, total, nothing)


@dataclass(frozen=True, eq=False)
class Twice(Kernel):
    """Takes delta for 2·delta."""

    def backward(self, block, qkv, do, lse, total, nothing):
        return super().backward(block, qkv, do, lse, 2 * total, nothing)


@dataclass(frozen=True, eq=False)
class Zero(Kernel):
    """Says that every lse is 0: a merge is then a plain average."""

    def forward(self, block, q, k, v):
        found = super().forward(block, q, k, v)
        return Partial(found.o, torch.zeros_like(found.lse))


WRONG = [(Exchanged, ("dk", "dv")), (Local, NAMES[2:]), (Twice, ("dq", "dk")), (Zero, ("o",))]


@pytest.mark.parametrize("kernel, names", WRONG)
def test_a_broken_kernel_gives_wrong_numbers(kernel, names):
    question, plans = ring()
    errors = question.errors(question.answer(plans, kernel(question.problem)))
    assert all(errors[name] > 1e-3 for name in names), errors


def test_a_partial_result_that_is_merged_at_once_needs_no_memory(monkeypatch):
    question, plans = ring()
    assert all("part" in {op.buffer.name for op in plan.programs[1].ops if isinstance(op, Make)} for plan in plans)
    looked_for: list[str] = []
    right = Memory.planes
    monkeypatch.setattr(Memory, "planes", lambda memory, name: looked_for.append(name) or right(memory, name))
    question.answer(plans)
    assert "acc" in looked_for and "dq" in looked_for and "part" not in looked_for


@pytest.mark.parametrize("method", [Method(), Method("direct"), Method("ring", heads=2)], ids=str)
def test_a_kernel_that_merges_on_the_way_gives_the_same(method, monkeypatch):
    """As a backend does that makes a new part of an old one and a block, in its final dtype where nothing follows."""
    wide: list[bool] = []

    def onto(plan, x, before):
        part = kernel_module.launch(plan, x)
        both = kernel_module.merge(before, part._replace(o=part.o.to(before.o.dtype)))
        wide.append(plan.problem.wide)
        for x_before in before:
            x_before.fill_(torch.nan)  # nobody looks at it again
        return both if plan.problem.wide else both._replace(o=both.o.to(x.q.dtype))

    monkeypatch.setattr(kernel_module, "launch_onto", onto)
    question = Question.ask(LENGTH, LENGTH, Options(Causal()), dtype=torch.bfloat16)
    made = owners.zigzag(LENGTH, 4)
    errors = question.errors(question.answer(question.plans(made, made, method), question.kernel()))
    assert max(errors.values()) < 2 * torch.finfo(torch.bfloat16).eps, errors
    assert wide.count(True) and (wide.count(False) or method.heads > 1)
