"""Attention over two GPUs that talk over NCCL: the same numbers as on one, and an end at the deadline where one is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import ring_workers as workers

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ABORT_S = 10.0
"""Within which of the deadline both have given up."""


def test_two_devices_are_one(tmp_path):
    names = [*workers.cases(2), "said_before"]
    for rank, checks in enumerate(workers.run(2, "checks", tmp_path, names, kind="cuda")):
        assert isinstance(checks, dict), f"rank {rank} {checks}"
        for check, found in checks.items():
            assert isinstance(found, dict), f"rank {rank}, {check}: {found}"
            wrong = {name: (error, limit) for name, (error, limit) in found.items() if not error <= limit}
            assert not wrong, f"rank {rank}, {check}"


def test_a_lost_device_is_named_at_the_deadline(tmp_path):
    first, second = workers.run(2, "faults_of_two", tmp_path, kind="cuda")
    assert second == "died", f"rank 1 {second}; rank 0 {first}"
    assert isinstance(first, dict), f"rank 0 {first}"
    for name in ("silent", "dies"):
        error, late, written = first[name]
        seen = f"{name}: after {late:.1f} s {error}; gradients written: {written}"
        assert error.startswith("PeerLost: rank 1 of the group was lost at step 0"), seen
        assert late < 2.0 + ABORT_S, seen
        assert not written, seen
