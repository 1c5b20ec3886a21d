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
    for rank, checks in enumerate(workers.run(2, "checks", tmp_path, list(workers.cases(2)), kind="cuda")):
        assert isinstance(checks, dict), f"rank {rank} {checks}"
        for check, found in checks.items():
            assert isinstance(found, dict), f"rank {rank}, {check}: {found}"
            wrong = {name: (error, limit) for name, (error, limit) in found.items() if not error <= limit}
            assert not wrong, f"rank {rank}, {check}"


def test_a_lost_device_is_named_at_the_deadline(tmp_path):
    first, second = workers.run(2, "faults_of_two", tmp_path, kind="cuda")
    assert second == "died"
    assert isinstance(first, dict), first
    for name in ("silent", "dies"):
        error, late, written = first[name]
        assert error.startswith("PeerLost: rank 1 of the group was lost at step 0")
        assert late < 2.0 + ABORT_S
        assert not written
