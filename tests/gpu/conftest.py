"""The suite of a GPU backend. It runs only when it is named, and is skipped where the device is not there:

    python -m pytest tests/gpu -p no:cacheprovider [-n 12] [--backend triton] [--device cuda] [--depth all] [--json FILE]

`--json` keeps what was found: counts, failures, and for every feature, dtype and head size the quantity closest to its
budget."""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise import backends
from tilewise.bench.report import now, provenance, write
from tilewise.testing import Result

HERE = Path(__file__).parent
EVERY_S = 20.0
"""Seconds after which the file is written again while the suite runs."""

Hold = Callable[[str, str, list[Result]], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tests/gpu")
    group.addoption("--device", default="cuda", help="where the GPU suite runs")
    group.addoption("--backend", default="triton", help="the backend that it tests")
    group.addoption("--depth", choices=("pairs", "all"), default="pairs", help="some triples of feature, dtype, size; or all")
    group.addoption("--json", default=None, help="where it writes what it found")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nothing here is collected unless a folder or file of this suite was named."""
    named = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return None if any(path.resolve().is_relative_to(HERE) for path in named) else True


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--json", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device, backend = (str(config.getoption(name)) for name in ("--device", "--backend"))
    mine = [item for item in items if item.path.is_relative_to(HERE)]  # pytest hands over everybody's
    for item in mine:
        item.add_marker(pytest.mark.filterwarnings("default"))  # minutes of a GPU are no place to stumble over a deprecation
    if device.startswith("cuda") and not torch.cuda.is_available():
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=f"needs the device {device}"))
    elif mine and backend not in backends.ORDER:
        raise pytest.UsageError(f"backend {backend!r} is unknown; there are {', '.join(backends.ORDER)}")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--backend"))


@pytest.fixture
def hold(request: pytest.FixtureRequest) -> Hold:
    """Keep results under a feature and a head size, and fail unless all of them are within budget."""

    def held(feature: str, head: str, results: list[Result]) -> None:
        for r in results:
            row = [feature, r.dtype, head, r.quantity, r.error, r.budget]
            request.node.user_properties.append(("result", row))
        failed = [f"{r.quantity}: {r.error:.2e} over {r.budget:.2e} {r.detail}" for r in results if not r.ok]
        assert not failed, "\n".join(failed)

    return held


class Recorder:
    """Counts what happened and keeps the worst quantity of every feature, dtype and head size; its file is always whole."""

    def __init__(self, config: pytest.Config) -> None:
        self.file, self.start, self.written = Path(str(config.getoption("--json"))), time.monotonic(), 0.0
        self.about = {"backend": config.getoption("--backend"), "device": config.getoption("--device")}
        self.command, self.date = shlex.join(["python", "-m", "pytest", *config.invocation_params.args]), now()
        self.counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)
        self.worst: dict[tuple[str, str, str], tuple[str, float, float]] = {}
        self.failed: dict[str, str] = {}
        self.skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed[report.nodeid] = str(getattr(crash, "message", report.longrepr))[:500]
        if report.outcome == "skipped":
            self.skipped[str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)] += 1
        for name, row in report.user_properties if report.when == "call" else ():
            if name == "result" and isinstance(row, list):
                self.keep(row)
        if time.monotonic() - self.written > EVERY_S:
            self.save()

    def keep(self, row: list[Any]) -> None:
        feature, dtype, head, quantity, error, budget = row
        before = self.worst.get((feature, dtype, head))
        if before is None or _overrun(error, budget) > _overrun(*before[1:]):
            self.worst[feature, dtype, head] = quantity, error, budget

    def pytest_sessionfinish(self) -> None:
        self.save()

    def save(self) -> None:
        names = ("feature", "dtype", "head", "quantity", "error", "budget")
        rows = [dict(zip(names, (*key, *value), strict=True)) for key, value in sorted(self.worst.items())]
        for row in rows:
            row["error"] = row["error"] if math.isfinite(row["error"]) else None  # type: ignore[arg-type]
        told = {"seconds": round(time.monotonic() - self.start, 1), **self.counts}
        found = {"failures": self.failed, "skips": dict(self.skipped), "worst": rows}
        write(self.file, {**provenance(self.command, self.date), **self.about, **told, **found})
        self.written = time.monotonic()


def _overrun(error: float, budget: float) -> float:
    ratio = error / budget if budget else math.inf
    return math.inf if math.isnan(ratio) else ratio
