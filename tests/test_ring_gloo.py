"""Attention over 2, 3 and 4 processes that talk over Gloo: the same numbers as on one device, one error on all ranks where they
differ, and an end within seconds where one of them is lost. Processes are started once for each number of ranks."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ring_workers as workers
import torch

import tilewise as tw
from tilewise.ring.agree import SIZE, agree, pack, unpack

MORE = {
    2: ["their_names", "half_the_wire", "transformers_model"],
    3: ["two_groups_at_once", "rows_move", "distributed_tensors", "learns", "their_names", "guesses"],
    4: ["two_groups_at_once", "rows_move"],
}
"""What is checked beside all cases, by the number of ranks."""

SECONDS = 5.0
"""Within which a loss is known everywhere."""


@pytest.mark.parametrize("world", MORE)
def test_many_ranks_are_one_device(world, tmp_path):
    names = [*workers.cases(world), *MORE[world]]
    for rank, checks in enumerate(workers.run(world, "checks", tmp_path, names)):
        assert isinstance(checks, dict), f"rank {rank} {checks}"
        assert list(checks) == names
        for check, found in checks.items():
            assert isinstance(found, dict), f"rank {rank}, {check}: {found}"
            assert found
            wrong = {name: (error, limit) for name, (error, limit) in found.items() if not error <= limit}
            assert not wrong, f"rank {rank}, {check}"


ERRORS = {
    "heads": "ShapeError: axis h: rank 0 of the group has 4, rank 2 has 2",
    "dtype": "DtypeError: dtype: rank 0 of the group has float32, rank 2 has float64",
    "mask": "OptionError: mask: rank 0 of the group has causal(), rank 2 has window(3, None)",
    "layout": "OptionError: layout: rank 0 of the group has zigzag, rank 2 has striped",
    "method": "OptionError: method: rank 0 of the group has ring, rank 2 has gather",
    "softcap": "OptionError: softcap: rank 0 of the group has None, rank 2 has 30.0",
    "gradients": "OptionError: gradients: rank 0 of the group has False, rank 2 has True",
    "rows": "ShapeError: axis n: rank 0 holds 5 rows of q; of 12 rows over 3 ranks the zigzag layout gives it 4",
    "queries": "ShapeError: axis n: rank 0 holds 5 rows of q, rank 2 2; in the replicated layout every rank holds all of them",
    "tree": "OptionError: method ring+1: only a tree, and it always, takes queries that every rank holds",
    "roll": "OptionError: call: rank 0 of the group has roll by 1, rank 2 has roll by 2",
    "fill": "OptionError: fill: rank 0 of the group has 3.0, rank 2 has nan",
    "teams": "OptionError: method ring+1, heads over 2: 3 ranks do not form teams of 2",
    "owners": "OptionError: layout: owners of q share [7, 8] rows, the ranks hold [5, 5, 5]",
    "after": "nothing",
}

OF_ONE = {
    "one is wrong": "ShapeError: axis d: q (1, 5, 4, 8) has 8 but k (1, 5, 4, 3) has 3",
    "one keyword": "TypeError: attention() got an unexpected keyword argument 'head_mask'",
    "one scale": "DtypeError: scale must be a number, got str",
    "one list": "DtypeError: q must be a torch tensor, got list",
    "one wire": "OptionError: wire: gradients travel as they are kept (None) or as torch.bfloat16, got 'bf16'",
    "one shift": "DtypeError: roll: shift must be an integer, got float",
}
"""What only the last rank does wrong, and all are told."""


def test_ranks_that_differ_raise_one_error_everywhere_and_go_on(tmp_path):
    ranks = workers.run(3, "mismatches", tmp_path)
    for errors in ranks:
        assert isinstance(errors, dict), errors
        assert {name: errors[name] for name in ERRORS} == ERRORS
        assert errors["array"] == ranks[0]["array"]
        assert errors["array"].startswith("OptionError: mask: rank 0 of the group has documents(int64[10] ")
    *others, mine = ranks
    assert {name: mine[name] for name in OF_ONE} == OF_ONE
    assert mine["one backend"].startswith("Unsupported: backend 'triton' cannot run this")
    for errors in others:
        for name, error in OF_ONE.items():
            kind = error.split(":")[0].replace("TypeError", "RuntimeError")
            assert errors[name] == f"{kind}: rank 2: {error}"
        assert errors["one backend"] == f"RuntimeError: rank 2: {mine['one backend']}"


def test_a_lost_rank_is_named_by_all_others_within_seconds(tmp_path):
    *ranks, last = workers.run(4, "faults", tmp_path)
    assert last == "died"
    assert all(isinstance(x, dict) for x in ranks), ranks
    for rank, found in enumerate(ranks):
        (silent, when_silent, _), (raises, when_raised, _), (dies, when_dead, _) = (
            found[name] for name in ("silent", "raises", "dies")
        )
        # which step the others had come to by then is a matter of timing
        assert re.fullmatch(rf"PeerLost: rank 1 of the group was lost at step \d: {re.escape(workers.SILENT)}", silent)
        assert silent == ranks[0]["silent"][0]
        assert rank == 1 or when_silent < workers.DEADLINE_S + SECONDS
        division = "ZeroDivisionError: division by zero"
        said = division if rank == 2 else f"PeerLost: rank 2 of the group was lost at step 0: it raised {division}"
        assert raises == said
        assert when_raised < SECONDS
        assert re.match(r"PeerLost: rank 3 of the group was lost at step \d: its connection broke", dies)
        assert dies == ranks[0]["dies"][0]
        assert when_dead < SECONDS
        assert found["after"] == dies  # a group that lost a rank is of no more use, and says why
        assert not any(found[name][2] for name in ("silent", "raises", "dies")), "a gradient was written"


def test_a_lost_peer_survives_pickling():
    error = pickle.loads(pickle.dumps(tw.PeerLost(2, 5, "it died")))
    assert (error.rank, error.step, error.why, str(error)) == (
        2,
        5,
        "it died",
        "rank 2 of the group was lost at step 5: it died",
    )


def test_terms_that_do_not_fit_are_cut_and_still_differ():
    long = ["a" * 3000, "a" * 2999 + "b"]
    packed = [pack({"mask": text, "axis n": 7}) for text in long]
    assert [x.numel() for x in packed] == [SIZE, SIZE]
    assert unpack(packed[0])["axis n"] == 7
    assert unpack(packed[0])["mask"] != unpack(packed[1])["mask"]
    with pytest.raises(tw.OptionError, match="mask: rank 0"):
        agree({"mask": long[0], "axis n": 7}, lambda mine: [mine, packed[1]])


@pytest.mark.parametrize(
    "options, error",
    [
        ({"bias": torch.zeros(6, 6)}, "bias 'b h n s' has both rows and columns"),
        ({"ragged": tw.Ragged.from_lengths([6])}, "mask=Documents"),
        ({"positions": (tw.Positions(6), tw.Positions(6))}, "rows sit where the layout says"),
        ({"layout": "spiral"}, "layout must be auto, contiguous"),
        ({"layout": 5}, "layout must be a name or the Owners of q's and of k's rows, got 5"),
        ({"method": "spiral"}, "movement must be ring"),
        ({"alibi": torch.ones(2, requires_grad=True)}, "slopes get no gradient"),
        ({"wire": torch.int8}, "wire: gradients travel .* got torch.int8"),
        ({"wire": torch.float16}, "wire: gradients travel .* got torch.float16"),
        ({"dropout": 0.5, "seed": 2**70}, "seed must fit 64 bits"),
        ({"dropout": 1.5}, "dropout must lie in"),
    ],
)
def test_what_no_plan_can_do_is_refused(options, error):
    x = torch.randn(1, 6, 2, 8)
    with pytest.raises(tw.OptionError, match=error):
        tw.ring.attention(x, x, x, **options)


def test_what_is_unknown_is_refused_as_python_does():
    x = torch.randn(1, 6, 2, 8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'head_mask'"):
        tw.ring.attention(x, x, x, head_mask=None)
    with pytest.raises(tw.DtypeError, match="mesh must be a DeviceMesh"):
        tw.ring.attention(x, x, x, mesh=3)  # type: ignore[arg-type]

    with pytest.raises(tw.DtypeError, match="seed must be an integer, got float"):
        tw.ring.attention(x, x, x, dropout=0.5, seed=1.5)  # type: ignore[arg-type]


def test_numbers_of_other_libraries_are_numbers():
    x = torch.randn(1, 7, 2, 8)
    given: Any = {"scale": np.float32(0.5), "softcap": np.float64(3), "dropout": np.float32(0.3)}
    seeds: list[Any] = [np.int64(3), torch.tensor(3)]
    for seed in seeds:
        found = tw.ring.attention(x, x, x, **given, seed=seed)
        assert workers.distance(found, tw.attention(x, x, x, **given, seed=3)) < 1e-6


WRITTEN: dict[str, tuple[Callable[..., tw.Mask], Any, Any]] = {
    "table": (tw.Where, torch.eye(11).bool(), torch.ones(11, 11).tril().bool()),
    "documents": (tw.Documents, torch.tensor([0] * 5 + [1] * 6), torch.tensor([0] * 8 + [1] * 3)),
    "lengths": (tw.Lengths, torch.tensor([9]), torch.tensor([4])),
    "NumPy": (tw.Where, np.eye(11, dtype=bool), np.tri(11, dtype=bool)),
}


@pytest.mark.parametrize("make, before, after", WRITTEN.values(), ids=WRITTEN)
def test_an_array_that_is_written_into_is_a_new_mask_and_spoils_no_old_one(make, before, after):
    q, k, v = torch.randn(3, 1, 11, 2, 8, dtype=torch.float64)
    array = torch.from_numpy(before.copy()) if isinstance(before, np.ndarray) else before.clone()
    mask = make(array.numpy() if isinstance(before, np.ndarray) else array)

    def distance(mine: tw.Mask, content: Any) -> float:
        return workers.distance(tw.ring.attention(q, k, v, mask=mine), tw.attention(q, k, v, mask=make(content)))

    assert distance(mask, before) < workers.EXACT
    array.copy_(torch.as_tensor(after))
    assert distance(mask, after) < workers.EXACT
    assert distance(make(before), before) < workers.EXACT
    assert distance(make(after), after) < workers.EXACT


def test_backward_has_the_mask_of_forward():
    x = torch.randn(1, 11, 2, 8, dtype=torch.float64, requires_grad=True)
    table = torch.rand(11, 11) < 0.5
    right = torch.autograd.grad(tw.attention(x, x, x, mask=tw.Where(table.clone())).square().sum(), x)
    o = tw.ring.attention(x, x, x, mask=tw.Where(table))
    table.logical_not_()
    assert workers.distance(torch.autograd.grad(o.square().sum(), x)[0], right[0]) < workers.EXACT


def test_a_sink_of_nothing_has_no_gradient_where_nothing_is_seen():
    q, k, v = torch.randn(3, 1, 7, 2, 8, dtype=torch.float64)
    sink = torch.tensor([-torch.inf, 0.5], dtype=torch.float64, requires_grad=True)
    found = [
        torch.autograd.grad(attend(q, k[:, :4], v[:, :4], mask=tw.Causal(), sink=sink).square().sum(), sink)[0]
        for attend in (tw.ring.attention, tw.attention)
    ]
    assert found[0][0] == 0
    assert workers.distance(*found) < workers.EXACT


def test_a_wrong_number_is_found():
    """The measure that all checks here rest on."""
    right = torch.randn(5, 3, dtype=torch.float64)
    assert workers.distance(right, right) == 0
    assert workers.distance(right * (1 + 1e-9), right) > workers.EXACT
    assert workers.distance(right[:4], right) == float("inf")
    assert workers.distance(torch.where(right == right[0, 0], torch.nan, right), right) == float("inf")
