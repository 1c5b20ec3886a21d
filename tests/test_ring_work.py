"""The benchmark of a ring's work on one device: right shares, real seconds, a record that reads back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tilewise.bench import ring_work
from tilewise.bench.ring import Shape


def test_a_record_of_every_row(tmp_path: Path):
    path = tmp_path / "work.json"
    asked = ["--ranks", "2", "3", "--tokens", "40", "--heads", "4", "2", "16", "--device", "cpu", "--json", str(path)]
    ring_work.main(asked)
    record = json.loads(path.read_text())
    rows = record["rows"]
    assert [(row["ranks"], row["pass"]) for row in rows] == [
        (ranks, name) for ranks in (2, 3) for name in ("forward", "forward+backward")
    ]
    for row in rows:
        assert row["work_over_whole"] == pytest.approx(row["whole_seconds"] / row["work_seconds"])
        assert 0 < row["simulated_over_whole"] <= 1
    assert record["command"].startswith("python -m tilewise.bench.ring_work --ranks 2 3")


def test_every_rank_is_given_its_own_rows():
    x = Shape(4, 2, 16).tensors(48, torch.device("cpu"), torch.float32)
    problem = ring_work.Problem.describe(ring_work.Inputs(*x[:3]), ring_work.Options(ring_work.Causal()))
    sides = ring_work.sides_named("zigzag", problem, 3)
    plan = ring_work.make_plan(problem, *sides, ring_work.method_named("ring"))
    given = ring_work.forward_shares(plan, (x[0], x[1], x[2]))
    assert [one["q"][0].shape[1] for one in given] == plan.q.counts
    rows = torch.cat([one["q"][0] for one in given], 1)[:, torch.from_numpy(plan.q.inverse)]
    assert torch.equal(rows, x[0])
