"""What a cluster is made of: devices with a rate of work, nodes in which they reach each other directly, and the network cards
by which they reach the rest. All figures of devices that plans are priced with are here.

A message takes α + bytes / W: α seconds until it is under way, W bytes a second in one direction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._errors import OptionError

TILE = 128
"""Query rows that one processor of a device works on at a time."""

SPLIT = 512
"""Key rows from which a kernel shares one row of tiles among processors."""


@dataclass(frozen=True)
class Link:
    """One direction of a connection: α in seconds, W in bytes a second."""

    alpha_s: float
    bytes_s: float

    def __post_init__(self) -> None:
        if self.alpha_s < 0 or self.bytes_s <= 0:
            raise OptionError(f"link: {self.alpha_s} s and {self.bytes_s} bytes/s are not a latency and a bandwidth")


@dataclass(frozen=True)
class Rates:
    """What a kernel reaches in one direction. `flops_s`: by head size, in blocks without end; PARTIAL ones run at `torn` of it.
    `edge` and `torn_edge`: so many key rows a query row costs more than it sees, in a FULL and in a PARTIAL block: a block of k
    keys a row runs at k / (k + edge) of the full rate."""

    flops_s: tuple[tuple[int, float], ...]
    edge: int
    torn_edge: int
    torn: float = 1.0

    def at(self, head_size: int) -> float:
        """FLOP/s at a head size, on straight lines between those that are known."""
        sizes, rates = zip(*self.flops_s, strict=True)
        return float(np.interp(head_size, sizes, rates))


@dataclass(frozen=True)
class Host:
    """What the computer at a device takes, in seconds: `call_s` before the first operation of a pass, `agree_s` until ranks
    have agreed on a call (no message of forward is under way before), `work_s` to start an operation on the device, `post_s`
    the messages of a step."""

    call_s: float
    agree_s: float
    work_s: float
    post_s: float


@dataclass(frozen=True)
class Machine:
    """One device and its connections. `near`: to devices of its node; `far`: a network card; `launch_s`: what any kernel takes
    at least; `host`: the computer that tells it what to do; `source`: where the figures are from."""

    name: str
    forward: Rates
    backward: Rates
    processors: int
    hbm_bytes_s: float
    launch_s: float
    near: Link
    far: Link
    host: Host
    source: str

    def rates(self, backward: bool) -> Rates:
        return self.backward if backward else self.forward


NVLINK4 = Link(35e-6, 310e9)
"""Of a nominal 450 GB/s: NCCL in torch 2.11 between two H200, 30 November 2026, both ways at once: 84 µs for 16 MiB, 258 for
64, 890 for 256."""

NDR400 = Link(25e-6, 46e9)
"""46 to 48 GB/s of a nominal 50: maintainers in NVIDIA/nccl-tests issue 290. The latency of a send is an assumption."""

PYTHON = Host(call_s=600e-6, agree_s=600e-6, work_s=120e-6, post_s=200e-6)
"""This package under torch 2.11 on a Xeon beside two H200, 1 December 2026, by a clock around its parts."""

H200 = Machine(
    "h200",
    Rates(((64, 620e12), (128, 730e12), (256, 800e12)), edge=50, torn_edge=200),
    Rates(((64, 580e12), (128, 605e12), (256, 430e12)), edge=0, torn_edge=100, torn=0.885),
    processors=132,
    hbm_bytes_s=4.3e12,
    launch_s=5e-6,
    near=NVLINK4,
    far=NDR400,
    host=PYTHON,
    source="tilewise's hopper kernels (bf16; at d = 128 in a ring of two and alone), 90 % of 4.8 TB/s, NVLink 4, NDR",
)

H100 = Machine(
    "h100",
    Rates(((64, 497e12), (128, 660e12), (256, 756e12)), edge=130, torn_edge=300),
    Rates(((64, 474e12), (128, 561e12), (256, 550e12)), edge=200, torn_edge=600),
    processors=132,
    hbm_bytes_s=3.0e12,
    launch_s=5e-6,
    near=NVLINK4,
    far=NDR400,
    host=PYTHON,
    source="Shah et al. 2024, FlashAttention-3, figures 5 and 6 (fp16; edges assumed), 90 % of 3.35 TB/s, NVLink 4, NDR",
)

MACHINES = {machine.name: machine for machine in (H200, H100)}


@dataclass(frozen=True)
class Cluster:
    """Ranks 0 … node − 1 are the first node, and so on. `share`: ranks of a node that share one network card (1: one each;
    `node`: one for all of them)."""

    machine: Machine = H200
    node: int = 8
    share: int = 1

    def __post_init__(self) -> None:
        if self.node < 1 or self.share < 1:
            raise OptionError(f"cluster: a node of {self.node} with a card for every {self.share} ranks")
        if self.node % self.share:
            raise OptionError(f"cluster: {self.node} ranks of a node cannot share cards {self.share} by {self.share}")

    def __str__(self) -> str:
        m, cards = self.machine, f"one card for {self.share} ranks" if self.share > 1 else "one card a rank"
        near, far = m.near.bytes_s / 1e9, m.far.bytes_s / 1e9
        return f"nodes of {self.node} {m.name}, {near:.0f} GB/s inside, {far:.0f} GB/s between them ({cards})"

    def is_far(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Whether messages from ranks a to ranks b leave their node."""
        return a // self.node != b // self.node

    def card(self, rank: np.ndarray) -> np.ndarray:
        """The network card of a rank, numbered through the cluster."""
        return rank // self.share


def machine_named(name: str) -> Machine:
    """The device of this name, or an `OptionError` with those that are known."""
    if name not in MACHINES:
        raise OptionError(f"machine must be one of {', '.join(MACHINES)}, got {name!r}")
    return MACHINES[name]
