"""Peak memory of forward and backward, measured by the operating system in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEASURE = """
import re
import torch
import tilewise as tw

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) / 1024

def run(n):
    q, k, v = (torch.randn(1, n, 1, 64, requires_grad=True) for _ in range(3))
    do = torch.randn(1, n, 1, 64)
    open("/proc/self/clear_refs", "w").write("5")  # forget the high-water mark so far
    before = status("VmRSS")
    {body}
    return status("VmHWM") - before

run(64)
print(run(16384))
"""
OURS = "tw.attention(q, k, v).backward(do)"
STANDARD = "((q[0, :, 0] @ k[0, :, 0].T / 8).softmax(-1) @ v[0, :, 0]).sum()"


def peak_mib(body: str) -> float:
    command = [sys.executable, "-c", MEASURE.replace("{body}", body)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_forward_and_backward_of_16384_tokens_take_at_most_64_mib():
    extra = peak_mib(OURS)
    print(f"peak extra memory at n = s = 16384, d = 64, one head, float32, forward + backward: {extra:.0f} MiB")
    assert 8 < extra <= 64  # the three gradients alone are 12 MiB, so less would mean that nothing was measured


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_the_measurement_sees_a_matrix_of_scores():
    assert peak_mib(STANDARD) > 1024
