"""A plan with one thing wrong is found out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ring_plans import at, changed, find, pose, posts, with_posts

from tilewise.mask import Causal, Full, Tile
from tilewise.ring import owners
from tilewise.ring.program import (
    Add,
    Backward,
    Buffer,
    Copy,
    Finish,
    Forward,
    Heads,
    Make,
    Merge,
    Method,
    Plan,
    Post,
    Send,
    Wait,
)
from tilewise.ring.runs import Runs
from tilewise.ring.schedule import make_plan
from tilewise.ring.verify import check_messages, check_steps, count_flow, verify

SWEPT = (Method(), Method("double", node=2), Method("direct", at_once=2), Method("gather", groups=2, heads=2), Method(heads=4))


def whole(method: Method = Method(), backward: bool = False, world: int = 4) -> Plan:
    problem, made = pose(40, 40, Causal()), owners.zigzag(40, world)
    return make_plan(problem, made, made, method, backward)


def said(plan: Plan, words: str) -> bool:
    return any(words in line for line in verify(plan))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("method", SWEPT, ids=str)
def test_a_program_without_any_one_of_its_operations_is_found_out(method, backward):
    plan = whole(method, backward)
    for x, op in enumerate(plan.programs[1].ops):
        assert verify(changed(plan, 1, at(x))), op


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("method", SWEPT, ids=str)
def test_a_program_with_any_one_of_its_operations_twice_is_found_out(method, backward):
    plan = whole(method, backward)
    for x, op in enumerate(plan.programs[1].ops):
        if not isinstance(op, (Copy, Finish)):  # writing the same once more changes nothing
            assert verify(changed(plan, 1, at(x, op, op))), op


def test_a_swapped_hop_is_found_out():
    """Keys from one rank before come second and those from two before come first: every message still has two ends."""
    made = owners.contiguous(39, 3)
    plan = make_plan(pose(39, 39, Full()), made, made, Method("direct"))  # all messages are of one size
    first, second = ([posts(plan, r)[x][1] for r in range(3)] for x in (0, 1))

    def instead(post: Post, other: Post) -> Post:
        recvs = [mine._replace(peer=theirs.peer) for mine, theirs in zip(post.recvs, other.recvs, strict=True)]
        return post._replace(sends=other.sends, recvs=tuple(recvs))

    swapped = with_posts(plan, 0, lambda r, post: instead(first[r], second[r]))
    swapped = with_posts(swapped, 1, lambda r, post: instead(second[r], first[r]))
    assert check_steps(swapped) == check_messages(swapped) == []
    assert said(swapped, "does not hold the rows")


def test_a_lost_hop_is_found_out():
    plan = whole()
    for r in range(4):
        x, _ = find(plan, r, Merge, 1)
        plan = changed(plan, r, at(x))
    assert said(plan, "lacks visible keys") and said(plan, "in no result")


def test_a_doubled_hop_is_found_out():
    plan = whole()
    x, op = find(plan, 2, Merge)
    assert said(changed(plan, 2, at(x, op, op)), "more than once")


def test_keys_of_another_hop_are_found_out():
    plan = whole()
    x, op = find(plan, 2, Forward, 2)
    assert op.kv.buffer == "kv0"
    assert said(changed(plan, 2, at(x, op._replace(kv=op.kv._replace(buffer="kv1")))), "does not hold the rows")
    wrong = op.block._replace(kv=plan.kv.shards[2])
    assert verify(changed(plan, 2, at(x, op._replace(block=wrong))))


def test_gradients_sent_to_another_owner_are_found_out():
    """One rank further than home: every message still has two ends of one size."""
    made = owners.contiguous(40, 4)
    plan = make_plan(pose(40, 40, Full()), made, made, Method("direct"), backward=True)
    which = [x for x, (_, post) in enumerate(posts(plan, 0)) if post.channel == "home"][1]

    def turned(r: int, post: Post) -> Post:
        sends = [send._replace(peer=(send.peer + 1) % 4) for send in post.sends]
        recvs = [recv._replace(peer=(recv.peer - 1) % 4) for recv in post.recvs]
        return post._replace(sends=tuple(sends), recvs=tuple(recvs))

    wrong = with_posts(plan, which, turned)
    assert check_steps(wrong) == check_messages(wrong) == []
    assert said(wrong, "to other rows in 'dkv'") and said(wrong, "counts more than once visible queries")


def test_gradients_that_never_come_home_are_found_out():
    plan = whole(Method(), backward=True)
    x, op = find(plan, 1, Add, -1)
    assert op.into.buffer == "dkv"
    assert said(changed(plan, 1, at(x)), "lacks visible queries")
    assert said(changed(plan, 1, at(x, op, op)), "counts more than once visible queries")


def test_keys_that_are_not_there_yet_are_found_out():
    plan = whole()
    (x, wait), (y, op) = find(plan, 0, Wait), find(plan, 0, Forward, 1)
    early = changed(changed(plan, 0, at(y, op, wait)), 0, at(x))
    assert said(early, "is writing it")


def test_a_slot_overwritten_in_flight_is_found_out():
    plan = whole()
    x, post = posts(plan, 0)[1]
    recv = post.recvs[0]
    busy = recv._replace(view=recv.view._replace(buffer="kv1", rows=Runs.span(0, recv.view.rows.count)))
    assert said(changed(plan, 0, at(x, post._replace(recvs=(busy,)))), "while a message is being sent from it")


def test_a_cyclic_wait_is_found_out():
    """Each of two ranks wants what the other sends before it sends its own."""
    made = owners.contiguous(8, 2)
    plan = make_plan(pose(8, 8, Full()), made, made, Method("direct"))
    for r in range(2):
        (x, post), (y, _) = posts(plan, r)[0], find(plan, r, Wait)
        get, give = post._replace(step=5 + r, sends=()), post._replace(step=6 - r, recvs=())
        plan = changed(plan, r, at(y, Wait(give.step)))
        plan = changed(plan, r, at(x, get, Wait(get.step), give))
    assert said(plan, "waits for ever at Wait(step=5) for rank 1")
    assert said(plan, "waits for ever at Wait(step=6) for rank 0")


def test_a_wait_for_a_rank_that_has_ended_is_found_out():
    plan = whole(Method("direct"))
    x, post = posts(plan, 1)[2]
    y = next(y for y, op in enumerate(plan.programs[1].ops) if op == Wait(post.step))
    silent = changed(changed(plan, 1, at(y)), 1, at(x))
    assert said(silent, "waits for ever") and said(silent, "which has ended") and said(silent, "posts other steps")


def test_a_tile_of_the_wrong_kind_is_found_out():
    plan = whole()
    x, op = find(plan, 0, Forward)
    assert said(changed(plan, 0, at(x, op._replace(block=op.block._replace(kind=Tile.FULL)))), "FULL that is PARTIAL")


def test_a_tile_that_shows_nothing_is_found_out():
    plan = whole()
    x, op = find(plan, 0, Forward)
    hidden = op.block._replace(q=Runs.span(0, 2), kv=Runs.span(36, 38))
    assert said(changed(plan, 0, at(x, op._replace(block=hidden))), "EMPTY")


def test_heads_finished_as_others_are_found_out():
    plan = whole(Method(heads=2))
    x, op = find(plan, 1, Finish)
    assert said(changed(plan, 1, at(x, op._replace(heads=Heads(0, 3)))), "finishes")


def test_messages_of_different_sizes_are_found_out():
    plan = whole()
    x, post = posts(plan, 0)[0]
    short = post.sends[0]._replace(view=post.sends[0].view._replace(rows=Runs.span(0, 1)))
    assert said(changed(plan, 0, at(x, post._replace(sends=(short,)))), "which receives")


def test_memory_and_bytes_beyond_the_formula_are_found_out():
    plan = whole()
    x, op = find(plan, 0, Make)
    larger = Make(Buffer(op.buffer.name, op.buffer.kind, op.buffer.rows + 1, op.buffer.heads))
    assert said(changed(plan, 0, at(x, larger)), "where the formula says")
    careless = replace(plan, wire={"kv": 8})
    assert verify(careless) == []  # the wire is part of the plan
    assert count_flow(careless).sum() == 2 * count_flow(plan).sum()


def test_too_many_messages_and_messages_to_oneself_are_found_out():
    plan = whole()
    x, post = posts(plan, 0)[0]
    crowd = changed(plan, 0, at(x, post._replace(sends=post.sends * 300)))
    assert any("more than 256" in line for line in check_steps(crowd))
    own = changed(plan, 0, at(x, post._replace(sends=(Send(0, post.sends[0].view),))))
    assert any("to itself" in line for line in check_steps(own))


def test_local_results_of_backward_need_all_their_inputs():
    plan = whole(backward=True)
    x, op = find(plan, 0, Backward, 1)
    assert said(changed(plan, 0, at(x, op._replace(stats=op.q))), "does not fit 'stats'")
