"""Counters: tables of Nsight Compute are read as they are, and every way not to get one has a sentence."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise import cost
from tilewise.bench import ncu, traffic
from tilewise.bench.ncu import Kernel, Refused
from tilewise.bench.report import Note
from tilewise.bench.traffic import TrafficRow, Workload
from tilewise.cost import Passes
from tilewise.cost.paper import STANDARD
from tilewise.mask import Lengths
from tilewise.problem import Inputs, Options, Problem
from tilewise.reference import plain

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
    '"Section Name","Metric Name","Metric Unit","Metric Value"'
)


def line(number: int, name: str, metric: str, unit: str, value: str, process: int = 4242) -> str:
    where = f'"1","7","(128, 1, 1)","(8, 16, 64)","0","9.0","Command line profiler metrics","{metric}","{unit}","{value}"'
    return f'"{number}","{process}","python3.12","127.0.0.1","{name}",{where}'


GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_f16_128x128, 3>(T1::Params)"

PRINTED = "\n".join(
    [
        "==PROF== Connected to process 4242 (/usr/bin/python3.12)",
        "loading weights, 100% done",
        '==PROF== Profiling "Kernel2" - 0: 0%....50%....100% - 1 pass',
        HEAD,
        line(0, GEMM, "dram__bytes_read.sum", "byte", "268,697,600"),
        line(0, GEMM, "dram__bytes_write.sum", "Gbyte", "2.13"),
        "UserWarning: something in between",
        line(0, GEMM, "gpu__time_duration.sum", "usecond", "1,234.50"),
        line(0, GEMM, "lts__t_bytes.sum", "Mbyte", "4,500.25"),
        "",
        HEAD,
        line(1, "_forward", "dram__bytes_read.sum", "Kbyte", "12"),
        line(1, "_forward", "dram__bytes_write.sum", "byte", "0"),
        line(1, "_forward", "gpu__time_duration.sum", "ns", "52000"),
        line(1, "_forward", "", "", ""),
        line(0, "other process", "dram__bytes_read.sum", "byte", "1", process=4243),
        "==PROF== Disconnected from process 4242",
    ]
)


def test_a_table_is_read_whatever_is_printed_around_it():
    gemm, forward, other = ncu.parse(PRINTED)
    assert gemm.name == GEMM and forward.name == "_forward" and other.name == "other process"
    assert gemm.metrics == pytest.approx(
        {
            "dram__bytes_read.sum": 268697600, "dram__bytes_write.sum": 2.13e9,
            "gpu__time_duration.sum": 1.2345e-3, "lts__t_bytes.sum": 4.50025e9,
        }
    )  # fmt: skip
    assert forward.metrics == pytest.approx(
        {"dram__bytes_read.sum": 12000, "dram__bytes_write.sum": 0, "gpu__time_duration.sum": 52e-6}
    )
    assert ncu.total([gemm, forward], lambda x: x["dram__bytes_read.sum"]) == 268709600


def test_a_number_that_is_off_is_seen():
    wrong = PRINTED.replace("268,697,600", "268,697,601")
    assert ncu.parse(wrong) != ncu.parse(PRINTED)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "ncu printed no table: nothing at all"),
        ("==PROF== Connected\n==ERROR== something new\n", "ncu printed no table: ==ERROR== something new"),
        (HEAD, "no kernel ran while counting was on"),
        (HEAD + "\n" + line(0, "k", "dram__bytes_read.sum", "byte", "n/a"), "no number for dram__bytes_read.sum: 'n/a'"),
        (HEAD + "\n" + line(0, "k", "dram__bytes_read.sum", "furlong", "3"), "in 'furlong', which is no unit known here"),
    ],
)
def test_what_is_no_table_is_refused(text: str, says: str):
    with pytest.raises(Refused, match=says):
        ncu.parse(text)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An `ncu` that writes given text into its log, prints something, and ends with a status."""

    def install(log: str, printed: str = "", status: int = 0, known: str = "") -> Path:
        script = tmp_path / "ncu"
        script.write_text(
            f"#!{sys.executable}\nimport sys, pathlib\nargs = sys.argv[1:]\n"
            f"if '--query-metrics' in args:\n    print({known!r}); sys.exit(0)\n"
            f"pathlib.Path({str(tmp_path / 'asked')!r}).write_text(chr(10).join(args))\n"
            f"pathlib.Path(args[args.index('--log-file') + 1]).write_text({log!r})\n"
            f"print({printed!r}, file=sys.stderr)\nsys.exit({status})\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return tmp_path / "asked"

    return install


def test_kernels_of_a_command_are_counted(fake):
    asked = fake(PRINTED)
    assert ncu.count(["python", "x.py"], ["a.sum", "b.sum"]) == ncu.parse(PRINTED)
    arguments = asked.read_text().splitlines()
    assert arguments[-2:] == ["python", "x.py"] and "a.sum,b.sum" in arguments and "--profile-from-start" in arguments


@pytest.mark.parametrize(
    ("log", "printed", "status", "says"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "", 1, "only administrators"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "", 1, "does not hand them through"),
        ("==WARNING== No kernels were profiled.", "", 0, "no kernel ran while counting was on"),
        ("==ERROR== Failed to find metric dram__x", "", 9, "lacks a metric"),
        ("", "Traceback\nOutOfMemoryError: CUDA out of memory", 1, "with status 1: OutOfMemoryError: CUDA out of memory"),
        ("", "", 3, "with status 3: no word"),
    ],
)
def test_every_refusal_has_a_sentence(fake, log: str, printed: str, status: int, says: str):
    fake(log, printed, status)
    with pytest.raises(Refused, match=says):
        ncu.count(["true"], ["a.sum"])


def test_a_profiler_that_is_absent_slow_or_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match=r"ncu is not on the PATH"):
        ncu.count(["true"], ["a.sum"])
    (tmp_path / "ncu").write_text("no program")
    (tmp_path / "ncu").chmod(0o755)
    with pytest.raises(Refused, match=r"ncu does not start"):
        ncu.metrics()
    fake(PRINTED)
    monkeypatch.setattr(ncu, "LIMIT_S", 0.0)
    with pytest.raises(Refused, match=r"ncu took longer than 0.0 s"):
        ncu.metrics()


def test_metrics_that_this_chip_lacks_are_not_asked_for(fake):
    fake("", known="Device NVIDIA H200 (GH100)\n----\nMetric Name   Metric Type\nlts__t_bytes  Counter  # of bytes\n"
                   "l1tex__m_xbar2l1tex_read_bytes  Counter\n")  # fmt: skip
    assert ncu.metrics() == [*ncu.NEEDED, "l1tex__m_xbar2l1tex_read_bytes.sum"]


# measuring

TINY = [
    Workload("tiny", "standard", "mask-torch,dropout", b=2, n=37, h=3, d=16, dtype="float32"),
    Workload("tiny", "tilewise", b=2, n=37, h=3, d=16, dtype="float32", mask="causal"),
]


def table(*kernels: str) -> str:
    numbers = dict(zip(ncu.NEEDED, (1000, 500, 4000, 7), strict=True)) | {"sm__ops_path_tensor_src_fp16_dst_fp32.sum": 64}
    lines = [line(i, name, key, "", str(x)) for i, name in enumerate(kernels) for key, x in numbers.items()]
    return "\n".join([HEAD, *lines])


def test_workloads_are_timed_counted_and_set_beside_the_model(fake):
    fake(table("gemm", "softmax"), known="lts__t_bytes Counter")
    heard: list[str] = []
    everything = list(traffic.measure(TINY, "cpu", heard.append))
    found = [row for row in everything if isinstance(row, TrafficRow)]
    ways = [(who, way) for who in ("standard", "tilewise") for way in ("forward", "backward")]
    assert len(found) == len(everything) and [(row.who, row.name) for row in found] == ways
    for row in found:
        assert (row.dram_bytes, row.l2_bytes, row.matrix_flops) == (3000, 8000, 128) and row.ms > 0
        assert [kernel["name"] for kernel in row.kernels] == ["gemm", "softmax"]
        assert 0 < row.model["least_bytes"] <= row.model["asked_bytes"] and row.json()["pass"] == row.name
    problem = traffic.describe(TINY[0], "cpu")
    assert found[0].model["least_bytes"] == cost.standard(problem, passes=Passes(mask="torch", dropout=True)).bytes
    assert "tiny standard mask-torch,dropout forward: counting" in heard


def test_without_counters_there_are_times_and_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = list(traffic.measure(TINY[1:], "cpu", lambda text: None))
    rows, notes = [x for x in found if isinstance(x, TrafficRow)], [x for x in found if isinstance(x, Note)]
    assert len(rows) == len(notes) == 2
    assert all(row.dram_bytes is None and row.l2_bytes is None and row.ms > 0 for row in rows)
    assert {note.reason for note in notes} == {"Nsight Compute's command ncu is not on the PATH"}


def test_a_workload_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))

    def failing(work: Workload, way: str, device: str):
        raise RuntimeError("CUDA out of memory.\nTried to allocate 20 GiB")

    monkeypatch.setattr(traffic, "prepare", failing)
    notes = list(traffic.measure(TINY, "cpu", lambda text: None))
    assert len(notes) == 4
    assert all(isinstance(note, Note) and "out of memory. Tried" in note.reason for note in notes)


@pytest.mark.parametrize("passes", ["", "mask-add", "mask-torch"])
def test_standard_attention_is_attention(passes: str):
    work = Workload("tiny", "standard", passes, b=2, n=37, h=3, d=16, dtype="float64")
    o = traffic.prepare(work, "forward", "cpu")().transpose(1, 2).numpy()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((2, 3, 37, 16), generator=generator).double().transpose(1, 2).numpy() for _ in range(3))
    mask = Lengths([37 - traffic.HIDDEN] * 2) if passes else None
    right = plain.attention(Problem.describe(Inputs(q, k, v), Options(mask)), Inputs(q, k, v)).o
    assert np.linalg.norm(o - right) <= 37 * np.finfo(np.float64).eps * np.linalg.norm(right)
    assert np.linalg.norm(o * 1.001 - right) > 37 * np.finfo(np.float64).eps * np.linalg.norm(right)


def test_one_call_is_counted(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []
    right = traffic.prepare

    def prepared(work: Workload, way: str, device: str):
        call = right(work, way, device)
        return lambda: made.append(f"{work.name} {way}") or call()

    monkeypatch.setattr(traffic, "prepare", prepared)
    traffic.run_counted(json.dumps(asdict(TINY[1])), "backward", "cpu")
    assert set(made) == {"tiny tilewise backward"} and len(made) == 4  # three that compile and allocate, one that counts


def test_names_of_workloads_are_theirs_alone():
    names = [work.name for work in traffic.WORKLOADS]
    assert len(set(names)) == len(names)
    assert {work.passes for work in traffic.WORKLOADS if work.case == "figure 2"} <= set(STANDARD)


def test_long_names_of_kernels_are_cut():
    kernels = [Kernel("k" * 500, dict.fromkeys(ncu.NEEDED, 2.0))]
    assert traffic.row(TINY[1], "forward", 1.0, kernels, "cpu").kernels[0]["name"] == "k" * traffic.NAME
