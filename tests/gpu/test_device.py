"""What a GPU adds: memory that was used before, graphs, streams, a second device, and more than 2³¹ elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import testing
from tilewise._errors import Unsupported
from tilewise.cases import Case
from tilewise.dropout import Dropout
from tilewise.problem import Inputs, Options, Partial
from tilewise.testing import Answer, Result

GIB = 2**30
PACKED = tw.Ragged.from_offsets([0, 144, 144, 432, 900])

CASES = (
    Case("causal, grouped", 2, 515, 515, 6, 2, 64, 64, Options(tw.Causal())),
    Case("rows hidden, sink", 1, 515, 261, 4, 2, 72, 40, Options(tw.Causal()), sink=True),
    Case("window, bias, alibi", 2, 261, 515, 4, 4, 64, 64, Options(tw.Causal() & tw.Window(99)), bias="1 h n s", alibi="h"),
    Case("softcap, dropout", 2, 261, 261, 4, 2, 128, 128, Options(softcap=5.0, dropout=Dropout(0.2, 7))),
    Case("packed, rows past the end", 1, 946, 946, 4, 2, 64, 64, Options(tw.Causal(), ragged=PACKED)),
    Case("one query", 4, 1, 2049, 8, 2, 128, 128, Options(tw.Causal())),
)


def inputs(case: Case, device: str, dtype: str = "bfloat16", seed: int = 0) -> tuple[Inputs[Tensor], Partial]:
    """Leaves that need gradients, and what comes in from above."""
    x = testing.tensors(case.inputs(seed), dtype, device).map(lambda t: t.requires_grad_())
    do, dlse = (torch.from_numpy(a).to(device) for a in case.upstream(seed))
    return x, Partial(do.to(x.q.dtype), dlse.float())


def placed(case: Case, device: str) -> Case:
    """The case with its offsets on the device, where somebody keeps them who captures graphs."""
    packed = case.options.ragged
    if packed is None:
        return case
    sides = (torch.as_tensor(side).to(device) for side in (packed.q_offsets, packed.kv_offsets))
    return replace(case, options=replace(case.options, ragged=tw.Ragged.from_offsets(*sides)))


def step(
    case: Case, x: Inputs[Tensor], grads: Partial, backend: str, between: Callable[[], None] = lambda: None
) -> list[Tensor]:
    """o, lse and the gradient of every input."""
    try:
        partial = testing.call(case, x, backend)
    except Unsupported as error:
        pytest.skip(f"refused: {'; '.join(error.reasons)}")
    between()
    return [t.detach() for t in (*partial, *torch.autograd.grad(partial, [t for _, t in x.present()], grads))]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.fixture
def cuda(device: str) -> str:
    """The device, where it is a GPU."""
    if not device.startswith("cuda"):
        pytest.skip("is about CUDA")
    return device


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_hundred_runs_are_bitwise_equal(case: Case, dtype: str, backend: str, device: str) -> None:
    x, grads = inputs(case, device, dtype)
    first = step(case, x, grads, backend)
    assert all(same(step(case, x, grads, backend), first) for _ in range(99 if device != "cpu" else 2))


def poison(device: str) -> None:
    """Memory that the next calls get holds NaN in every float dtype: blocks of every size, filled and freed."""
    if device.startswith("cuda"):
        sizes = [512] * 64 + [2**14] * 64 + [2**18] * 32 + [2**20] * 32 + [2**23] * 16 + [2**26] * 4
        blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
        torch.cuda.synchronize()
        del blocks


@contextmanager
def filled(device: str) -> Iterator[None]:
    """Every `torch.empty` is filled with NaN as well, where kernels are asked to be deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        poison(device)
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_memory_that_holds_nan_before_use_changes_nothing(case: Case, backend: str, device: str) -> None:
    x, grads = inputs(case, device)
    clean = step(case, x, grads, backend)
    poison(device)
    assert same(step(case, x, grads, backend, lambda: poison(device)), clean)
    with filled(device):
        assert torch.empty(3, device=device).isnan().all()
        assert same(step(case, x, grads, backend), clean)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_captured_graph_replays_what_eager_computes(case: Case, backend: str, cuda: str) -> None:
    case, (x, grads) = placed(case, cuda), inputs(case, cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(case, x, grads, backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(case, x, grads, backend)
    for seed in (1, 2):
        fresh, above = inputs(case, cuda, seed=seed)
        with torch.no_grad():
            for (_, mine), (_, theirs) in zip(x.present(), fresh.present(), strict=True):
                mine.copy_(theirs)
            for mine, theirs in zip(grads, above, strict=True):
                mine.copy_(theirs)
        graph.replay()
        torch.cuda.synchronize()
        assert same(found, step(case, fresh, above, backend))


def test_streams_do_not_disturb_each_other(backend: str, cuda: str) -> None:
    case = CASES[0]
    tasks = [inputs(case, cuda, seed=seed) for seed in range(8)]
    alone = [step(case, *task, backend) for task in tasks]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in tasks]
    found = []
    for task, stream in zip(tasks, streams, strict=True):
        with torch.cuda.stream(stream):
            found.append([step(case, *task, backend) for _ in range(5)])
    torch.cuda.synchronize()
    assert all(same(run, right) for runs, right in zip(found, alone, strict=True) for run in runs)


def test_a_second_device_is_used_where_the_tensors_are(backend: str, cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = CASES[0]
    here, there = (step(case, *inputs(case, f"cuda:{i}"), backend) for i in (0, 1))
    assert torch.cuda.current_device() == 0 and {t.device.index for t in there} == {1}
    assert same(here, [t.to("cuda:0") for t in there])


def test_autocast_computes_in_its_dtype(backend: str, device: str) -> None:
    x, grads = inputs(CASES[0], device, "float32")
    with torch.autocast(device.partition(":")[0], torch.bfloat16):
        o, lse = testing.call(CASES[0], x, backend)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    half = x.map(lambda t: t.detach().bfloat16().requires_grad_())
    right = step(CASES[0], half, Partial(grads.o.bfloat16(), grads.lse), backend)
    found = torch.autograd.grad((o, lse), [t for _, t in x.present()], (grads.o.bfloat16(), grads.lse))
    assert same([o.detach(), *(t.bfloat16() for t in found)], [right[0], *right[2:]])
    assert all(t.dtype == torch.float32 for t in found)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_compiled_is_eager(case: Case, backend: str, device: str) -> None:
    torch.compiler.reset()
    x, grads = inputs(case, device)
    right = step(case, x, grads, backend)

    def forward(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip([name for name, _ in x.present()], tensors, strict=True))
        return tuple(testing.call(case, Inputs(**named), backend))

    kind = "inductor" if device.startswith("cuda") else "aot_eager"
    leaves = [t for _, t in x.present()]
    partial = torch.compile(forward, fullgraph=True, backend=kind)(*leaves)
    assert same([t.detach() for t in (*partial, *torch.autograd.grad(partial, leaves, grads))], right)


# more than 2³¹ elements, or nearly (the numbers are those of tests/test_reported.py)


def room(device: str, gib: int) -> None:
    """Skip where the device has less free memory than this."""
    if not device.startswith("cuda"):
        pytest.skip("takes the memory of a GPU")
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0] // GIB
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free} are free")


def draw(b: int, n: int, h: int, d: int, device: str) -> Tensor:
    """Stored "b h n d", as the cases were reported."""
    return torch.randn(b, h, n, d, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()


def ends(name: str, x: Inputs[Tensor], backend: str) -> list[Result]:
    """Attention and its gradients on tensors too large to check, held against the definition in the first and the last entry
    and head."""
    do, dlse = torch.randn_like(x.q), torch.randn(x.q.shape[0], x.q.shape[2], x.q.shape[1], device=x.q.device)
    partial = tw.attention_with_lse(x.q, x.k, x.v, backend=backend)
    found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(partial, (x.q, x.k, x.v), (do, dlse)), strict=True))
    results = []
    for at in (slice(0, 1), slice(-1, None)):
        part = {key: t.detach()[at][:, :, at] for key, t in {"o": partial.o, **found}.items()}
        part["lse"] = partial.lse.detach()[at, at]
        mine = Answer({key: t.double().cpu().numpy() for key, t in part.items()})
        few, above = x.map(lambda t, at=at: t.detach()[at][:, :, at]), Partial(do[at][:, :, at], dlse[at, at])
        results += testing.judge(Case(name), few, above, mine)
    return results


def test_t07_a_batch_of_8300_single_tokens(backend: str, device: str) -> None:
    q, k, v = (torch.randn(8300, 1, 16, 128, device=device).bfloat16().requires_grad_() for _ in range(3))
    o = tw.attention(q, k, v, backend=backend)
    do = torch.randn_like(o)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    assert torch.equal(o, v) and torch.equal(dv, do)
    # zero but for the order of sums
    assert all(x.norm() <= torch.finfo(torch.bfloat16).eps * do.norm() for x in (dq, dk))


def test_t08_more_than_two_to_the_31_elements_of_q(backend: str, device: str, hold) -> None:
    room(device, 48)
    x = Inputs(draw(400, 10496, 4, 128, device), *(draw(400, 128, 4, 128, device) for _ in range(2)))
    assert x.q.numel() > 2**31
    hold("T08", "128", ends("T08", x, backend))


def test_t09_more_than_two_to_the_31_bytes_of_each(backend: str, device: str, hold) -> None:
    room(device, 40)
    x = Inputs(*(draw(1600, 729, 16, 72, device) for _ in range(3)))
    assert 2 * x.q.numel() > 2**31
    hold("T09", "72", ends("T09", x, backend))


def test_the_ends_of_a_small_one(backend: str, device: str, hold) -> None:
    """What holds the large cases up, where anything can hold it."""
    x = Inputs(draw(3, 97, 2, 64, device), *(draw(3, 61, 2, 64, device) for _ in range(2)))
    hold("ends", "64", ends("ends", x, backend))
