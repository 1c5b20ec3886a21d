"""Forecasts: equal to what the plan's own operations come to, to closed forms on tiny cases, and to claims for large ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ring_plans import LAYOUTS, at, changed, find, methods, pose, posts, shuffled
from test_ring_plan import plans

from tilewise import OptionError
from tilewise.mask import Causal, Documents, Full, Where, Window
from tilewise.problem import Inputs, Options, Problem
from tilewise.ring import owners
from tilewise.ring.choose import ALIKE, choose, layouts, method_named, sides_named
from tilewise.ring.links import H200, Cluster, Host, Link, Rates, machine_named
from tilewise.ring.prices import Prices
from tilewise.ring.program import BATCH, Forward, Method, Plan
from tilewise.ring.schedule import make_plan
from tilewise.ring.script import split
from tilewise.ring.sight import area, look
from tilewise.ring.simulate import Forecast, simulate
from tilewise.ring.survey import survey
from tilewise.ring.teams import Teams
from tilewise.ring.verify import count_peak

IDEAL = Rates(((1, 1e9), (512, 1e9)), edge=0, torn_edge=0)
TOY = replace(H200, name="toy", forward=IDEAL, backward=IDEAL, processors=1, hbm_bytes_s=1e30, launch_s=0.0,
              near=Link(1e-3, 1e6), far=Link(2e-3, 5e5), host=Host(0.0, 0.0, 0.0, 0.0))  # fmt: skip


def big(ranks: int, rows: int, mask=None, **sizes: int) -> Problem:
    """A bfloat16-sized problem of `rows` rows a rank, 64 query heads on 8 key heads of 128."""
    n, h, g, d = ranks * rows, sizes.get("h", 64), sizes.get("g", 8), sizes.get("d", 128)
    q, k = (np.broadcast_to(np.float16(0), (1, n, x, d)) for x in (h, g))
    return Problem.describe(Inputs(q, k, k), Options(mask))


def foretell(problem: Problem, made: owners.Owners, method: Method, cluster: Cluster, backward: bool = False) -> Forecast:
    return simulate(Plan(problem, made, made, method, backward), cluster)


def differences(plan: Plan, node: int = 2) -> list[str]:
    """In what the forecast from areas and needs is not what the plan's operations come to. Where heads differ, an operation's
    area is a rounded mean over them: hence 1e-4."""
    cluster = Cluster(node=node)
    told, told_by_ops = simulate(replace(plan, programs=()), cluster), simulate(plan, cluster)
    pairs = [
        ("time", told.total_s, told_by_ops.total_s),
        ("work", told.busy_s, told_by_ops.busy_s),
        ("waiting", told.waited_s + 1, told_by_ops.waited_s + 1),
        ("bytes", told.sent_bytes, told_by_ops.sent_bytes),
        ("far bytes", told.far_bytes, told_by_ops.far_bytes),
        ("steps", [x[:1] + x[2:4] for x in told.steps], [x[:1] + x[2:4] for x in told_by_ops.steps]),
        ("memory", told.memory, count_peak(plan)),
    ]
    return [name for name, a, b in pairs if np.shape(a) != np.shape(b) or not np.allclose(a, b, rtol=1e-4, atol=0)]


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(plans(), st.sampled_from([1, 2, 4]))
def test_a_forecast_is_what_the_plans_operations_come_to(plan, node):
    assert differences(plan, node) == []


def test_a_forecast_sees_that_a_plan_is_another():
    problem, made = pose(24, 24, Causal()), owners.zigzag(24, 3)
    plan = make_plan(problem, made, made, Method())
    assert differences(plan) == []
    where, op = find(plan, 1, Forward)
    assert "work" in differences(changed(plan, 1, at(where, op, op)))
    where, post = posts(plan, 0)[0]
    lost = changed(plan, 0, at(where, post._replace(sends=())))
    assert {"bytes", "steps"} <= set(differences(lost))
    assert "memory" in differences(replace(plan, method=Method("gather"), programs=plan.programs))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_a_survey_is_what_sight_says_pair_by_pair(plan):
    teams = Teams(plan.problem, plan.q, plan.kv, plan.method)
    found = survey(teams)
    for t, rows in enumerate(teams.q_rows):
        for o, keys in enumerate(teams.kv_rows):
            box = look(plan.problem, rows, keys)
            seen = area(plan.problem, rows, keys) if rows.count and keys.count and plan.problem.b else 0
            assert int(found.pairs[t, o] + 1e-9) == seen
            assert (found.first[t, o], found.past[t, o]) == ((0, 0) if box is None else box.q)
            assert found.needs[t, o] == teams.needs[t][o].count


@given(st.integers(2, 9), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=900))
def test_messages_are_split_into_steps_that_no_rank_finds_too_large(world, pairs):
    kept = [(a % world, b % world) for a, b in pairs if a % world != b % world]
    source, target = np.array(kept, np.int64).reshape(-1, 2).T
    steps = split(source, target, world)
    assert sorted(np.concatenate([[], *steps]).tolist()) == list(range(len(kept)))
    distances = [(target[step] - source[step]) % world for step in steps]
    for step, found in zip(steps, distances, strict=True):
        assert np.bincount(np.r_[source[step], target[step]]).max() <= BATCH or len({*found}) == 1
    for distance in range(1, world):
        assert sum(distance in found for found in distances) <= 1


# by hand: two ranks, ten rows each, one head of 5 and 3, 1e9 operations a second, 1e6 bytes a second


def test_two_ranks_by_hand():
    problem = pose(20, 20, Full(), h=1, g=1)
    made = owners.contiguous(20, 2)
    block, hop = 10 * 10 * 2 * 8 / 1e9, 1e-3 + 10 * 8 * 4 / 1e6
    slow = foretell(problem, made, Method(), Cluster(TOY))
    assert slow.total_s == pytest.approx(hop + block) and slow.waited_s == pytest.approx([hop - block] * 2)
    assert slow.alone_s == pytest.approx(4 * block) and slow.efficiency == pytest.approx(4 * block / 2 / (hop + block))
    fast = foretell(problem, made, Method(), Cluster(replace(TOY, near=Link(0.0, 1e12))))
    assert fast.total_s == pytest.approx(2 * block) and fast.efficiency == pytest.approx(1)
    far = foretell(problem, made, Method(), Cluster(TOY, node=1))
    assert far.total_s == pytest.approx(2e-3 + 10 * 8 * 4 / 5e5 + block)
    assert far.far_bytes.tolist() == slow.sent_bytes.tolist() == [320, 320] and slow.far_bytes.tolist() == [0, 0]
    back = foretell(problem, made, Method(), Cluster(TOY), backward=True)
    pairs = 10 * 10 * 2 * (3 * 5 + 2 * 3) / 1e9
    assert back.total_s == pytest.approx(hop + pairs + hop)  # float32 gradients go home after the last block


def test_a_device_waits_for_its_host():
    """Packing, two blocks, of which the second merges, and the end are issued one by one; the message waits for the agreement.
    Calls cannot follow each other faster than the host issues them, though it begins early."""
    problem, made = pose(20, 20, Full(), h=1, g=1), owners.contiguous(20, 2)
    block, hop = 10 * 10 * 2 * 8 / 1e9, 1e-3 + 10 * 8 * 4 / 1e6
    for agree_s, waited in ((5e-3, 5e-3 + hop - 5.5e-3 - block), (0, 0)):
        host = Host(call_s=1e-3, agree_s=agree_s, work_s=2e-3, post_s=5e-4)
        told = foretell(problem, made, Method(), Cluster(replace(TOY, host=host)))
        assert told.total_s == pytest.approx(1e-3 + 5e-4 + 4 * 2e-3)
        assert told.waited_s == pytest.approx([waited] * 2)
        assert told.idle_s == pytest.approx([told.total_s - 2 * block - waited] * 2)
        assert told.losses["the host"] == pytest.approx(told.idle_s[0] / told.total_s)


def test_a_host_that_hears_early_begins_the_next_call_early():
    """Where own keys come last, the device works on when the last message has come; a gathering one is done with it."""
    host = Host(call_s=1e-3, agree_s=0, work_s=1e-6, post_s=1e-6)
    problem, made = pose(2000, 2000, Full(), h=1, g=1), owners.contiguous(2000, 2)
    machine = replace(TOY, host=host, near=Link(0.0, 1e12))
    ring, gathered = (foretell(problem, made, Method(x), Cluster(machine), backward=True) for x in ("ring", "gather"))
    assert ring.idle_s.max() == 0 and gathered.idle_s.min() > 0.9e-3


def test_two_devices_do_not_divide_their_messages():
    """Each costs the host more than it hides."""
    for rows in (8192, 32768):
        for backward in (False, True):
            choice = choose(big(2, rows, Causal(), h=32, g=4), 2, backward=backward, layout="zigzag")
            assert choice.method in (Method("direct", at_once=1), Method("gather")), (rows, backward)


def test_shared_cards_carry_twice_as_much():
    problem, made = pose(40, 40, Full(), h=1, g=1), owners.contiguous(40, 4)
    one, two = (foretell(problem, made, Method("direct", at_once=3), Cluster(TOY, 2, share)) for share in (1, 2))
    block, rows = 10 * 10 * 2 * 8 / 1e9, 10 * 8 * 4
    assert one.total_s == pytest.approx(2e-3 + 2 * rows / 5e5 + 3 * block)  # two messages leave and enter each card
    assert two.total_s == pytest.approx(2e-3 + 4 * rows / 5e5 + 3 * block)


def test_a_chain_waits_for_its_slowest_link():
    """Only one pair of ranks is far apart, but every hop of a ring waits for it; a double ring prefetches over it."""
    problem, made = pose(160, 160, Full(), h=1, g=1), owners.contiguous(160, 4)
    near = foretell(problem, made, Method(), Cluster(TOY, 4))
    ring = foretell(problem, made, Method(), Cluster(TOY, 2))
    hop, far = 1e-3 + 40 * 8 * 4 / 1e6, 2e-3 + 40 * 8 * 4 / 5e5
    block = 40 * 40 * 2 * 8 / 1e9
    assert near.total_s == pytest.approx(3 * hop + block)
    assert ring.total_s == pytest.approx(3 * far + block)
    double = foretell(problem, made, Method("double", node=2), Cluster(TOY, 2))
    assert double.total_s == pytest.approx(far + hop + block)


@settings(max_examples=40)
@given(st.data(), st.integers(2, 8), st.booleans())
def test_slower_links_never_help(data, world, backward):
    problem = pose(48, 48, data.draw(st.sampled_from([Full(), Causal(), Window(7)])))
    made = data.draw(st.sampled_from([f(48, world) for f in LAYOUTS.values()] + [shuffled(48, world, 3)]))
    plan = Plan(problem, made, made, data.draw(methods(world)), backward)
    slow = replace(TOY, near=Link(2e-3, 5e5), far=Link(4e-3, 1e5))
    a, b = simulate(plan, Cluster(TOY, 2)), simulate(plan, Cluster(slow, 2))
    assert a.total_s <= b.total_s * (1 + 1e-9)
    assert a.total_s >= a.busy_s.max() * (1 - 1e-9)
    assert sum(a.losses.values()) + a.efficiency == pytest.approx(1)
    np.testing.assert_allclose(a.busy_s + a.waited_s + a.idle_s, [a.total_s] * world, atol=a.total_s)


def test_prices_are_the_roofline():
    plan = Plan(big(8, 8192), owners.zigzag(65536, 8), owners.zigzag(65536, 8), Method(), False)
    prices = Prices(plan, H200)
    operations = 8192 * (8192 + 50) * 64 * 4 * 128
    assert prices.attend(8192, 8192 * 8192, 64, True) == pytest.approx(5e-6 + operations / 730e12)
    assert prices.attend(0, 0, 64, False) == 0
    one = prices.attend(1, 131072, 64, False)  # a decoding step reads its keys once
    assert one == pytest.approx(5e-6 + 131072 * 8 * 256 * 2 / 4.3e12, rel=1e-3)
    assert prices.combine("part", 8192, 64) == pytest.approx(5e-6 + 3 * 8192 * 64 * 129 * 4 / 4.3e12)
    assert prices.onto("part", 8192, 64) == pytest.approx(8192 * 64 * 129 * 4 / 4.3e12)
    assert prices.onto("dq", 8192, 64) == prices.combine("dq", 8192, 64)


# claims


def test_a_thousand_devices_are_used_to_ninety_percent():
    problem, made = big(1024, 16384, Causal()), owners.zigzag(1024 * 16384, 1024)
    method = Method("double", node=8)
    found = survey(Teams(problem, made, made, method))
    for backward in (False, True):
        told = simulate(Plan(problem, made, made, method, backward), Cluster(H200, node=8), found)
        assert told.efficiency > 0.9, backward
        assert (told.work.min(1) == told.work.max(1)).all() and told.balance == 1
        assert len(told.work) == 1024 and told.work.sum() == 64 * problem.n * (problem.n + 1) // 2


def test_zigzag_is_exactly_balanced_for_causal():
    choice = choose(big(8, 8192, Causal()), 8)
    assert choice.layout == "zigzag" and choice.best.forward.balance == 1
    assert (choice.best.forward.work.min(1) == choice.best.forward.work.max(1)).all()
    assert any("contiguous" in line for line in choice.skipped)
    made = owners.contiguous(65536, 8)
    assert foretell(choice.problem, made, Method(), Cluster()).balance > 1.8


def test_a_window_is_contiguous_with_a_halo():
    choice = choose(big(8, 8192, Causal() & Window(1023)), 8)
    assert choice.layout == "contiguous" and choice.best.reach == 1 and "halo" in choice.why
    assert choice.method.movement in ("direct", "gather") and choice.method.heads == 1
    assert choice.best.forward.sent_bytes[0] == 1023 * 8 * 256 * 2
    wide = choose(big(8, 1024, Causal() & Window(2047)), 8, backward=False)
    assert wide.best.reach == 2 or wide.method.heads > 1


def test_documents_are_balanced_within_ten_percent():
    rng = np.random.default_rng(5)
    lengths = np.minimum(rng.lognormal(6.5, 1.3, 400).astype(int) + 16, 20000)
    lengths = lengths[np.cumsum(lengths) <= 65536]
    lengths = [*lengths.tolist(), 65536 - int(lengths.sum())]
    choice = choose(big(8, 8192, Causal() & Documents.from_lengths(lengths)), 8)
    assert choice.layout == "balanced" and choice.best.forward.balance < 1.1


def test_heads_are_exchanged_where_there_are_enough():
    tried = choose(big(8, 1024, Causal()), 8).candidates
    assert any(x.method.heads == 8 for x in tried)
    assert not any(x.method.heads > 1 for x in choose(big(8, 1024, Causal(), h=1, g=1), 8).candidates)
    many = choose(big(16, 4096, Causal(), g=64), 16, Cluster(node=8))
    assert many.method.heads == 8  # keys of 64 heads are too many for the cards


def test_few_queries_stay_where_they_are():
    q, k = (np.broadcast_to(np.float16(0), (4, n, h, 128)) for n, h in ((1, 64), (65536, 8)))
    choice = choose(Problem.describe(Inputs(q, k, k), Options(Causal())), 8, backward=False)
    assert choice.method == Method("tree") and choice.q.replicated


def test_a_mask_of_points_is_dealt_out_by_area():
    problem = pose(64, 64, Where(lambda b, h, i, j: (i < 16) & (j < 16) | (j == i)))
    found = layouts(problem, 4)
    assert next(iter(found)) == "balanced"
    assert foretell(problem, found["balanced"][0], Method(), Cluster()).balance < 1.1


def test_memory_is_a_limit():
    problem = big(8, 8192, Causal())
    free = choose(problem, 8)
    tight = choose(problem, 8, memory=free.best.memory - 1)
    assert tight.best.memory < free.best.memory and free.method in [x.method for x in tight.refused]
    assert "but needs" in str(tight)
    with pytest.raises(OptionError, match="no method fits"):
        choose(problem, 8, memory=1)


def test_a_choice_says_why():
    choice = choose(big(8, 2048, Causal()), 8)
    text = str(choice)
    assert choice.why in text and "what binds" in choice.why and "exactly equal" in choice.why
    for x in choice.candidates:
        assert str(x.method) in text and f"{1e3 * x.total_s:.3f} ms" in text
    assert choice.best.total_s <= ALIKE * min(x.total_s for x in choice.candidates)


@settings(max_examples=30)
@given(st.integers(1, 12).flatmap(methods))
def test_a_method_is_read_as_it_prints(method):
    assert str(method_named(str(method))) == str(method)


def test_what_makes_no_sense_is_refused():
    for text in ("ring+2", "ring by 2", "spiral", "direct by 0", ""):
        with pytest.raises(OptionError, match="method"):
            method_named(text)
    with pytest.raises(OptionError, match="layout must be"):
        sides_named("spiral", pose(8, 8), 2)
    with pytest.raises(OptionError, match="machine must be one of"):
        machine_named("abacus")
    with pytest.raises(OptionError, match="cards"):
        Cluster(node=8, share=3)
    with pytest.raises(OptionError, match="latency"):
        Link(0, 0)
