"""What each of several processes does in `test_ring_gloo.py`. Every check returns, by quantity, an error and what it may be."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional

import tilewise as tw
from tilewise.ring import api
from tilewise.ring.meet import open_transport
from tilewise.ring.owners import zigzag
from tilewise.ring.program import Method

dist: Any = torch.distributed

Found = dict[str, tuple[float, float]]
"""By quantity: an error, and the most that it may be."""

LIMIT_S = 200
DEVICE = torch.device("cpu")
"""Where the tensors of this process are."""
EXACT, DEADLINE_S = 1e-12, 1.0
SILENT = "it sent nothing and took nothing until the deadline"
ROUNDED = 1.5
"""How many times the error of one device many may have."""


def run(world: int, job: str, folder: Path, *arguments: Any, kind: str = "cpu") -> list[Any]:
    """What each of `world` processes returned from `job`, or why it ended. `kind` of device: over Gloo on cpu, NCCL on cuda."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    jobs = [((rank, world), (kind, store.port), job, str(folder), arguments) for rank in range(world)]
    processes = [context.Process(target=_work, args=args) for args in jobs]
    for process in processes:
        process.start()
    until = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(until - time.monotonic(), 0))
    hung = [process.is_alive() for process in processes]
    for process in processes:
        process.kill()
    files = [folder / f"{rank}.pt" for rank in range(world)]
    return ["hung" if late else torch.load(file) if file.exists() else "died" for late, file in zip(hung, files, strict=True)]


def _work(place: tuple[int, int], meet: tuple[str, int], job: str, folder: str, arguments: tuple) -> None:
    global DEVICE
    (rank, world), (kind, port) = place, meet
    torch.set_num_threads(1)
    if kind == "cuda":
        DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(DEVICE)
    os.environ.pop("TRITON_INTERPRET", None)  # a CPU has no kernels here
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    try:
        found = getattr(sys.modules[__name__], job)(*arguments)
    except BaseException:
        found = traceback.format_exc()
    torch.save(found, f"{folder}/{rank}.tmp")
    os.replace(f"{folder}/{rank}.tmp", f"{folder}/{rank}.pt")
    os._exit(0)


@dataclass(frozen=True)
class Sizes:
    """A call of attention, as the whole sequence sees it."""

    n: int
    s: int | None = None
    mask: Any = None
    layout: str = "auto"
    dtype: torch.dtype = torch.float64
    b: int = 2
    h: int = 4
    g: int = 2
    sink: bool = False
    alibi: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    method: str = "auto"

    @property
    def layout_of_keys(self) -> str:
        return "contiguous" if self.layout == "replicated" else self.layout


def cases(world: int) -> dict[str, Sizes]:
    """Causal, window, documents, options, and lengths that do not divide."""
    causal = tw.Causal()
    documents = tw.Documents.from_lengths([5, 1, 13, 2, 10])
    extras: dict[str, Any] = {"softcap": 3.0, "scale": 0.3}
    return {
        "causal, grouped, zigzag": Sizes(8 * world + 3, mask=causal, h=6),
        "causal, contiguous, gathered": Sizes(23, mask=causal, layout="contiguous", method="gather"),
        "causal, striped, heads": Sizes(29, mask=causal, layout="striped", method="heads"),
        "window": Sizes(37, mask=tw.Window(left=5, right=0)),
        "documents": Sizes(31, mask=causal & documents),
        "nothing hidden, straight": Sizes(19, 17, method="direct"),
        "more keys, all options": Sizes(13, 29, causal, sink=True, alibi=True, options=extras),
        "more queries": Sizes(29, 11, causal, sink=True),
        "dropout": Sizes(21, mask=causal, options={"dropout": 0.3, "seed": 7}),
        "a table": Sizes(17, mask=tw.Where(torch.rand(17, 17, generator=torch.Generator().manual_seed(3)) < 0.6)),
        "fewer rows than ranks": Sizes(world - 1, mask=causal),
        "no rows": Sizes(0, 5, mask=causal),
        "bfloat16": Sizes(61, mask=causal, dtype=torch.bfloat16, h=4, g=1),
        "a decoding step": Sizes(3, 41, causal, "replicated", sink=True, options={"softcap": 9.0}),
        "float32": Sizes(47, mask=tw.Prefix(9), dtype=torch.float32),
    }


def attends(name: str, group: Any = None) -> Found:
    """A rank's rows of o, lse and all gradients against those of one device, in float64 and in the dtype of the case."""
    group = dist.group.WORLD if group is None else group
    case = cases(group.size())[name]
    wide, mine = _leaves(case, torch.float64), _leaves(case, case.dtype)
    q, k, v, *extras = mine
    layouts = (case.layout, case.layout_of_keys, case.layout_of_keys)
    sides = [
        api.shard(x, group, layout=layout, mask=case.mask).detach().requires_grad_()
        for x, layout in zip((q, k, v), layouts, strict=True)
    ]
    alibi, sink = extras
    o, lse = api.attention_with_lse(
        *sides, mesh=group, mask=case.mask, layout=case.layout, method=case.method, alibi=alibi, sink=sink, **case.options
    )
    exact, rough = (_whole(case, x) for x in (wide, mine))
    do, dlse = _upstream(exact[0], exact[1])
    part = _rows(case, group)
    given = [part(do.to(o.dtype), 1), part(dlse.to(lse.dtype), 2)]
    wanted = [*sides, *([sink] if sink is not None else [])]
    grads = torch.autograd.grad((o, lse), wanted, given)
    if sink is not None:
        total = grads[3].clone()
        dist.all_reduce(total, group=group)
        grads = (*grads[:3], total)
    names = ("o", "lse", "dq", "dk", "dv", "dsink")
    kv_part = _rows(case, group, keys=True)
    found: Found = {}
    for at, (what, x) in enumerate(zip(names, (o, lse, *grads), strict=False)):
        right, single = exact[2][at], rough[2][at]
        if what != "dsink":
            of_side, axis = kv_part if what in ("dk", "dv") else part, 2 if what == "lse" else 1
            right, single = of_side(right, axis), of_side(single, axis)
        error, alone = distance(x, right), distance(single, right)
        found[what] = error, max(ROUNDED * alone, EXACT)
    return found


def _rows(case: Sizes, group: Any, keys: bool = False) -> Callable[[Tensor, int], Tensor]:
    """Takes this rank's rows of a whole tensor."""
    length = (case.n if case.s is None else case.s) if keys else case.n
    layout = case.layout_of_keys if keys else case.layout
    index = api.positions(length, group, layout=layout, mask=case.mask, batch=case.b, device=DEVICE)
    return lambda t, axis: t.index_select(axis, index)


def _leaves(case: Sizes, dtype: torch.dtype) -> list[Any]:
    rng = torch.Generator().manual_seed(1)
    n, s = case.n, case.n if case.s is None else case.s
    shapes = (case.b, n, case.h, 16), (case.b, s, case.g, 16), (case.b, s, case.g, 8)
    q, k, v = (torch.randn(shape, generator=rng, dtype=torch.float64).to(case.dtype).to(DEVICE, dtype) for shape in shapes)
    alibi = torch.linspace(0.1, 0.4, case.h, dtype=dtype, device=DEVICE) if case.alibi else None
    sink = torch.linspace(-1, 1, case.h, dtype=dtype, device=DEVICE).requires_grad_() if case.sink else None
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), alibi, sink]


def _upstream(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(2)
    do, dlse = (torch.randn(x.shape, generator=rng, dtype=torch.float64) for x in (o, lse))
    return do.to(torch.bfloat16).to(DEVICE, torch.float64), dlse.to(torch.bfloat16).to(DEVICE, torch.float64)


def _whole(case: Sizes, leaves: list[Any]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o and lse on one device, and everything that is compared."""
    q, k, v, alibi, sink = leaves
    o, lse = tw.attention_with_lse(q, k, v, mask=case.mask, alibi=alibi, sink=sink, **case.options)
    do, dlse = _upstream(o, lse)
    wanted = [x for x in (q, k, v, sink) if x is not None]
    grads = torch.autograd.grad((o, lse), wanted, (do.to(o.dtype), dlse.to(lse.dtype)))
    return o, lse, [x.detach() for x in (o, lse, *grads)]


def distance(x: Tensor, right: Tensor) -> float:
    """Relative L2; infinite where shapes, infinities or NaN differ."""
    x, right = x.detach().double(), right.detach().double()
    finite = right.isfinite()
    if x.shape != right.shape or not torch.equal(x.isfinite(), finite) or not torch.equal(x[x.isinf()], right[right.isinf()]):
        return float("inf")
    norm = right[finite].norm()
    return float((x[finite] - right[finite]).norm() / (norm if norm > 0 else 1))


def checks(names: list[str]) -> dict[str, Any]:
    """Each named check on all ranks, one after the other: what it found, or how it failed."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = attends(name) if name in cases(dist.get_world_size()) else _check(name)()
        except BaseException:
            found[name] = traceback.format_exc()
    return found


def _check(name: str) -> Callable[[], Any]:
    import ring_guesses
    import ring_models

    return next(getattr(one, name) for one in (sys.modules[__name__], ring_models, ring_guesses) if hasattr(one, name))


def two_groups_at_once() -> Found:
    """Of four ranks {0, 2} make one call and {1, 3} another, in one order and then the other; with three, {0, 2} and {1}."""
    world, rank = dist.get_world_size(), dist.get_rank()
    members = [[r for r in range(world) if r % 2 == parity] for parity in (0, 1)]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = groups[rank % 2]
    found = {f"{name}: {what}": x for name in ("window", "dropout") for what, x in attends(name, mine).items()}
    everybody = {f"all: {what}": x for what, x in attends("causal, grouped, zigzag").items()}
    return found | everybody | {f"again: {what}": x for what, x in attends("documents", mine).items()}


def rows_move() -> Found:
    """`shard`, `unshard`, `positions` and `roll` against the whole, forward and back."""
    x, found = torch.arange(2 * 29 * 3, dtype=torch.float64).view(2, 29, 3) / 7, {}
    weight = torch.rand(2, 29, 3, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    every = weight.clone()
    dist.all_reduce(every)
    mask = tw.Causal() & tw.Documents.from_lengths([3, 20, 6])
    for layout in ("contiguous", "zigzag", "striped", "balanced"):
        mine = api.shard(x, layout=layout, mask=mask).requires_grad_()
        index = api.positions(29, layout=layout, mask=mask, batch=2)
        whole = api.unshard(mine, layout=layout, mask=mask)
        (back,) = torch.autograd.grad(whole, mine, weight)
        found[f"{layout}: unshard"] = distance(whole, x), 0.0
        found[f"{layout}: its gradient"] = distance(back, every[:, index]), EXACT
        for shift in (-1, 5):
            rolled = api.roll(mine, shift, layout=layout, mask=mask)
            found[f"{layout}: roll {shift}"] = distance(rolled, x.roll(shift, 1)[:, index]), 0.0
        labels = api.roll(mine[..., 0], -1, layout=layout, mask=mask, fill=-100)
        right = functional.pad(x[:, 1:, 0], (0, 1), value=-100)[:, index]
        found[f"{layout}: labels"] = distance(labels, right), 0.0
    return found


def distributed_tensors() -> Found:
    """DTensors in, DTensors out, with torch's own uneven parts and a mesh."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    case = cases(dist.get_world_size())["causal, contiguous, gathered"]
    leaves = _leaves(case, torch.float64)
    o, lse, right = _whole(case, leaves)
    do, dlse = _upstream(o, lse)
    q, k, v = (distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() for x in leaves[:3])
    mine = api.attention_with_lse(q, k, v, mask=case.mask)
    assert isinstance(mine.o, DTensor)
    assert (mine.o.shape, mine.lse.shape) == (o.shape, lse.shape)
    with pytest.raises(tw.OptionError, match="rows of a DTensor are contiguous, got zigzag"):
        api.attention(q, k, v, layout="zigzag")
    with pytest.raises(tw.OptionError, match="sink must be a tensor"):
        api.attention(q, k, v, sink=distribute_tensor(torch.zeros(case.h), mesh, [Replicate()]))
    assert mine.o.placements == (Shard(1),)
    grads = torch.autograd.grad(
        mine, (q, k, v), [distribute_tensor(do, mesh, [Shard(1)]), distribute_tensor(dlse, mesh, [Shard(2)])]
    )
    parts: list[Any] = [*mine, *grads]
    whole = [x.full_tensor() for x in parts]
    return {name: (distance(x, y), EXACT) for name, x, y in zip(("o", "lse", "dq", "dk", "dv"), whole, right, strict=True)}


def raised(make: Callable[[], Any]) -> str:
    """The error of a call, with its type."""
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def mismatches() -> dict[str, str]:
    """Calls in which the last rank asks for something else; after each of them the group still works."""
    last = dist.get_rank() == dist.get_world_size() - 1
    x = torch.randn(1, 5, 4, 8)
    y = x[:, :, :2] if last else x
    documents = [tw.Documents.from_lengths([3, 7]), tw.Documents.from_lengths([4, 6])]
    causal, unknown = tw.Causal(), dict[str, Any](head_mask=None)
    calls: dict[str, Callable[[], Any]] = {
        "heads": lambda: api.attention(y, y, y),
        "dtype": lambda: api.attention(*[x.double() if last else x] * 3),
        "mask": lambda: api.attention(x, x, x, mask=tw.Window(left=3) if last else causal),
        "array": lambda: api.attention(x, x, x, mask=documents[last], layout="contiguous"),
        "layout": lambda: api.attention(x, x, x, layout="striped" if last else "zigzag"),
        "method": lambda: api.attention(x, x, x, method="gather" if last else "ring"),
        "softcap": lambda: api.attention(x, x, x, softcap=30.0 if last else None),
        "gradients": lambda: api.attention(x.clone().requires_grad_(last), x, x),
        "rows": lambda: api.attention(*[x[:, :2] if last else x] * 3, mask=causal),
        "one is wrong": lambda: api.attention(x, x[..., :3] if last else x, x),
        "one backend": lambda: api.attention(x, x, x, backend="triton" if last else None),
        "queries": lambda: api.attention(x[:, :2] if last else x, x, x, layout="replicated"),
        "tree": lambda: api.attention(x, x, x, layout="replicated", method="ring"),
        "roll": lambda: api.roll(x, 2 if last else 1),
        "fill": lambda: api.roll(x, 1, fill=float("nan") if last else 3),
        "teams": lambda: api.attention(x, x, x, method=Method("ring", heads=2)),
        "owners": lambda: api.attention(x, x, x, layout=(zigzag(15, 2), zigzag(15, 2))),
        "one keyword": lambda: api.attention(x, x, x, **(unknown if last else {})),
        "one scale": lambda: api.attention(x, x, x, scale="x" if last else None),  # type: ignore[arg-type]
        "one list": lambda: api.attention([x] if last else x, x, x),  # type: ignore[arg-type]
        "one wire": lambda: api.attention(x, x, x, wire="bf16" if last else None),  # type: ignore[arg-type]
        "one shift": lambda: api.roll(x, 1.5 if last else 1),  # type: ignore[arg-type]
    }
    found = {name: raised(call) for name, call in calls.items()}
    found["after"] = raised(lambda: api.attention(x, x, x, mask=causal, layout="contiguous"))
    return found


def half_the_wire() -> Found:
    """Gradients of keys and values that travel as bfloat16 come home rounded; all else is as it was."""
    case, found = cases(dist.get_world_size())["causal, grouped, zigzag"], {}
    q, k, v = (api.shard(x, layout="zigzag").detach().requires_grad_() for x in _leaves(case, torch.float32)[:3])
    results = []
    for wire in (None, torch.bfloat16):
        o = api.attention(q, k, v, mask=case.mask, wire=wire)
        results.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v))])
    for name, x, y in zip(("o", "dq", "dk", "dv"), *results, strict=True):
        found[name] = distance(y, x), torch.finfo(torch.bfloat16).eps if name in ("dk", "dv") else 0.0
    found["dk changed"] = float(distance(results[1][2], results[0][2]) == 0), 0.0
    return found


def faults() -> dict[str, Any]:
    """Each on a group of its own: a silent rank, one that raises, one that dies in forward or backward. What everybody else
    raised, and how many seconds after the fault."""
    rank = dist.get_rank()
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(3)]
    return {
        "silent": _fault(groups[0], 1, 1, lambda: time.sleep(4), deadline_s=DEADLINE_S),
        "raises": _fault(groups[1], 2, 1, _divide),
        "dies": _fault(groups[2], 3, 1, lambda: os._exit(1), backward=True),
        "after": raised(lambda: api.attention(*[torch.randn(1, 2, 2, 8)] * 3, mesh=groups[2])) if rank != 3 else "",
    }


def faults_of_two() -> dict[str, Any]:
    """The same of two ranks: one is silent, one dies. On a device both are known at the deadline."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    x = torch.randn(1, 6, 4, 8, device=DEVICE).requires_grad_()
    for group in groups:  # what has to compile or meet does so before any deadline
        api.attention(x, x, x, mesh=group, mask=tw.Causal(), method="ring").sum().backward()
    silent = _fault(groups[0], 1, 0, lambda: time.sleep(8), deadline_s=2.0)
    dist.barrier()  # who was lost to one group comes late to the next
    return {"silent": silent, "dies": _fault(groups[1], 1, 0, lambda: os._exit(1), backward=True, deadline_s=2.0)}


def _divide() -> None:
    raise ZeroDivisionError("division by zero")


def _fault(
    group: Any, culprit: int, step: int, act: Callable[[], None], backward: bool = False,
    deadline_s: float | None = None,
) -> tuple[str, float, bool]:  # fmt: skip
    """Attention in which one rank acts at a step: the error, seconds since the fault, and whether a gradient was written."""
    transport: Any = open_transport(group, DEVICE)
    store = dist.distributed_c10d._get_default_store()
    post, when = transport.post, f"{group.group_name} fault"

    def acting(at: int, *rest: Any) -> Any:
        if at == step and (not backward or running):
            store.set(when, str(time.time()))
            act()
        return post(at, *rest)

    if group.rank() == culprit:
        transport.post = acting
    running = False
    x = torch.randn(1, 6, 4, 8, device=DEVICE).requires_grad_()
    error = None
    try:
        o = api.attention(x, x, x, mesh=group, mask=tw.Causal(), method="ring", deadline_s=deadline_s)
        running = True
        o.sum().backward()
    except Exception as found:
        error = found
    late = time.time() - float(store.get(when)) if store.check([when]) else float("nan")  # nan: it never came to the fault
    return f"{type(error).__name__}: {error}", late, x.grad is not None
