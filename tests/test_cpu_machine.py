"""What surrounds the CPU kernels: targets that are not here, the store on disk, threads and forks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("llvmlite")

from cpu_code import runnable, undefined

import tilewise as tw
from tilewise.backends.cpu import backward_kernel, decode_kernel, forward_kernel, machinecode, store, threads
from tilewise.backends.cpu.target import AVX2, AVX512, NEON
from tilewise.backends.cpu.vector import ADDRESS, BF16, F32, Module

needs_kernels = pytest.mark.skipif(not runnable(), reason="no target of this computer")
TARGETS = {"AVX2": AVX2, "AVX-512": AVX512, "NEON": NEON}
MACHINES = {"AVX2": 62, "AVX-512": 62, "NEON": 183}
"""What an ELF file says its processor is: EM_X86_64, EM_AARCH64."""


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kernel", ["forward", "decode", "backward"])
def test_every_target_compiles_without_its_hardware(name, kernel):
    """Untested on hardware that is not here; that LLVM makes an object file of it is all that this says."""
    target = TARGETS[name]
    kinds = (BF16, F32)
    module = {
        "forward": lambda: forward_kernel.write(target, *kinds),
        "decode": lambda: decode_kernel.write(target, *kinds),
        "backward": lambda: backward_kernel.write(target, backward_kernel.Kinds(*kinds)),
    }[kernel]()
    code = machinecode.compile(module)
    assert code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == MACHINES[name]
    assert kernel.encode() in code and not undefined(code)


def test_a_call_of_a_library_would_be_noticed():
    module = Module(AVX2)
    with module.function("go", (ADDRESS,), exported=True) as code:
        number = code.get(code.arguments[0])
        code.put(code.arguments[0], code.intrinsic("llvm.sin", F32, number))
    assert undefined(machinecode.compile(module)) == ["sinf"]


# ---- the store


def written(number: int) -> Module:
    """A function that writes a number."""
    [target, *_] = runnable()
    module = Module(target)
    with module.function("go", (ADDRESS,), exported=True) as code:
        code.put(code.arguments[0], code.index(number))
    return module


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the store, and a process that knows no kernel."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "_libraries", {})
    return tmp_path


def ask(monkeypatch: pytest.MonkeyPatch, number: int = 7) -> tuple[int, bool]:
    """What a kernel from the store writes, and whether it was compiled for that; as a new process would ask."""
    monkeypatch.setattr(store, "_libraries", {})
    compiled: list[int] = []

    def write() -> Module:
        compiled.append(1)
        return written(number)

    out = torch.zeros(1, dtype=torch.int64)
    threads.run(store.library("go", runnable()[0], write).address("go"), out.data_ptr(), 1)
    return int(out[0]), bool(compiled)


@needs_kernels
def test_a_second_process_does_not_compile(cache, monkeypatch):
    assert ask(monkeypatch) == (7, True)
    assert ask(monkeypatch, 8) == (7, False)  # what it would write now is not looked at
    assert [path.name for path in (cache / "cpu").iterdir()] == [store.path("go", runnable()[0]).name]


@needs_kernels
@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_corrupted_file_is_compiled_again(cache, monkeypatch, damage):
    assert ask(monkeypatch) == (7, True)
    path = store.path("go", runnable()[0])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\xff" if damage is None else damage)
    assert ask(monkeypatch) == (7, True)
    assert path.read_bytes() == whole and ask(monkeypatch) == (7, False)


@needs_kernels
def test_a_folder_that_cannot_be_written_is_no_matter(cache, monkeypatch):
    blocked = cache / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("TILEWISE_CACHE", str(blocked))
    assert ask(monkeypatch) == (7, True) and ask(monkeypatch) == (7, True)
    assert not store.keep("go", runnable()[0], b"x")


@needs_kernels
def test_other_kernels_other_files(cache, monkeypatch):
    here = runnable()[0]
    paths = {store.path(name, target) for name in ("a", "b") for target in (here, NEON)}
    assert len(paths) == 4


@needs_kernels
def test_many_threads_compile_once(cache, monkeypatch):
    compiled = []

    def write() -> Module:
        compiled.append(1)
        return written(7)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: store.library("go", runnable()[0], write), range(16)))
    assert len(compiled) == 1 and len(set(map(id, found))) == 1


@needs_kernels
def test_many_processes_share_a_folder(cache):
    code = "import torch, tilewise as tw; q = torch.ones(1, 3, 1, 5); print(tw.attention(q, q, q, backend='cpu').sum().item())"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in started] == ["15.0\n", "15.0\n"]


# ---- threads


def problem(seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    x = {name: torch.randn(2, 331, heads, 40, generator=generator) for name, heads in (("q", 6), ("k", 3), ("v", 3))}
    return x, {"mask": tw.Causal() & tw.Window(left=101), "backend": "cpu"}


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def gradients(x: dict[str, torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
    o, lse = tw.attention_with_lse(**leaves, **options)
    return [o, lse, *torch.autograd.grad((o.square().sum() + lse.sum()), list(leaves.values()))]


@needs_kernels
def test_results_are_bit_equal_whatever_the_threads(torch_threads):
    x, options = problem()
    decode = {name: t[:, -1:] if name == "q" else t for name, t in x.items()}
    found = []
    for count in (1, 2, 8, 1):
        torch_threads(count)
        found.append([*gradients(x, options), *gradients(decode, options)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_kernels
def test_eight_python_threads_at_once(torch_threads):
    torch_threads(2)
    problems = [problem(seed) for seed in range(4)]
    right = [gradients(*one) for one in problems]
    start = threading.Barrier(8)

    def work(at: int) -> bool:
        start.wait()
        same = []
        for turn in range(6):
            which = (at + turn) % 4
            same += [torch.equal(a, b) for a, b in zip(gradients(*problems[which]), right[which], strict=True)]
        return all(same)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes_on_its_own(torch_threads):
    torch_threads(2)
    x, options = problem()
    with torch.no_grad():
        right = tw.attention(**x, **options)  # the parent's pool has run
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # nothing but this call: torch's own operations may wait for threads that a child has not
        with torch.no_grad():
            same = np.array_equal(tw.attention(**x, **options).numpy(), right.numpy())
        os.write(write, b"same" if same and threads.available() == 1 else b"other")
        os._exit(0)
    os.close(write)
    assert os.read(read, 8) == b"same"
    assert os.waitpid(child, 0)[1] == 0


@needs_kernels
def test_without_a_pool_calls_run_on_one_thread(monkeypatch):
    x, options = problem()
    right = gradients(x, options)
    monkeypatch.setattr(threads, "pool", lambda: None)
    assert threads.available() == 1
    assert all(torch.equal(a, b) for a, b in zip(gradients(x, options), right, strict=True))
